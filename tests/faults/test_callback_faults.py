"""A callback raises in a hook: the error names it, other callbacks close their files, and the model stays usable."""

import threading
import traceback

import numpy as np
import pytest
import torch
from torch import nn

import tpufit
from tpufit.callbacks import Callback, TensorBoard
from tpufit.errors import CallbackError

pytestmark = pytest.mark.cores(1, 8, timeout=300, quick=False)

X = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
Y = np.arange(64) % 3
HOOKS = [
    "on_train_begin",
    "on_epoch_begin",
    "on_train_batch_begin",
    "on_train_step_begin",
    "on_train_batch_end",
    "on_test_begin",
    "on_test_batch_begin",
    "on_test_batch_end",
    "on_test_end",
    "on_epoch_end",
    "on_train_end",
]


class Raising(Callback):
    def __init__(self, hook):
        def in_the_hook(*arguments):
            raise ZeroDivisionError("in the hook")

        setattr(self, hook, in_the_hook)


class Writes(Callback):
    """Keeps a file open during training."""

    def __init__(self, path):
        self.path = path

    def on_train_begin(self, logs=None):
        self.file = self.path.open("w")

    def on_epoch_begin(self, epoch, logs=None):
        self.file.write(f"epoch {epoch}")

    def on_train_end(self, logs=None):
        self.file.close()


@pytest.fixture(scope="module")
def model(cores):
    torch.manual_seed(0)
    model = tpufit.Model(nn.Linear(4, 3))
    model.compile("adam", "cross_entropy")
    return model


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_raises(cores, model, tmp_path, hook):
    threads = threading.enumerate()
    before, board, after = Writes(tmp_path / "a"), TensorBoard(tmp_path / "board"), Writes(tmp_path / "b")
    callbacks = [before, board, after, Raising(hook)]
    with pytest.raises(CallbackError, match=rf"^Raising\.{hook} raised ZeroDivisionError: in the hook$") as error:
        model.fit(X, Y, 16 // cores, 2, verbose=0, cores=cores, validation_data=(X, Y), callbacks=callbacks)
    assert "in in_the_hook" in "".join(traceback.format_exception(error.value))
    assert before.file.closed and after.file.closed
    assert not {*threading.enumerate()} - {*threads}  # TensorBoard's files have one each
    assert np.isfinite(model.fit(X, Y, 16 // cores, 1, verbose=0).history["loss"]).all()


@pytest.mark.parametrize(
    "hook", ["on_predict_begin", "on_predict_batch_begin", "on_predict_batch_end", "on_predict_end"]
)
def test_a_hook_of_a_prediction_that_raises(cores, model, hook):
    ends = []

    class Ends(Callback):
        def on_predict_end(self, logs=None):
            ends.append(1)

    with pytest.raises(CallbackError, match=rf"^Raising\.{hook} raised ZeroDivisionError"):
        model.predict(X, verbose=0, cores=cores, callbacks=[Raising(hook), Ends()])
    assert ends == [1] and np.isfinite(model.predict(X, verbose=0)).all()
