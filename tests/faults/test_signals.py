"""SIGTERM and Ctrl-C, from outside and at any moment: the step is finished and saved, and resumed bit for bit."""

import os
import re
import signal
import textwrap

import children
import pytest

from tpufit.checkpoint import CheckpointDirectory

pytestmark = pytest.mark.slow

TERMINATED = -signal.SIGTERM  # Popen's value for a death by the signal; a shell shows 143, as for exit(143)


def steps(folder):
    """Return the checkpoints, and check that each is complete."""
    run = CheckpointDirectory(folder / "run")
    assert run.newest().step == run.steps()[-1]
    return run.steps()


def test_sigterm_in_a_step_and_a_new_process_resumes(tmp_path, run_python):
    with children.started("from training import *; run(8, 'run', Say(), Hold(6), every=5)", tmp_path) as child:
        child.wait_for("step 6")
        child.terminate()
        assert child.end() == 143
    begun = [int(step) for step in re.findall(r"step (\d+)", child.output)]
    done = [int(step) for step in re.findall(r"done (\d+)", child.output)]
    assert begun[-1] + 1 == done[-1] == steps(tmp_path)[-1] == 7  # the current step is the last, and it is saved
    ended = run_python("from training import *; print(run(8, 'run', resume=True))", env=children.ENV)
    assert ended.stdout.strip() == children.reference(8), ended.stderr


@pytest.mark.soak
def test_sigterm_while_the_first_step_is_traced(tmp_path):
    code = """
        from training import *

        def trace(*_):
            say("tracing")
            hold()

        model = compiled()
        model.module.register_forward_pre_hook(trace)
        fit(model, 8, Say(), ModelCheckpoint("run"))
        """
    with children.started(code, tmp_path) as child:
        child.wait_for("tracing")
        child.terminate()
        assert child.end() == 143
    assert steps(tmp_path) == [1]
    assert "step 1" not in child.output


SLOW = """
    from training import *
    from tpufit.checkpoint import CheckpointDirectory

    class Slow(CheckpointDirectory):
        def write(self, checkpoint):
            if checkpoint.step >= 2:
                say("writing", checkpoint.step)
                hold()
            return super().write(checkpoint)

    keep = ModelCheckpoint("run", save_freq=1, keep_last=None)
    keep.checkpoint_writer.run.__class__ = Slow
    run(1, None, Say(), keep)
    """


@pytest.mark.soak
def test_sigterm_while_a_checkpoint_is_written(tmp_path):
    with children.started(SLOW, tmp_path) as child:
        child.wait_for("writing 2")
        child.terminate()
        assert child.end() == 143
    done = re.findall(r"done (\d+)", child.output)
    assert steps(tmp_path) == [*range(1, int(done[-1]) + 1)]  # the pending checkpoint, and the last one


@pytest.mark.soak
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, TERMINATED), (signal.SIGINT, 1)])
def test_a_second_signal_does_not_wait_for_a_slow_disk(tmp_path, number, status):
    with children.started(SLOW, tmp_path) as child:
        child.wait_for("writing 2")
        child.send(number)
        child.wait_for_error({signal.SIGTERM: "SIGTERM: finishing", signal.SIGINT: "interrupted: finishing"}[number])
        child.send(number)
        ended = child.end()
    # After a second Ctrl-C Python ends itself by the signal, so that a shell sees it.
    assert ended in (status, -number)
    assert steps(tmp_path) == [1]


SLOWLY_READ = """
    from training import Noisy, hold, say

    class SlowlyRead(Noisy):
        def __reduce__(self):
            return read, ()

    def read():
        say("reading")
        hold()
        return Noisy()
    """


@pytest.mark.soak
def test_ctrl_c_in_a_terminal_shows_no_traceback_of_a_worker_that_starts(tmp_path):
    (tmp_path / "slowly.py").write_text(textwrap.dedent(SLOWLY_READ))
    code = """
        from torch.utils.data import DataLoader
        from slowly import *
        from training import *
        loader = DataLoader(SlowlyRead(), BATCH, num_workers=2, multiprocessing_context="spawn")
        fit(compiled(), 1, x=loader, batch_size=None)
        """
    with children.started(code, tmp_path, fresh=True) as child:
        child.wait_for("reading")
        os.killpg(child.process.pid, signal.SIGINT)
        assert child.end() in (1, -signal.SIGINT)
    assert child.errors.count("Traceback") == 1


@pytest.mark.soak
def test_ctrl_c_at_forty_random_moments(tmp_path, run_python):
    ended = run_python(
        """
        import os, random, signal, threading, time, warnings
        from training import *
        from tpufit.checkpoint import CheckpointDirectory

        warnings.simplefilter("ignore")
        moments = random.Random(0)
        epochs = 80
        expected = run(8, epochs=epochs)
        model = compiled()
        keep = ModelCheckpoint("run", save_freq=7)
        cut = 0
        while True:
            begun, sent = threading.Event(), threading.Event()
            first, moment = moments.randint(1, 4), moments.uniform(0, 0.02)

            def interrupt():
                begun.wait()
                time.sleep(moment)
                os.kill(os.getpid(), signal.SIGINT)
                sent.set()

            class Begin(Callback):
                def on_train_batch_begin(self, batch, logs=None):
                    taken = self.model.steps_taken - before
                    if cut < 40 and taken >= first:
                        begun.set()
                    if cut < 40 and taken == 6:  # however late the thread is, 40 interrupts come before the end
                        sent.wait()

            threading.Thread(target=interrupt, daemon=True).start()
            before = model.steps_taken
            try:
                history = fit(model, 8, Begin(), keep, epochs=epochs, resume=True)
                break
            except KeyboardInterrupt:
                cut += 1
                newest = CheckpointDirectory("run").newest()
                step = newest.state["model"]["step"]
                counts = {float(t) for n, t in newest.training.items() if n.startswith("optimizer/step/")}
                seen = [s["state"]["dict"][0][1] for s in newest.state["callbacks"] if s["class"] == "Warm"]
                assert counts == {float(step)} and seen == [step] and newest.step == step, (counts, seen, step)
                assert step == model.steps_taken > before, (before, step, model.steps_taken)
                rate = newest.state["optimizers"]["optimizer"]["groups"][0]["lr"]
                assert rate == 1e-3 * (1 + 0.1 * step), (rate, step)
        assert digest(model, history) == expected
        say("interrupted", cut)
        """,
        env=children.ENV,
        timeout=600,
    )
    assert ended.stdout.splitlines()[-1:] == ["interrupted 40"], ended.stdout + ended.stderr
