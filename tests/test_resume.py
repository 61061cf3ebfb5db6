"""Resuming from a checkpoint gives the same results as an uninterrupted training, bit for bit."""

import functools
import json
import os
import signal
import sys
import threading
import time

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import tpufit
from tpufit.callbacks import BackupAndRestore, Callback, CSVLogger, EarlyStopping, ModelCheckpoint
from tpufit.checkpoint import CheckpointDirectory, read
from tpufit.checkpoint.store import seal
from tpufit.errors import (
    ArgumentError,
    CallbackError,
    CheckpointBusyError,
    CheckpointMismatchError,
    CheckpointMissingError,
)
from tpufit.trainer import passes
from tpufit.utils.random import RNGState

pytestmark = [
    pytest.mark.cores(1, 8, timeout=600),
    # `RaisesRate`, with joined steps.
    pytest.mark.filterwarnings("ignore:a callback's on_train_batch_end has changed lr"),
]

ROWS, BATCH, EPOCHS = 120, 32, 3  # four batches in each epoch, the last is short
X = torch.from_numpy(np.random.default_rng(0).normal(size=(ROWS, 8)).astype(np.float32))
Y = (X.sum(1) > 0).long() + (X[:, 0] > 1).long()


class Noise(nn.Dropout):
    """Draws random numbers in evaluations too."""

    def forward(self, x):
        return nn.functional.dropout(x, self.p)


def net():
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), Noise(0.3), nn.Linear(16, 3))


class StopAt(Callback):
    """Sends this process a signal during a step, by its number in the run."""

    def __init__(self, step, number=signal.SIGTERM):
        self.left, self.number = step, number

    def on_train_batch_begin(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), self.number)


class Noisy(Dataset):
    """Rows with noise from NumPy's and PyTorch's global generators, as in an augmentation."""

    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        return X[i] + 0.1 * torch.randn(8) + float(np.random.random()), Y[i]


class NoisyStream(IterableDataset):
    def __iter__(self):
        for i in np.random.permutation(ROWS):
            yield X[i] + 0.1 * torch.randn(8), Y[i]


