"""Invalid arguments of public methods are refused by name, before the first compilation."""

import inspect
import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import tpufit
from tpufit.callbacks import Callback
from tpufit.errors import ArgumentError, TpufitError

pytestmark = pytest.mark.cores(1)

X = np.random.default_rng(0).random((8, 4)).astype("float32")
Y = X.sum(1, keepdims=True)


class Stop(Callback):
    """Ends the trainings that some values start: there are no last epochs at 2**62."""

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = True


VALUES = {
    "None": None,
    "nan": math.nan,
    "inf": math.inf,
    "-1": -1,
    "0": 0,
    "1.5": 1.5,
    "True": True,
    "empty text": "",
    "x": "x",
    "[]": [],
    "{}": {},
    "object": object(),
    "class": type("Kind", (), {}),
    "lambda": lambda *args, **named: None,
    "np.int64(3)": np.int64(3),
    "np.float32(2)": np.float32(2),
    "np.nan": np.float64("nan"),
    "tensor": torch.ones(2),
    "array": np.ones(2),
    "huge": 10**30,
    "bytes": b"ab",
    "set": {1, 2},
    "'1'": "1",
    "complex": 1j,
    "list of objects": [object()],
}
FIT = {"x": X, "y": Y, "batch_size": 4, "verbose": 0, "cores": 1}
# For each method, the other arguments of the call. Invalid data are tested elsewhere.
METHODS = {
    "compile": {"optimizer": "sgd", "loss": "mse"},
    "fit": {**FIT, "epochs": 2, "callbacks": [Stop()]},
    "evaluate": FIT,
    "predict": {name: FIT[name] for name in ("x", "batch_size", "verbose", "cores")},
    "train_on_batch": {"x": X, "y": Y, "cores": 1},
    "test_on_batch": {"x": X, "y": Y, "cores": 1},
    "predict_on_batch": {"x": X, "cores": 1},
    "lr_find": {"x": X, "y": Y, "batch_size": 4, "steps": 3, "cores": 1},
    "batches": {"x": X, "y": Y, "cores": 1},
    "save": {},
    "save_weights": {"filepath": "weights.safetensors"},
    "load_weights": {"filepath": "saved.safetensors"},
    "load_state_dict": {"state": nn.Linear(4, 1).state_dict()},
    "set_weights": {},
    "swap_ema_weights": {},
    "report": {},
    "speed": {},
    "higher_is_better": {},
}
DATA = {"x", "y", "sample_weight", "validation_data", "example"}
# Cases in which the error names what the argument stands for.
OTHER_NAMES = {"resume": "checkpoint", "filepath": "path", "state": "weights", "to": "averages"}
CASES = [
    (method, argument)
    for method in METHODS
    for argument in inspect.signature(getattr(tpufit.Model, method)).parameters
    if argument != "self" and argument not in DATA
]


@pytest.fixture(autouse=True)
def settled(cores):
    """Settle the cores, so that no call here settles other cores for later tests."""
    tpufit.init(cores=cores)


def model():
    made = tpufit.Model(nn.Linear(4, 1))
    made.compile("sgd", "mse", run_eagerly=True)
    return made


def refusal(call):
    """Return the error that a call raises; None if it accepts the value."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call()
        except Exception as error:
            return error
    return None


@pytest.mark.parametrize(("method", "argument"), CASES)
def test_nonsense_is_refused_by_name(cores, tmp_path, monkeypatch, method, argument):
    monkeypatch.chdir(tmp_path)
    model().save_weights("saved.safetensors")
    wrong = {}
    for name, value in VALUES.items():
        error = refusal(lambda value=value: getattr(model(), method)(**{**METHODS[method], argument: value}))
        names = argument.split("_")[-1].removesuffix("s"), OTHER_NAMES.get(argument, argument)
        named = isinstance(error, (TpufitError, OSError)) and any(name in str(error) for name in names)
        if error is not None and (not named or len(str(error)) > 500):
            wrong[name] = f"{type(error).__name__}: {error}"
    assert not wrong


@pytest.mark.parametrize("value", [0, -1, 1.5, "1", True, [0], [1.5], math.nan, 10**30, {1: 2}], ids=repr)
def test_invalid_validation_freq(cores, value):
    with pytest.raises(ArgumentError, match="validation_freq must be"):
        model().fit(X, Y, validation_data=(X, Y), validation_freq=value, verbose=0)


@pytest.mark.parametrize("rate", [math.nan, math.inf, -0.1], ids=repr)
def test_invalid_rate(cores, rate):
    made = model()
    with pytest.raises((ArgumentError, ValueError), match="learning rate"):
        made.compile(lambda p: torch.optim.SGD(p, lr=rate), "mse")
    with pytest.raises(ArgumentError, match="learning_rate must be a finite number of at least 0"):
        made.learning_rate = rate
    with pytest.raises(ArgumentError, match="learning_rate must be a finite number of at least 0"):
        made.optimizer.learning_rate = rate
    assert made.learning_rate == 0.001
    made.optimizer.param_groups[0]["lr"] = rate
    with pytest.raises(ArgumentError, match="the learning rate .* of SGD must be"):
        made.fit(X, Y, verbose=0)


def test_numpys_numbers_are_numbers(cores, tmp_path):
    whole = np.int64
    torch.manual_seed((1 << 64) - 1)  # PyTorch may draw such a seed itself, if the user sets none
    made = tpufit.Model(nn.Linear(4, 1))
    made.compile(
        "sgd",
        "mse",
        steps_per_execution=whole(2),
        accumulate_steps=whole(2),
        clip_norm=np.float32(1),
        use_ema=np.bool_(True),
        ema_momentum=np.float32(0.5),
        ema_overwrite_frequency=whole(2),
    )
    saving = tpufit.callbacks.ModelCheckpoint(tmp_path / "run")
    history = made.fit(
        X,
        Y,
        batch_size=whole(2),
        epochs=whole(2),
        initial_epoch=whole(0),
        validation_split=np.float32(0.25),
        validation_freq=whole(1),
        validation_batch_size=whole(1),
        steps_per_epoch=whole(3),
        max_steps=whole(9),
        max_time=np.float64(100),
        min_epochs=whole(1),
        verbose=whole(0),
        callbacks=[saving],
        cores=whole(1),
    )
    assert len(history.history["val_loss"]) == 2
    made.evaluate(X, Y, batch_size=whole(4), steps=whole(1), verbose=0)
    assert made.predict(X, batch_size=whole(4), steps=whole(2), verbose=0).shape == (8, 1)
    made.save(tmp_path / "model")
    assert len(tpufit.load(tmp_path / "model", nn.Linear(4, 1)).get_weights()) == 2
    tpufit.set_random_seed(whole(3))


def test_a_net_in_bfloat16_on_rows_in_float32(cores):
    made = tpufit.Model(nn.Linear(4, 1).bfloat16())
    made.compile("sgd", "mse", run_eagerly=True)
    with pytest.raises(TpufitError) as caught:
        made.fit(X, Y, verbose=0)
    assert "bfloat16" in str(caught.value) and "precision='bf16-true'" in str(caught.value)
    assert len(str(caught.value)) < 500
