"""The examples, run as a user runs them."""

import ast
import importlib.util
import json
import os
import re
import sys
from pathlib import Path

import processes
import pytest
import xla_flags

ROOT = Path(__file__).resolve().parent.parent


def run(run_python, script, *arguments, anew=False):
    """Run an example as a user does; `anew` in a new Python without variables, so that torch_xla's output shows."""
    path = str(ROOT / script)
    # Whether the data come fast enough depends on the machine.
    code = "import runpy, sys, warnings; warnings.filterwarnings('ignore', 'the device waited for data'); "
    code += f"sys.argv = {[path, *arguments]!r}; runpy.run_path({path!r}, run_name='__main__')"
    environment = {"XLA_FLAGS": xla_flags.as_users_have_it() or None}  # they compute for long
    if anew:
        environment["PJRT_DEVICE"] = None
    process = run_python(code, timeout=600, env=environment)
    # torch_xla says what it chooses where a library imports it first: accelerate does, if transformers finds it.
    others = re.compile(r"^\S+ \S+ INFO mlflow\..*\n|^WARNING:root:Defaulting to PJRT_DEVICE=CPU\n", re.M)
    assert (process.returncode, others.sub("", process.stderr)) == (0, "")
    return process.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [pytest.param([], id="fp32"), pytest.param(["--bf16"], id="bf16", marks=pytest.mark.soak)]
)
def test_digits_reach_97_percent(run_python, tmp_path, flags):
    output = run(run_python, "examples/digits.py", *flags, anew=not flags)
    assert re.search(
        r"^8 cores \(XLA:CPU, virtual\) \| batch 8 x 8 = 64 \| lr 0.001 x 8 = 0.008 \(linear\)", output, re.M
    )
    assert float(re.search(r"accuracy ([\d.]+)%", output)[1]) >= 97
    assert re.search(r"^ 7 +Linear +64x10 ", output, re.M) and " ? " not in output.split("memory per core")[0]
    assert (tmp_path / "runs/digits/best.safetensors").is_file()
    assert {folder.name for folder in (tmp_path / "runs/digits/logs").iterdir()} == {"train", "validation"}
    for picture in ("history.png", "confusion.png"):
        assert (tmp_path / "runs/digits" / picture).read_bytes().startswith(b"\x89PNG")


@pytest.mark.soak
def test_custom_callback(run_python):
    output = run(run_python, "examples/custom_callback.py")
    assert re.search(r"reached 9\d\.\d% after \d+ epochs", output) and "slowest epoch" in output


@pytest.mark.soak
def test_one_cycle_beats_one_rate(run_python, tmp_path):
    output = run(run_python, "examples/one_cycle.py")
    assert 1e-3 < float(re.search(r"suggested learning rate: ([\d.e-]+)", output)[1]) < 1
    assert (tmp_path / "runs/one_cycle/lr_find.png").read_bytes().startswith(b"\x89PNG")
    one_rate, one_cycle = (float(share) for share in re.findall(r"^held-out digits .*: ([\d.]+)%", output, re.M))
    assert one_cycle >= 95 and one_cycle > one_rate


@pytest.mark.soak
def test_char_gpt_learns(run_python):
    output = run(run_python, "examples/char_gpt.py")
    losses = [float(loss) for loss in re.findall(r"- loss: ([\d.]+)", output)]
    assert losses[-1] < losses[0] < float(re.search(r"blindly guessed: loss ([\d.]+)", output)[1])
    written = output[output.index("\nThe ") :]
    assert len(written) > 400 and " the " in written


@pytest.mark.soak
def test_a_gpt_learns_from_a_file_and_from_packed_sentences(run_python):
    output = run(run_python, "examples/pretrain_gpt.py")
    losses = [float(loss) for loss in re.findall(r"- loss: ([\d.]+)", output)]
    assert len(losses) == 5 and 5.5 > losses[0] > losses[1] and losses[2] > losses[4]
    assert re.search(r"^TokenFile\(help.bin: [\d,]+ tokens in [\d,]+ rows of 64\)$", output, re.M)
    assert float(re.search(r"packed sentences: ([\d.]+)$", output, re.M)[1]) < losses[2]


@pytest.mark.soak
def test_a_gpt_in_parts(run_python):
    output = run(run_python, "examples/large_gpt.py")
    assert "| 18 of 52 parameters split, 1.263 MiB of 9.548 MiB state per core" in output
    assert "saved 834,304 parameters, read back on the host: the same" in output


@pytest.mark.soak
def test_bert_classifies_reviews(run_python):
    output = run(run_python, "examples/bert.py", anew=True)
    assert float(re.search(r"^96 sentences that it has not read: .*accuracy ([\d.]+)%", output, re.M)[1]) > 85
    assert len(re.findall(r"^(?:praise   |complaint) ", output, re.M)) == 4


@pytest.mark.soak
def test_the_gans_digits_resemble_real_digits(run_python):
    output = run(run_python, "examples/gan.py")
    before, after = re.findall(r"^(?:before|after) training: means differ by ([\d.]+), .* by ([\d.]+)$", output, re.M)
    assert all(float(late) < float(early) / 2 for early, late in zip(before, after, strict=True))


@pytest.mark.soak
def test_a_unet_finds_discs_and_squares(run_python):
    output = run(run_python, "examples/segmentation.py")
    assert float(re.search(r"IoU ([\d.]+)$", output, re.M)[1]) > 0.8


