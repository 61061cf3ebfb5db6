"""The tracebacks in a notebook: the user's lines and the message, with tpufit's frames folded."""

import re

SHELL = """
    import torch, tpufit, warnings
    from IPython.core.interactiveshell import InteractiveShell

    warnings.simplefilter("ignore")
    shell = InteractiveShell.instance(colors="NoColor")
    shell.run_cell('''
    import tpufit, torch

    class Reads(tpufit.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            read(logs)

    def read(logs):
        return logs["nope"]

    x = torch.ones(8, 4)
    model = tpufit.Model(torch.nn.Linear(4, 4))
    model.compile("sgd", "mse", run_eagerly=True)
    ''')
    for cell in {cells!r}:
        print("CELL", cell)
        shell.run_cell(cell)
    """


def shown(run_python, *cells):
    ended = run_python(SHELL.format(cells=cells))
    assert ended.returncode == 0, ended.stderr
    return [part.partition("\n")[2] for part in ended.stdout.split("CELL ")[1:]]


def test_only_tpufits_frames_are_folded(run_python):
    wrong, callback, full, python = shown(
        run_python,
        "model.fit(x, x, epochs=-1)",
        "model.fit(x, x, callbacks=[Reads()], verbose=0)",
        "get_ipython().InteractiveTB.skip_hidden = False; get_ipython().showtraceback()",
        "import sys, traceback; print(*traceback.format_exception(sys.last_value))",
    )
    assert re.search(r"--> 1 model\.fit\(x, x, epochs=-1\)\s+\[\.\.\. skipping hidden \d+ frame\]", wrong)
    assert wrong.rstrip().endswith("ArgumentError: epochs must be a whole number of at least 0, got -1")
    assert wrong.count("tpufit/") == 1  # the line that raised it, which IPython always shows

    for line in ("model.fit(x, x, callbacks=[Reads()], verbose=0)", "read(logs)", 'return logs["nope"]'):
        assert re.search(rf"-> \d+ +{re.escape(line)}", callback), line
    assert callback.count("tpufit/") == 1 and callback.count("skipping hidden") == 2
    for everything in (full, python):
        assert {"device_turns.py", "run_fit.py", "loop.py"} <= set(re.findall(r"\w+\.py", everything))
