"""Callbacks with counts, resumed in a new process."""

import json
import signal
import textwrap

import children
import pytest

pytestmark = pytest.mark.slow

COUNTED = """
    import json, os, signal
    from training import *
    from tpufit.callbacks import EarlyStopping, ReduceLROnPlateau

    class Leave(Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if self.model.steps_taken == {leave}:
                os.kill(os.getpid(), signal.SIGTERM)

    tpufit.set_random_seed(SEED)
    model = tpufit.Model(net())
    model.compile("adamw", "cross_entropy", scale_lr=None)
    stopping = EarlyStopping("loss", patience=4, min_delta=10.0)
    plateau = ReduceLROnPlateau("loss", factor=0.5, patience=2, min_delta=10.0, verbose=0)
    rates = []

    class Rates(Callback):
        def on_epoch_end(self, epoch, logs=None):
            rates.append((epoch, self.model.learning_rate))

    keep = [ModelCheckpoint("run")] if {keep} else []
    model.fit(Noisy(), batch_size=BATCH // 8, epochs=12, cores=8, verbose=0, resume={resume},
              callbacks=[stopping, plateau, *keep, Leave(), Rates()])
    print(json.dumps([stopping.stopped_epoch, model.steps_taken, rates[-2:]]))
    """


@pytest.mark.soak
def test_early_stopping_and_a_falling_rate_in_a_new_process(run_python):
    expected = run_python(COUNTED.format(leave=-1, keep=False, resume=False), env=children.ENV)
    assert expected.returncode == 0, expected.stderr
    epoch, step, rates = json.loads(expected.stdout)
    assert (epoch, step, len(rates)) == (4, 20, 2)
    left = run_python(COUNTED.format(leave=13, keep=True, resume=True), env=children.ENV)
    assert left.returncode == 143, left.stderr
    ended = run_python(COUNTED.format(leave=-1, keep=True, resume=True), env=children.ENV)
    assert ended.stdout == expected.stdout, ended.stderr


@pytest.mark.soak
def test_tensorboard_has_each_step_once_after_a_kill(tmp_path, run_python):
    code = """
        from training import *
        from tpufit.callbacks import TensorBoard
        board, held_out = TensorBoard("logs", update_freq=1), (X[:30], Y[:30])
        run(8, "run", Say(), board, Hold({}), every=4, resume=True, validation_data=held_out)
        """
    with children.started(code.format(11), tmp_path) as child:
        child.wait_for_checkpoint(8)
        child.wait_for("step 11")
        child.send(signal.SIGKILL)
        child.end()
    ended = run_python(code.format(-1), env=children.ENV)
    assert ended.returncode == 0, ended.stderr
    read = run_python(
        """
        import json
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        found = {}
        for run in ("train", "validation"):
            events = EventAccumulator(f"logs/{run}")
            events.Reload()
            found |= {f"{run}/{tag}": [e.step for e in events.Tensors(tag)] for tag in events.Tags()["tensors"]}
            found |= {f"{run}/{tag}": [e.step for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
        print(json.dumps(found))
        """
    )
    steps = json.loads(read.stdout)
    assert steps["train/batch_loss"] == [*range(1, 17)], read.stderr
    assert steps["train/epoch_loss"] == steps["validation/epoch_loss"] == [0, 1, 2, 3]
    assert steps["validation/evaluation_loss_vs_iterations"] == [4, 8, 12, 16]


LOGGED = """
    import json
    from training import *
    from tpufit.callbacks import CSVLogger, MLflowLogger, TensorBoard
    model = compiled()
    mlflow = MLflowLogger(tracking_uri="sqlite:///mlflow.db", update_freq=1)
    logs = [CSVLogger("log.csv"), TensorBoard("logs", update_freq=1), mlflow, ModelCheckpoint("run", save_freq=3)]
    fit(model, 1, *logs, Say(), Hold({hold}), resume=True, validation_data=(X[:30], Y[:30]))
    say("history", json.dumps([model.history.epoch, model.history.history]))
    say("plotted", [len(line.get_xdata()) for line in model.history.plot().axes[0].lines])
    client = mlflow.library.MlflowClient(mlflow.tracking_uri)
    names = ("loss", "val_loss", "epoch", "batch_loss")
    found = {{name: client.get_metric_history(mlflow.run_id, name) for name in names}}
    say("mlflow", json.dumps({{name: [(point.step, point.value) for point in own] for name, own in found.items()}}))
    """
SHOWN = """
    import json
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    found = {}
    for run in ("train", "validation"):
        events = EventAccumulator(f"logs/{run}")
        events.Reload()
        for tag in sorted(events.Tags()["scalars"]):
            found[f"{run}/{tag}"] = [(event.step, event.value) for event in events.Scalars(tag)]
    print(json.dumps(found))
    """


@pytest.mark.soak
def test_files_of_callbacks_equal_an_undisturbed_training(tmp_path, run_python):
    pytest.importorskip("mlflow")
    found = {}
    # After a checkpoint: without one a training would start from the beginning.
    faults = [(signal.SIGTERM, 143, 3, 5), (signal.SIGKILL, -9, 9, 11)]
    for name in ("whole", "broken off"):
        folder = tmp_path / name
        folder.mkdir()
        for number, status, saved, step in () if name == "whole" else faults:
            with children.started(LOGGED.format(hold=step), folder) as child:
                child.wait_for_checkpoint(saved)
                child.wait_for(f"step {step}")
                child.terminate() if number == signal.SIGTERM else child.send(number)
                assert child.end() == status, child.errors
        with children.started(LOGGED.format(hold=-1), folder) as child:
            assert child.end() == 0, child.errors
            said = [line for line in child.output.splitlines() if line.startswith(("history", "plotted", "mlflow"))]
        shown = run_python(f"import os; os.chdir({str(folder)!r})\n" + textwrap.dedent(SHOWN))
        assert shown.returncode == 0, shown.stderr
        curves = json.loads(shown.stdout)
        timed = ("input_bound", "steps_per_second")
        curves = {tag: points for tag, points in curves.items() if not tag.endswith(timed)}
        found[name] = (folder / "log.csv").read_text(), said, curves
    assert found["broken off"] == found["whole"], faults
    assert [step for step, _ in found["whole"][2]["train/batch_loss"]] == [*range(1, 17)]