class RaisesRate(Callback):
    """A callback with state: it raises the rate with each batch."""

    seen = 0

    def on_train_batch_end(self, batch, logs=None):
        self.seen += 1
        self.model.learning_rate = 1e-3 * (1 + 0.1 * self.seen)

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def arrays(cores):
    return {"x": X, "y": Y, "batch_size": BATCH // cores}


def loader(cores, data=None, **options):
    options = {"shuffle": True} | options
    return {"x": DataLoader(data or Noisy(), batch_size=BATCH // cores, **options)}


DATA = {
    "arrays": arrays,
    "steps per epoch": lambda cores: arrays(cores) | {"steps_per_epoch": 3},
    "samples": lambda cores: {"x": Noisy(), "batch_size": BATCH // cores},
    "loader": loader,
    "loader with a generator": lambda cores: loader(cores, generator=torch.Generator().manual_seed(5)),
    "stream": lambda cores: loader(cores, NoisyStream(), shuffle=None),
    "steps of a stream": lambda cores: loader(cores, NoisyStream(), shuffle=None) | {"steps_per_epoch": 3},
}
COMPILE = {
    "adamw": {"optimizer": "adamw"},
    "all of it": {
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        "use_ema": True,
        "ema_overwrite_frequency": 3,
        "accumulate_steps": 2,
        "global_clip_norm": 1.0,
        "metrics": ["accuracy", "auroc"],
    },
    "counted on the host": {"optimizer": "adadelta", "metrics": {"top": "accuracy"}},
    "traced": {"optimizer": "nadam", "jit_compile": False},
    "joined": {"optimizer": "rmsprop", "steps_per_execution": 2},
}


def trained(cores, data, options, folder=None, stop=None, resume=False, epochs=EPOCHS, seed=11, extra=(), **fit):
    """Train a new model. Return what must be equal bit for bit."""
    tpufit.set_random_seed(seed)
    model = tpufit.Model(net())
    model.compile(loss="cross_entropy", scale_lr=None, **options)
    callbacks = [RaisesRate(), *extra]
    if folder is not None:
        callbacks.append(ModelCheckpoint(folder, save_freq=4))
    if stop is not None:
        callbacks.append(StopAt(stop))
    history = model.fit(
        **DATA[data](cores),
        epochs=epochs,
        validation_data=(X[:30], Y[:30]),
        callbacks=callbacks,
        cores=cores,
        resume=resume,
        verbose=0,
        **fit,
    )
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    for i, own in enumerate(model.optimizer.state.values()):
        state |= {f"{key}{i}": torch.as_tensor(value).cpu().numpy() for key, value in own.items() if value is not None}
    last = {name: values[-1] for name, values in history.history.items()}
    return state, last, (model.steps_taken, model.learning_rate, float(np.random.random()), float(torch.rand(())))


@functools.cache
def uninterrupted(cores, data, options):
    """The reference of several tests."""
    return trained(cores, data, COMPILE[options])


def assert_equal(one, other):
    assert one[2] == other[2]
    assert one[1] == other[1]
    assert one[0].keys() == other[0].keys()
    for name, value in one[0].items():
        np.testing.assert_array_equal(value, other[0][name], err_msg=name)


@pytest.mark.parametrize(
    ("data", "options", "stop"),
    [
        pytest.param("arrays", "adamw", 7, marks=pytest.mark.soak_on(1)),
        pytest.param("arrays", "adamw", 4, marks=pytest.mark.soak),  # right at the end of an epoch
        ("arrays", "all of it", 6),
        pytest.param("arrays", "counted on the host", 5, marks=pytest.mark.soak_on(8)),
        pytest.param("arrays", "traced", 7, marks=pytest.mark.soak_on(8)),
        ("arrays", "joined", 4),
        pytest.param("steps per epoch", "adamw", 5, marks=pytest.mark.soak),  # epochs of 3, 1 and 3 steps
        ("steps per epoch", "all of it", 4),  # the epoch in which the data end
        ("samples", "adamw", 6),
        ("loader", "all of it", 7),
        pytest.param("loader with a generator", "adamw", 6, marks=pytest.mark.soak_on(8)),
        pytest.param("loader with a generator", "adamw", 4, marks=pytest.mark.soak),
        pytest.param("stream", "adamw", 6, marks=pytest.mark.soak_on(8)),
        pytest.param("steps of a stream", "adamw", 4, marks=pytest.mark.soak_on(8)),
        ("steps of a stream", "adamw", 5),
    ],
)
@pytest.mark.filterwarnings("ignore:x ran out of data")
def test_a_resumed_training_equals_an_uninterrupted_one(cores, tmp_path, data, options, stop):
    expected = uninterrupted(cores, data, options)
    with pytest.raises(SystemExit) as left:
        trained(cores, data, COMPILE[options], tmp_path, stop=stop)
    assert left.value.code == 143
    # The process's other random draws and its seed don't matter after resuming.
    assert_equal(trained(cores, data, COMPILE[options], tmp_path, resume=True, seed=99), expected)


def test_saving_changes_nothing(cores, tmp_path):
    expected = uninterrupted(cores, "samples", "adamw")
    assert_equal(trained(cores, "samples", COMPILE["adamw"], tmp_path), expected)


@pytest.mark.parametrize("where", ["validation", "epoch end"])
def test_interrupted_between_two_epochs(cores, tmp_path, where):
    ended = []

    class Stop(Callback):
        def on_test_batch_begin(self, batch, logs=None):
            if where == "validation" and not self.done:
                self.stop()

        def on_epoch_end(self, epoch, logs=None):
            ended.append((epoch, "val_loss" in logs))
            if where == "epoch end" and not self.done:
                self.stop()

        done = False

        def stop(self):
            self.done = True
            os.kill(os.getpid(), signal.SIGTERM)

    expected = uninterrupted(cores, "samples", "all of it")
    with pytest.raises(SystemExit):
        trained(cores, "samples", COMPILE["all of it"], tmp_path, extra=[Stop()])
    again = Stop()
    again.done = True
    assert_equal(trained(cores, "samples", COMPILE["all of it"], tmp_path, resume=True, extra=[again]), expected)
    assert ended == [(epoch, True) for epoch in range(EPOCHS)]


def test_ctrl_c_finishes_the_step_and_the_model_continues(cores, tmp_path):
    expected = uninterrupted(cores, "arrays", "adamw")
    tpufit.set_random_seed(11)
    model = tpufit.Model(net())
    model.compile(loss="cross_entropy", scale_lr=None, **COMPILE["adamw"])
    steps = []

    class Count(Callback):
        def on_train_batch_end(self, batch, logs=None):
            steps.append(batch)

    fit = {**arrays(cores), "epochs": EPOCHS, "validation_data": (X[:30], Y[:30]), "cores": cores, "verbose": 0}
    checkpoint = ModelCheckpoint(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        model.fit(**fit, callbacks=[RaisesRate(), checkpoint, Count(), StopAt(6, signal.SIGINT)])
    assert len(steps) == 6  # the current step is the last: the delay is one step
    assert checkpoint.checkpoint_writer.run.steps() == [4, 6]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    model.fit(**fit, callbacks=[RaisesRate(), checkpoint], resume=True)
    for name, value in model.state_dict().items():
        np.testing.assert_array_equal(value.numpy(), expected[0][name], err_msg=name)


@pytest.mark.slow
@pytest.mark.soak_on(1)
@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_a_signal_ends_the_wait_for_data_too(cores, tmp_path, monkeypatch, accumulate):
    options = COMPILE["adamw"] | {"accumulate_steps": accumulate}

    over = threading.Event()
    main = threading.get_ident()

    def send_sigterm():
        while sys._current_frames()[main].f_code is not passes.Prefetcher._get.__code__:
            time.sleep(0.001)
        if accumulate == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            return
        # As the system does while a profiler has stopped the main thread, which then stays asleep.
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    class HangingData(Noisy):
        """The data hang after some rows, and the process gets SIGTERM then."""

        def __init__(self, rows):
            self.left = rows

        def __getitem__(self, i):
            self.left -= 1
            if self.left < 0:
                threading.Thread(target=send_sigterm).start()
                over.wait()
                raise TimeoutError  # in a thread that nobody reads any more: it must not draw anything
            return super().__getitem__(i)

    expected = trained(cores, "samples", options)
    monkeypatch.setitem(DATA, "hanging", lambda cores: {"x": HangingData(BATCH * 5), "batch_size": BATCH // cores})
    with pytest.raises(SystemExit):
        trained(cores, "hanging", options, tmp_path)
    assert_equal(trained(cores, "samples", options, tmp_path, resume=True), expected)
    over.set()


@pytest.mark.soak_on(8)
def test_a_signal_right_before_the_first_wait_ends_it(cores, monkeypatch):
    class HangingData(Noisy):
        def __getitem__(self, i):
            over.wait()
            raise TimeoutError

    class SignallingFirst(passes.Prefetcher):
        def __init__(self, *arguments):
            os.kill(os.getpid(), signal.SIGTERM)
            super().__init__(*arguments)

    over = threading.Event()
    monkeypatch.setattr(passes, "Prefetcher", SignallingFirst)
    monkeypatch.setitem(DATA, "hanging", lambda cores: {"x": HangingData(), "batch_size": BATCH // cores})
    with pytest.raises(SystemExit):
        trained(cores, "hanging", COMPILE["adamw"])
    over.set()


def test_max_time_resumes_in_the_middle_of_the_epoch(cores, tmp_path):
    expected = uninterrupted(cores, "arrays", "adamw")
    # The first step is traced, which takes longer than this: training ends after it.
    trained(cores, "arrays", COMPILE["adamw"], tmp_path, max_time=1e-6)
    assert_equal(trained(cores, "arrays", COMPILE["adamw"], tmp_path, resume=True), expected)


@pytest.mark.soak_on(8)
def test_early_stopping_stops_at_the_same_epoch(cores, tmp_path):
    def run(**options):
        stopping = EarlyStopping("loss", patience=2, min_delta=10.0, restore_best_weights=True)
        result = trained(cores, "arrays", COMPILE["adamw"], epochs=9, extra=[stopping], **options)
        return result, stopping.stopped_epoch

    expected, epoch = run()
    with pytest.raises(SystemExit):
        run(folder=tmp_path, stop=6)
    resumed, same = run(folder=tmp_path, resume=True)
    assert epoch == same == 2
    assert_equal(resumed, expected)
    again, _ = run(folder=tmp_path, resume=True)  # training was complete
    assert again[2][0] == expected[2][0]


class CountsSteps(nn.Linear):
    def __init__(self):
        super().__init__(8, 3)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x):
        if self.training:
            self.steps.add_(1)
        return super().forward(x)


def test_early_stopping_restores_a_buffer_of_a_resumed_training(cores, tmp_path):
    def run(**options):
        tpufit.set_random_seed(0)
        model = tpufit.Model(CountsSteps())
        model.compile("sgd", "cross_entropy", scale_lr=None)
        callbacks = [
            EarlyStopping("loss", patience=9, min_delta=10.0, restore_best_weights=True),
            ModelCheckpoint(tmp_path),
        ]
        model.fit(**arrays(cores), epochs=3, callbacks=callbacks, cores=cores, verbose=0, **options)
        return int(model.module.steps)

    run(max_steps=8)
    assert run(resume=True) == 4  # those of the first epoch, the best one


def test_backup_and_restore_resumes_and_is_deleted(cores, tmp_path):
    expected = uninterrupted(cores, "arrays", "adamw")
    with pytest.raises(SystemExit):
        trained(cores, "arrays", COMPILE["adamw"], extra=[BackupAndRestore(tmp_path)], stop=7)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-0000000007"]
    assert_equal(trained(cores, "arrays", COMPILE["adamw"], extra=[BackupAndRestore(tmp_path)]), expected)
    assert not list(tmp_path.glob("step-*"))


@pytest.mark.parametrize(("save_freq", "kept"), [("epoch", 4), (1, 6)])  # the batch with the error is trained again
def test_a_backup_survives_an_error_and_is_resumed(cores, tmp_path, save_freq, kept):
    class Faulty(Callback):
        batches = 0

        def on_train_batch_end(self, batch, logs=None):
            self.batches += 1
            if self.batches == 7:
                raise ValueError("oh")

    expected = uninterrupted(cores, "arrays", "adamw")
    backup = BackupAndRestore(tmp_path / "new", save_freq)
    with pytest.raises(CallbackError, match="oh"):
        trained(cores, "arrays", COMPILE["adamw"], extra=[backup, Faulty()])
    assert [path.name for path in tmp_path.glob("new/step-*")] == [f"step-{kept:010}"]
    assert_equal(trained(cores, "arrays", COMPILE["adamw"], extra=[backup]), expected)
    assert not list(tmp_path.glob("new/step-*"))


@pytest.mark.soak_on(8)
def test_a_callbacks_error_keeps_completed_steps(cores, tmp_path):
    class Faulty(Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self.armed and batch == 2:
                raise ValueError("oh")

        armed = True

    faulty = Faulty()
    with pytest.raises(CallbackError, match="oh"):
        trained(cores, "arrays", COMPILE["adamw"], extra=[faulty, ModelCheckpoint(tmp_path, on_exception=True)])
    faulty.armed = False
    expected = trained(cores, "arrays", COMPILE["adamw"], extra=[faulty])
    options = {"extra": [faulty, ModelCheckpoint(tmp_path, on_exception=True)], "resume": True}
    assert_equal(trained(cores, "arrays", COMPILE["adamw"], **options), expected)


def test_metrics_that_share_batches_are_saved_within_an_epoch(cores, tmp_path):
    def trained(**options):
        torch.manual_seed(0)
        model = tpufit.Model(nn.Linear(8, 3))
        model.compile("sgd", "cross_entropy", metrics=["auroc", torchmetrics.AUROC(task="multiclass", num_classes=3)])
        torch.manual_seed(1)
        history = model.fit(X, Y, BATCH // cores, EPOCHS, verbose=0, cores=cores, **options).history
        return {name: values[-1] for name, values in history.items()}

    expected = trained()
    keep = ModelCheckpoint(tmp_path, save_freq=3, keep_last=None)
    assert trained(callbacks=[keep]) == expected
    again = ModelCheckpoint(tmp_path / "again")
    assert trained(resume=tmp_path / "step-0000000006", callbacks=[again]) == expected  # from within the second epoch


@pytest.mark.soak_on(8)
def test_resuming_from_the_best_or_a_named_checkpoint(cores, tmp_path):
    tpufit.set_random_seed(0)
    model = tpufit.Model(net())
    model.compile("adamw", "cross_entropy")
    fit = {**arrays(cores), "cores": cores, "verbose": 0, "validation_data": (X[:30], Y[:30])}
    weights = {}

    class Keep(Callback):
        def on_epoch_end(self, epoch, logs=None):
            weights[epoch] = self.model.state_dict()

    checkpoint = ModelCheckpoint(tmp_path, keep_last=None, keep_best=1)
    history = model.fit(**fit, epochs=4, callbacks=[checkpoint, Keep()])
    best = int(np.argmin(history.history["val_loss"]))
    for resume, epoch in (("best", best), (tmp_path / "step-0000000008", 1), (tmp_path, 3)):
        again = tpufit.Model(net())
        again.compile("adamw", "cross_entropy")
        again.fit(**fit, epochs=1, callbacks=[checkpoint], resume=resume)  # nothing remains to be done
        for name, value in again.state_dict().items():
            np.testing.assert_array_equal(value.numpy(), weights[epoch][name].numpy(), err_msg=name)


def test_no_epochs_remain_after_a_later_interruption(cores, tmp_path):
    tpufit.set_random_seed(0)
    model = tpufit.Model(net())
    model.compile("adamw", "cross_entropy", scale_lr=None)
    fit = {**arrays(cores), "cores": cores, "verbose": 0}
    with pytest.raises(SystemExit):
        model.fit(**fit, epochs=3, callbacks=[ModelCheckpoint(tmp_path), StopAt(6)])  # in the second epoch
    again = tpufit.Model(net())
    again.compile("adamw", "cross_entropy", scale_lr=None)
    again.fit(**fit, epochs=1, callbacks=[ModelCheckpoint(tmp_path)], resume=True)
    assert again.steps_taken == 6
    for name, value in again.state_dict().items():
        np.testing.assert_array_equal(value.numpy(), model.state_dict()[name].numpy(), err_msg=name)


@pytest.mark.soak_on(8)
def test_mismatches_are_errors_before_the_first_compilation(cores, tmp_path):
    fit = {**arrays(cores), "cores": cores, "verbose": 0}
    with pytest.raises(SystemExit):
        trained(cores, "arrays", COMPILE["adamw"], tmp_path, stop=6)

    def resumed(module=None, optimizer="adamw", resume=True, **options):
        model = tpufit.Model(module or net())
        model.compile(optimizer, "cross_entropy", scale_lr=None)
        return model.fit(**fit | options, epochs=3, callbacks=[ModelCheckpoint(tmp_path), RaisesRate()], resume=resume)

    wider = nn.Sequential(nn.Linear(8, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Dropout(0.3), nn.Linear(20, 3))
    with pytest.raises(CheckpointMismatchError, match=r"0\.weight: \(16, 8\) in the weights, \(20, 8\) in the module"):
        resumed(wider)
    with pytest.raises(CheckpointMismatchError, match=r"missing in the weights: 5\.weight"):
        resumed(nn.Sequential(*net(), nn.Linear(3, 3)))
    with pytest.raises(CheckpointMismatchError, match=r"has AdamW, but the model's optimizer is SGD"):
        resumed(optimizer="sgd")
    with pytest.raises(CheckpointMismatchError, match=r"parameter groups of optimizer \(AdamW\).*\[6\].*\[1, 5\]"):
        resumed(optimizer=lambda p: torch.optim.AdamW([{"params": [q]} for q in [next(p)]] + [{"params": list(p)}]))
    with pytest.raises(CheckpointMismatchError, match=r"rows 120 then, 100 now.*resume='next_epoch'"):
        resumed(x=X[:100], y=Y[:100])
    with pytest.raises(CheckpointMismatchError, match=r"batch_size \d+ then, \d+ now"):
        resumed(batch_size=2 * BATCH // cores)
    with pytest.raises(CheckpointMissingError, match="does not exist"):
        resumed(resume=tmp_path / "elsewhere")
    with pytest.raises(ArgumentError, match=r"resume=True looks for the checkpoints of a callback"):
        tpufit_model = tpufit.Model(net())
        tpufit_model.compile("adamw", "cross_entropy")
        tpufit_model.fit(**fit, resume=True)
    history = resumed(x=X[:100], y=Y[:100], resume="next_epoch")
    assert len(history.epoch) >= 1


@pytest.mark.parametrize(
    ("data", "accumulate"),
    [
        ("loader with a generator", 3),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in [("arrays", 1), ("samples", 3), ("stream", 1)]),
    ],
)
@pytest.mark.soak_on(8)
def test_the_next_epoch_has_no_state_of_the_skipped_epoch(cores, tmp_path, data, accumulate):
    def trained(*callbacks, weights=None, draws=None, **options):
        tpufit.set_random_seed(11)
        model = tpufit.Model(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3)))
        sgd = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.05), "accumulate_steps": accumulate}
        model.compile(**sgd, loss="cross_entropy", metrics=["accuracy", "auroc"], scale_lr=None)
        given = DATA[data](cores)
        if weights is not None:
            model.load_weights(weights)
            RNGState.of(draws).restore([given["x"].generator] if draws["own"] else [])
        options = {**given, "epochs": 3, "cores": cores, "verbose": 0, "validation_data": (X[:30], Y[:30])} | options
        history = model.fit(**options, callbacks=list(callbacks), validation_step_freq=2).history
        return model.state_dict(), {name: values[-1] for name, values in history.items()}

    with pytest.raises(SystemExit):
        trained(ModelCheckpoint(tmp_path), StopAt(6))  # after two of the four batches of the second epoch
    kept = tmp_path / "step-0000000006"
    state = read(kept).state
    assert state["model"]["batches_waiting"] == (2 if accumulate == 3 else 0)
    draws = state["data"]["draws"] or state["draws"]
    weights, logs = trained(weights=kept / "model.safetensors", draws=draws, initial_epoch=2)
    left, same = trained(ModelCheckpoint(tmp_path), resume="next_epoch")
    assert same == logs
    for name, value in weights.items():
        np.testing.assert_array_equal(left[name].numpy(), value.numpy(), err_msg=name)


def test_another_number_of_cores_is_reported(cores, tmp_path):
    with pytest.raises(SystemExit):
        trained(cores, "arrays", COMPILE["adamw"], tmp_path, stop=6)
    manifest = tmp_path / "step-0000000006" / "manifest.json"
    manifest.write_text(seal(json.loads(manifest.read_text()) | {"mesh": {"cores": 4}}))
    with pytest.warns(UserWarning, match=rf"resuming from step 6 is not bit-exact: cores: 4 -> {cores}"):
        trained(cores, "arrays", COMPILE["adamw"], tmp_path, resume=True)


@pytest.mark.parametrize("stop", [6, 9])  # in the middle of the second and the third epoch
@pytest.mark.soak_on(8)
def test_each_epoch_is_one_row_after_interruptions(cores, tmp_path, stop):
    def logger():
        return CSVLogger(tmp_path / "log.csv", append=True)

    (tmp_path / "log.csv").write_text("epoch,loss,val_loss\n7,0.5,0.5")  # an earlier training's
    with pytest.raises(SystemExit):
        trained(cores, "arrays", COMPILE["adamw"], tmp_path / "run", stop=stop, extra=[logger()])
    trained(cores, "arrays", COMPILE["adamw"], tmp_path / "run", resume=True, extra=[logger()])
    rows = [line.split(",")[0] for line in (tmp_path / "log.csv").read_text().splitlines()]
    assert rows == ["epoch", "7", "0", "1", "2"]


@pytest.mark.soak_on(8)
def test_a_nested_fit_keeps_the_outer_folder_locked(cores, tmp_path):
    outer = ModelCheckpoint(tmp_path)
    refused = []

    class Inner(Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 0:
                with pytest.raises(CallbackError, match="another callback of this process"):
                    trained(cores, "arrays", COMPILE["adamw"], tmp_path, epochs=1)
            elif epoch == 1:
                trained(cores, "arrays", COMPILE["adamw"], epochs=3, extra=[outer])  # the same object
            try:
                CheckpointDirectory(tmp_path).open()
            except CheckpointBusyError:
                refused.append(epoch)

    trained(cores, "arrays", COMPILE["adamw"], extra=[outer, Inner()])
    assert refused == [0, 1, 2]
    CheckpointDirectory(tmp_path).open()


def test_a_rate_is_scaled_once_over_several_resumes(cores, tmp_path):
    for epochs in (1, 2, 3):
        model = tpufit.Model(net())
        model.compile(lambda p: torch.optim.SGD(p, 0.01), "cross_entropy", scale_lr="linear")
        model.fit(
            **arrays(cores), epochs=epochs, callbacks=ModelCheckpoint(tmp_path), cores=cores, resume=True, verbose=0
        )
        assert model.learning_rate == pytest.approx(0.01 * cores)


@pytest.mark.soak_on(8)
def test_a_saved_model_is_loaded_completely(cores, tmp_path):
    tpufit.set_random_seed(0)
    model = tpufit.Model(net())
    model.compile("adamw", "cross_entropy", metrics=["accuracy"], scale_lr=None, use_ema=True)
    fit = {**arrays(cores), "cores": cores, "verbose": 0}
    model.fit(**fit, epochs=2)
    model.save(tmp_path / "model")
    again = tpufit.load(tmp_path / "model", net())
    assert again.learning_rate == model.learning_rate
    values = []
    for one in (model, again):
        tpufit.set_random_seed(1)
        values.append(one.evaluate(X, Y, cores=cores, verbose=0))
    assert values[0] == values[1]
    for one in (model, again):
        one.fit(**fit, epochs=1)
    for name, value in again.state_dict().items():
        np.testing.assert_array_equal(value.numpy(), model.state_dict()[name].numpy(), err_msg=name)


class Scored(tpufit.callbacks.Callback):
    """Gives each epoch a score, the second the highest, and keeps its weights."""

    def __init__(self):
        self.weights = []

    def on_epoch_end(self, epoch, logs=None):
        logs["score"] = [1.0, 3.0, 2.0][epoch]
        self.weights.append(self.model.state_dict())


def test_the_newest_and_the_best_of_a_run_are_loaded(cores, tmp_path):
    model, scored = tpufit.Model(net()), Scored()
    model.compile("adamw", "cross_entropy", scale_lr=None)
    keeps = ModelCheckpoint(tmp_path / "run", monitor="score", mode="max", keep_last=1)
    model.fit(**arrays(cores), cores=cores, verbose=0, epochs=3, callbacks=[scored, keeps])
    for which, epoch in (("newest", 2), ("best", 1)):
        again = tpufit.load(tmp_path / "run", net(), which=which)
        assert again.steps_taken == model.steps_taken * (epoch + 1) // 3
        for name, value in again.state_dict().items():
            assert torch.equal(value, scored.weights[epoch][name]), name
    one = next((tmp_path / "run").glob("step-*"))
    with pytest.raises(ArgumentError, match="which='best' chooses among a run's checkpoints"):
        tpufit.load(one, net(), which="best")
    with pytest.raises(ArgumentError, match="which must be"):
        tpufit.load(tmp_path / "run", net(), which="last")
    model.fit(**arrays(cores), cores=cores, verbose=0, callbacks=[ModelCheckpoint(tmp_path / "plain")])
    with pytest.raises(CheckpointMissingError, match="no checkpoint in .*plain has a metric"):
        tpufit.load(tmp_path / "plain", net(), which="best")


@pytest.mark.soak_on(8)
def test_a_model_with_objects_is_compiled_by_its_user(cores, tmp_path):
    tpufit.set_random_seed(0)
    options = {"optimizer": "adamw", "loss": nn.CrossEntropyLoss(label_smoothing=0.1), "scale_lr": None}
    model = tpufit.Model(net())
    model.compile(**options)
    fit = {**arrays(cores), "cores": cores, "verbose": 0}
    model.fit(**fit, epochs=2)
    model.save(tmp_path / "model")
    again = tpufit.load(tmp_path / "model", net())
    again.compile(**options)
    model.fit(**fit, epochs=1)
    again.fit(**fit, epochs=1, resume=tmp_path / "model")
    for name, value in again.state_dict().items():
        np.testing.assert_array_equal(value.numpy(), model.state_dict()[name].numpy(), err_msg=name)


class CountsOnDevice(torch.optim.Optimizer):
    """Counts its steps in a tensor that its first step creates on the device."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("step", torch.zeros((), device=parameter.device)).add_(1)
                parameter.addcdiv_(parameter.grad, 1 + 0.1 * state["step"], value=-group["lr"])


@pytest.mark.parametrize("method", ["resume", "to_cpu"])
@pytest.mark.soak_on(8)
def test_a_count_on_the_device_is_restored_there(cores, tmp_path, method):
    fit = {"x": X, "y": Y, "batch_size": 16 // cores, "cores": cores, "verbose": 0}

    def made():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(X.shape[1], 8), nn.Tanh(), nn.Linear(8, 3))
        model = tpufit.Model(net)
        model.compile(CountsOnDevice(net.parameters()), "cross_entropy", scale_lr=None)
        return model

    expected, model = made(), made()
    expected.fit(**fit, epochs=4)
    model.fit(**fit, epochs=2, callbacks=[ModelCheckpoint(tmp_path)])
    if method == "to_cpu":
        model.to_cpu()
        model.fit(**fit, epochs=4, initial_epoch=2)
    else:
        model = made()
        model.fit(**fit, epochs=4, callbacks=[ModelCheckpoint(tmp_path)], resume=True)
    states = [one.optimizer.state[one.module[0].weight]["step"] for one in (expected, model)]
    assert states[0].device == states[1].device and float(states[0]) == float(states[1])
    if method == "resume":  # the other data set has another order of rows
        assert all(map(torch.equal, expected.state_dict().values(), model.state_dict().values()))