@pytest.mark.soak
def test_the_contrastive_example_matches_halves_of_digits(run_python):
    output = run(run_python, "examples/contrastive.py")
    first, first_five = re.search(r"first in (\d+)%, in the first five in (\d+)%$", output, re.M).groups()
    assert int(first) > 25 and int(first_five) > 60


@pytest.mark.soak
def test_the_kfold_example_writes_a_submission_of_five_folds(run_python, tmp_path):
    output = run(run_python, "examples/kfold.py")
    assert len(re.findall(r"^fold \d: ", output, re.M)) == 5
    scores = [float(score) for score in re.findall(r"AUROC ([\d.]+)", output)]
    assert len(scores) == 2 and min(scores) > 0.97
    assert len((tmp_path / "submission.csv").read_text().splitlines()) == 115


EPOCHS_OF = {"segmentation": 1, "contrastive": 2, "kfold": 12, "bert": 2, "gan": 1}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name == "contrastive" else pytest.mark.soak) for name in EPOCHS_OF],
)
def test_an_example_equals_a_plain_loop(run_python, name):
    path = str(ROOT / "examples" / f"{name}.py")
    code = f"""
        import sys
        sys.path.insert(0, {str(ROOT / "tests")!r})
        import plain_loops
        plain_loops.compare({path!r}, epochs={EPOCHS_OF[name]})
    """
    process = run_python(code, timeout=600)
    assert process.returncode == 0, process.stderr


@pytest.mark.soak
def test_augmentation_improves_digits(run_python):
    output = run(run_python, "examples/augmented_digits.py")
    plain, augmented = (float(share) for share in re.findall(r": +([\d.]+)%", output))
    assert augmented > max(plain, 80)


@pytest.mark.soak
def test_only_the_first_trial_of_a_sweep_compiles(run_python):
    pytest.importorskip("optuna")
    output = run(run_python, "examples/optuna_sweep.py")
    compiled = [int(count) for count in re.findall(r"(\d+) programs compiled", output)]
    assert len(compiled) == 12 and compiled[0] > 0 and not any(compiled[1:])
    assert re.search(r"^[1-9]\d* of 12 trials were pruned$", output, re.M)


@pytest.mark.soak
def test_mlflow_keeps_what_the_history_has(run_python):
    output = run(run_python, "examples/mlflow_tracking.py", "--epochs=2", anew=True)
    printed = re.findall(r" val_accuracy: ([\d.]+)", output)
    assert re.findall(r"^after \d+ steps+: val_accuracy ([\d.]+)$", output, re.M) == printed and len(printed) == 2
    assert re.search(r"FINISHED, with \{.*'width': '64'", output)


NOTEBOOKS = sorted(path.name for path in (ROOT / "examples").glob("*.ipynb"))
LIBRARIES = {"text.ipynb": "transformers", "colab.ipynb": "peft", "kaggle.ipynb": "timm"}
# By files, because a kernel's ports are chosen before it binds them, and another process may get them meanwhile.
EXECUTED = """
import nbclient, nbformat, sys
from traitlets.config import Config
notebook = nbformat.read(sys.argv[1], 4)
by_files = Config(KernelManager={"transport": "ipc"})
nbclient.NotebookClient(notebook, timeout=None, kernel_name="python3", config=by_files).execute()
outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
# What tqdm says where there are no widgets is not ours.
print([output.text for output in outputs if output.get("name") == "stderr" and "IProgress" not in output.text])
"""


@pytest.mark.soak
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_without_a_warning(tmp_path, name):
    if name in LIBRARIES and not importlib.util.find_spec(LIBRARIES[name]):
        pytest.skip("the extra libraries is not installed")
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = processes.run(
        [sys.executable, "-c", EXECUTED, str(ROOT / "examples" / name)],
        timeout=900,
        cwd=tmp_path,
        # These compute for long: unoptimized, a convolution takes many times as long.
        env={
            **os.environ,
            "PYTHONPATH": path,
            "PYTHONWARNINGS": "ignore:the device waited for data",  # which depends on the machine
            "IPYTHONDIR": str(tmp_path),
            "XLA_FLAGS": xla_flags.as_users_have_it(),
        },
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout == "[]\n"


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_stored_as_it_ran(name):
    cells = json.loads((ROOT / "examples" / name).read_text())["cells"]
    # Those that install, or need what a test doesn't have, are not run.
    run = [cell for cell in cells if cell["cell_type"] == "code" and "tags" not in cell["metadata"]]
    assert [cell["execution_count"] for cell in run] == list(range(1, len(run) + 1))
    outputs = [output for cell in run for output in cell["outputs"]]
    assert outputs and {output["output_type"] for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert "stderr" not in {output.get("name") for output in outputs}
    ast.parse("\n".join("".join(cell["source"]) for cell in run))


@pytest.mark.soak
def test_cached_images(run_python, tmp_path):
    output = run(run_python, "examples/cached_images.py", "--count", "96", "--epochs", "2")
    rates = re.search(r"^without the cache: ([\d,]+) samples/s\nwith the cache: ([\d,]+) samples/s", output, re.M)
    assert all(int(rate.replace(",", "")) > 0 for rate in rates.groups())
    assert re.search(r"^96 JPEGs of (8|12) classes", output)
    assert len(list((tmp_path / "runs/cached_images/photos-96").rglob("*.jpg"))) == 96
    assert (tmp_path / "runs/cached_images/cache-96").is_dir()
