"""A checkpoint contains all state for resuming: with it results are equal, without any part of it they differ."""

import json

import children
import pytest

pytestmark = pytest.mark.slow


@pytest.mark.soak
def test_saves_validation_and_a_slow_disk_change_nothing(tmp_path, run_python):
    ended = run_python(
        """
        import time
        from training import *
        from tpufit import runtime
        from tpufit.checkpoint import CheckpointDirectory, read

        class Slow(CheckpointDirectory):
            def write(self, checkpoint):
                writing.append(checkpoint.step)
                while checkpoint.step in (4, 8) and done[-1][0] < checkpoint.step + 3:
                    time.sleep(0.001)  # until three more steps are done
                path = super().write(checkpoint)
                written.append(checkpoint.step)
                return path

        class Watch(Callback):
            def on_train_batch_end(self, batch, logs=None):
                done.append((self.model.steps_taken, len(writing) > len(written)))
                if self.model.steps_taken == 2:
                    counts.append(runtime.counts())

        writing, written, done, counts = [], [], [], []
        keep = ModelCheckpoint("slow", save_freq=4, keep_last=None)
        keep.checkpoint_writer.run.__class__ = Slow
        say("reference", run(8))
        say("every", run(8, "every"))
        say("slow", run(8, None, keep, Watch()))
        assert writing == [4, 8, 12, 16], writing
        meanwhile = [step for step, at_work in done if at_work]
        assert {5, 6, 7} <= set(meanwhile), done  # steps went on while step 4 was being written
        for step in writing:  # each holds its own step, whatever went on meanwhile
            kept = read(f"slow/step-{step:010d}")
            found = {float(value) for name, value in kept.training.items() if name.startswith("optimizer/step/")}
            assert found == {float(step)}, (step, found)
        after = runtime.counts() - counts[0]
        assert sum(after.graphs.values()) == 0, after.graphs

        def losses(**options):
            model = compiled()
            return fit(model, 8, **options)["loss"]
        assert losses() == losses(validation_data=(X[:30], Y[:30]))
        """,
        env=children.ENV,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    digests = dict(line.split() for line in ended.stdout.splitlines())
    assert len(set(digests.values())) == 1, digests


@pytest.mark.soak
def test_fifty_steps_with_saves_and_validation_compile_nothing_more(run_python):
    ended = run_python(
        """
        from training import *
        from tpufit import runtime

        class Watch(Callback):
            def on_epoch_end(self, epoch, logs=None):
                counts.append(sum(runtime.counts().graphs.values()))

        counts = []
        run(8, "run", Watch(), epochs=13, keep=2, validation_data=(X[:30], Y[:30]))
        print(counts)
        """,
        env=children.ENV,
    )
    counts = json.loads(ended.stdout)
    assert len(counts) == 13
    assert len(set(counts[1:])) == 1, counts


# Changes to a checkpoint of step 6; all except the first two remove something.
MUTATED = """
import json, hashlib, shutil, sys, warnings
from pathlib import Path
import safetensors.torch
from training import *
from tpufit.checkpoint.store import seal
from tpufit.errors import CheckpointError

def changed(name, state=lambda s: None, tensors=lambda t: None, manifest=lambda m: None):
    "A copy of the checkpoint with something else in it, and a manifest that agrees."
    folder = Path("changed", name, "step-0000000006")
    shutil.copytree("run/step-0000000006", folder)
    plain = json.loads((folder / "state.json").read_text())
    state(plain)
    (folder / "state.json").write_text(json.dumps(plain))
    held = safetensors.torch.load_file(folder / "training.safetensors")
    tensors(held)
    safetensors.torch.save_file(held, folder / "training.safetensors", metadata={"format": "pt"})
    own = json.loads((folder / "manifest.json").read_text())
    for file, entry in own["files"].items():
        data = (folder / file).read_bytes()
        entry.update(size=len(data), sha256=hashlib.sha256(data).hexdigest())
    manifest(own)
    (folder / "manifest.json").write_text(seal(own))
    return folder

def zero(prefix):
    def reset(tensors):
        names = [name for name in tensors if name.startswith(prefix)]
        assert names, (prefix, [*tensors])
        for name in names:
            tensors[name] = torch.zeros_like(tensors[name])
    return reset

def own(state, name):
    return next(entry["state"] for entry in state["callbacks"] if entry["class"] == name)

fresh = tpufit.utils.random.RNGState
tpufit.set_random_seed(SEED)
begun = fresh.now().state_dict()

def no_draws(state):
    state["draws"] = begun
    state["data"]["draws"] = begun

LEFT_OUT = {
    "nothing": {},
    "seed of the steps": {"state": lambda s: s["model"].update(seed=0)},
    "number of the step": {"state": lambda s: s["model"].update(step=0)},
    "random numbers of the host": {"state": no_draws},
    "offset in the data": {"state": lambda s: (s["data"].update(offset=0, batches=0), s["progress"].update(batches=0))},
    "order of the data": {"state": lambda s: s["data"].update(number=0)},
    "step of the optimizer": {"tensors": zero("optimizer/step/")},
    "moments of the optimizer": {"tensors": zero("optimizer/exp_avg/")},
    "moving average": {"tensors": zero("average/")},
    "sums of the metrics": {"tensors": zero("metric/")},
    "rate": {"state": lambda s: s["optimizers"]["optimizer"]["groups"][0].update(lr=1e-3)},
    "state of the schedule": {"state": lambda s: own(s, "Warm").update(dict=[["seen", 0]])},
}

def trained(*callbacks, **options):
    "The digest, and the losses of the epochs that are gone on with, in whose first the checkpoint is."
    history = fit(model, CORES, *callbacks, **options)
    return digest(model, history) + json.dumps(history["loss"][-3:], separators=(",", ","))

model = compiled()
keep = ModelCheckpoint("run", save_freq=6, keep_last=None)
say("reference", trained(keep))
for name, change in LEFT_OUT.items():
    folder = changed(name, **change)
    print(name, trained(resume=folder), sep=": ", flush=True)

older = changed("older", manifest=lambda m: m["versions"].update(torch_xla="2.7.1"))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    fit(model, CORES, resume=older)
print("warned:", *[w.message for w in caught if "bit-exact" in str(w.message)], flush=True)
"""


@pytest.mark.soak
@pytest.mark.parametrize("cores", [1, 8])
def test_every_part_of_a_checkpoint_is_needed(run_python, cores):
    ended = run_python(MUTATED.replace("CORES", str(cores)), env=children.ENV, timeout=240)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = ended.stdout.splitlines()
    expected = lines[0].split()[1]
    found = dict(line.split(": ") for line in lines[1:-1])
    assert found.pop("nothing") == expected
    assert len(found) == 11
    assert [name for name, digest in found.items() if digest == expected] == []
    assert "resuming from step 6 is not bit-exact: torch_xla: 2.7.1 -> 2." in lines[-1]


@pytest.mark.soak
def test_a_training_of_eight_cores_resumes_on_four(run_python):
    saved = run_python("from training import *; run(8, 'run', every=6)", env=children.ENV)
    assert saved.returncode == 0, saved.stderr
    ended = run_python(
        """
        from training import *
        model = compiled()
        fit(model, 4, resume="run/step-0000000006", batch_size=BATCH // 8, epochs=3)
        assert all(bool(value.isfinite().all()) for value in model.state_dict().values())
        say(model.steps_taken)
        """,
        env=children.ENV,
    )
    # Two batches of 32 rows of that epoch were done: four of its eight of 16 remain, and the eight of the next epoch.
    assert ended.stdout.strip() == "18", ended.stderr
    assert "resuming from step 6 is not bit-exact: cores: 8 -> 4" in ended.stderr
