"""A NaN loss: the step is named, training ends, and the check adds no wait."""

import csv
from functools import partial

import numpy as np
import pytest
import torch
from engines import engine_of
from torch import nn

import tpufit
from tpufit import runtime
from tpufit.callbacks import Callback, CSVLogger, TerminateOnNaN
from tpufit.errors import CallbackError

pytestmark = [
    pytest.mark.cores(1, 8, timeout=300, quick=False),
    pytest.mark.filterwarnings("ignore:.* has NaN, first in row"),  # about NaN in data, see tests/test_data_nan.py
]

STEPS, BAD = 150, 7
X = np.random.default_rng(0).normal(size=(8 * STEPS, 4)).astype("float32")
Y = (X[:, 0] > 0).astype("int64")


def with_nan(step=BAD, value=float("nan")):
    """Return the data, with a NaN in the batch of a step (from 1)."""
    x = X.copy()
    x[8 * (step - 1) + 3, 2] = value
    return x


class Counts(Callback):
    """Counts started batches."""

    reads_weights = False
    batches = 0

    def on_train_batch_end(self, batch, logs=None):
        self.batches = batch + 1


def compiled(model=tpufit.Model, **options):
    torch.manual_seed(0)
    made = model(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    made.compile(partial(torch.optim.Adam, lr=1e-3), "cross_entropy", scale_lr=None, **options)
    return made


def fit(model, x, cores, *callbacks, epochs=1):
    options = {"verbose": 0, "shuffle": False, "callbacks": list(callbacks), "cores": cores}
    return model.fit(x, Y, 8 // cores, epochs, **options).history


@pytest.mark.soak_on(8)
@pytest.mark.parametrize(
    "options",
    [{}, {"jit_compile": False}, {"steps_per_execution": 3}, {"accumulate_steps": 2}, {"run_eagerly": True}],
    ids=["replayed", "traced", "joined", "accumulated", "eager"],
)
def test_training_ends_soon_and_names_the_step(cores, capsys, tmp_path, options):
    model, counts = compiled(**options), Counts()
    fit(model, X, cores)
    assert model.first_bad_step is None
    before = runtime.counts()
    history = fit(model, with_nan(), cores, TerminateOnNaN(), counts, CSVLogger(tmp_path / "log.csv"), epochs=3)
    waits = (runtime.counts() - before).waits
    assert model.first_bad_step == STEPS + BAD
    assert capsys.readouterr().out == f"step {STEPS + BAD} returned a loss that is not finite: training ends\n"
    assert BAD <= counts.batches <= BAD + 64 * options.get("steps_per_execution", 1)
    launches = {"launch"} if options == {"jit_compile": False} else set()  # a step that is traced waits for the last
    assert set(waits) <= {"capture", "audit", "throttle", "logs"} | launches and waits["logs"] <= 1
    weights = model.state_dict()
    assert next(name for name, value in weights.items() if not value.isfinite().all()) == "0.weight"
    assert len(history["loss"]) == 1 and np.isnan(history["loss"][0])  # the epoch is in the logs, unchanged
    with open(tmp_path / "log.csv", newline="") as file:
        assert [row["loss"] for row in csv.DictReader(file)] == ["nan"]


def test_without_a_callback_nan_is_known_after_the_epoch(cores):
    model = compiled()
    history = fit(model, with_nan(), cores, epochs=2)
    assert (
        np.isnan(history["loss"]).all() and model.first_bad_step == BAD
    )  # the first bad step, though all later steps are bad
    fresh = compiled()
    fit(fresh, with_nan(STEPS), cores)
    assert fresh.first_bad_step == STEPS
    fit(fresh, with_nan(STEPS), cores)
    assert fresh.first_bad_step == STEPS + 1  # its weights were bad from the start
    weights = fresh.state_dict()
    assert not all(value.isfinite().all() for value in weights.values())


def test_terminate_on_nan_may_raise_an_error(cores):
    model = compiled()
    with pytest.raises(CallbackError, match=f"step {BAD} returned a loss that is not finite") as error:
        fit(model, with_nan(value=float("inf")), cores, TerminateOnNaN(raise_error=True))
    assert type(error.value.__cause__) is RuntimeError


def test_a_custom_scalar_is_checked_too(cores):
    class Logging(tpufit.Model):
        def train_step(self, batch):
            logs = super().train_step(batch)
            return logs | {"total": batch[0].sum()}

        def compute_loss(self, x, y, y_pred, sample_weight=None):
            return super().compute_loss(x, y, torch.nan_to_num(y_pred), sample_weight)

    class Asks(Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(engine_of(self.model).roles["train"].runner.first_bad_step())

    model, seen = compiled(Logging), []
    fit(model, with_nan(3), cores, Asks())
    assert seen[:4] == [None, None, 3, 3]


def test_logs_read_late_name_the_step_of_their_own_epoch(cores):
    class Keeps(Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == BAD:
                kept.append(logs)

    model, kept = compiled(), []
    fit(model, with_nan(), cores, Keeps(), epochs=2)
    engine_of(model).log.first_bad_step = None
    assert np.isnan(kept[0]["loss"]) and model.first_bad_step == BAD
