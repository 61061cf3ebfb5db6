"""The checkpoints of a `fit`: taken between two steps, with the state of all callbacks."""

import shutil

import numpy as np
import pytest
import torch
from torch import nn

import tpufit
from tpufit.callbacks import Callback, ModelCheckpoint
from tpufit.checkpoint import read, read_progress
from tpufit.errors import CallbackError
from tpufit.utils.json_codec import decode

pytestmark = [pytest.mark.cores(1, 8), pytest.mark.soak_on(8)]

X = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(32) % 3


def fit(cores, *callbacks, epochs=1, net=None, fails=False, **options):
    """Train for four steps in each epoch; return the model, or None after an error of a callback."""
    torch.manual_seed(0)
    model = tpufit.Model(nn.Linear(4, 3) if net is None else net)
    model.compile("sgd", "cross_entropy")
    if not fails:
        model.fit(X, Y, 8 // cores, epochs, verbose=0, callbacks=callbacks, cores=cores, **options)
        return model
    with pytest.raises(CallbackError, match="oh"):
        model.fit(X, Y, 8 // cores, epochs, verbose=0, callbacks=callbacks, cores=cores, **options)
    return None


def saved(folder):
    """Return the checkpoints in a folder, by their steps."""
    found = map(read, folder.glob("step-*"))
    return {checkpoint.step: checkpoint for checkpoint in found}


class Counting(Callback):
    """Counts batches in its state."""

    def __init__(self):
        super().__init__()
        self.seen, self.heard = 0, []

    def on_train_batch_end(self, batch, logs=None):
        self.seen += 1

    def on_save(self, step, logs=None):
        self.heard.append((step, logs["path"]))

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


class Raises(Callback):
    """Raises an error after the third batch."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 2:
            raise ValueError("oh")


class RaisesAtTheEnd(Callback):
    """Adds an object to the logs that checkpoints can't store, and raises an error."""

    def on_epoch_end(self, epoch, logs=None):
        logs["mine"] = object()
        raise ValueError("oh")


def test_a_checkpoint_has_the_state_of_later_callbacks(cores, tmp_path):
    counting = Counting()
    fit(cores, ModelCheckpoint(tmp_path, save_freq=2, keep_last=None), counting)
    seen = {
        step: decode(own["state"], one.training)["seen"]
        for step, one in saved(tmp_path).items()
        for own in one.state["callbacks"]
        if own["class"] == "Counting"
    }
    assert seen == {2: 2, 4: 4}
    assert [step for step, _ in counting.heard] == [2, 4]
    assert [path for _, path in counting.heard] == [str(tmp_path / f"step-{step:010}") for step in (2, 4)]


def test_several_checkpoint_callbacks_get_their_own_state(cores, tmp_path):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    net[0].requires_grad_(False)
    both = ModelCheckpoint(tmp_path / "all", save_freq=3), ModelCheckpoint(tmp_path / "own", save_frozen=False)
    fit(cores, *both, net=net, epochs=2)
    whole, own = saved(tmp_path / "all")[6], saved(tmp_path / "own")[8]
    assert set(whole.weights) == {"0.weight", "0.bias", "1.weight", "1.bias"} and "left_out" not in whole.state["model"]
    assert set(own.weights) == {"1.weight", "1.bias"}
    assert own.state["model"]["left_out"] == ["0.weight", "0.bias"]


def test_an_error_after_a_checkpoint_saves_the_newer_step(cores, tmp_path):
    fit(cores, Raises(), ModelCheckpoint(tmp_path, save_freq=2, on_exception=True, monitor="loss"), fails=True)
    # The checkpoint of two steps exists, and the third step came before the error.
    last = read(tmp_path / "step-0000000003")
    assert read_progress(last).batches == 3 and last.step == 3


def test_a_failed_checkpoint_doesnt_hide_the_error(cores, tmp_path):
    class Breaks(Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 1:  # the checkpoint follows
                shutil.rmtree(tmp_path / "run")
                (tmp_path / "run").touch()

    with pytest.warns(UserWarning, match=r"step 2 was not written.*run"):
        fit(cores, Breaks(), ModelCheckpoint(tmp_path / "run", save_freq=2), Raises(), fails=True)


def test_no_checkpoint_after_an_error_if_disabled(cores, tmp_path):
    fit(cores, Raises(), ModelCheckpoint(tmp_path, save_freq=2, keep_last=None), fails=True)
    assert set(saved(tmp_path)) == {2}


def test_a_checkpoint_before_validation_has_only_the_logs_of_training(cores, tmp_path):
    keep = ModelCheckpoint(tmp_path, save_freq=100, on_exception=True, monitor="loss")
    fit(cores, RaisesAtTheEnd(), keep, fails=True, validation_data=(X, Y))
    (last,) = saved(tmp_path).values()
    assert list(read_progress(last).trained) == ["loss"]


def test_an_incomplete_step_isnt_saved(cores, tmp_path):
    class Fails(nn.Linear):
        armed = False

        def forward(self, x):
            if self.armed:
                raise ZeroDivisionError("half a step")
            return super().forward(x)

    class Arms(Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.module.armed = batch == 1

    torch.manual_seed(0)
    model = tpufit.Model(Fails(4, 3))
    model.compile("sgd", "cross_entropy", jit_compile=False)
    with pytest.raises(ZeroDivisionError, match="half a step"):
        callbacks = [Arms(), ModelCheckpoint(tmp_path, save_freq=1, on_exception=True)]
        model.fit(X, Y, 8 // cores, verbose=0, callbacks=callbacks, cores=cores)
    assert max(saved(tmp_path)) == 2


def test_two_callbacks_of_a_class_get_states_in_order(cores, tmp_path):
    first, second = Counting(), Counting()
    second.seen = 100
    fit(cores, ModelCheckpoint(tmp_path), first, second)
    again, more, third = Counting(), Counting(), Counting()
    fit(cores, ModelCheckpoint(tmp_path), again, more, third, resume=True)
    assert (again.seen, more.seen, third.seen) == (4, 104, 0)
    with pytest.warns(UserWarning, match="has the state of callbacks that are no longer there: Counting, Counting$"):
        fit(cores, ModelCheckpoint(tmp_path), resume=True)


def test_settings_that_change_the_last_digits_are_reported(cores, tmp_path):
    fit(cores, ModelCheckpoint(tmp_path))
    other = tpufit.Model(nn.Linear(4, 3))
    other.compile("sgd", "cross_entropy", steps_per_execution=2)
    with pytest.warns(UserWarning, match="from step 4 is not bit-exact: steps_per_execution: 1 -> 2$"):
        other.fit(X, Y, 8 // cores, 2, verbose=0, callbacks=[ModelCheckpoint(tmp_path)], cores=cores, resume=True)
    assert np.isfinite(other.history.history["loss"]).all() and other.steps_taken == 8
