"""Validation inside an epoch: when it happens, its logs, and that training isn't affected."""

import numpy as np
import pytest
import torch
from torch import nn

import tpufit
from tpufit import runtime
from tpufit.callbacks import Callback, SwapEMAWeights
from tpufit.errors import ArgumentError, CallbackError

pytestmark = pytest.mark.cores(1, 8, timeout=300, quick=False)

GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(208, 6)).astype("float32")  # 6 steps of 32 rows, and one of 16
Y = GENERATOR.integers(0, 3, 208)
HELD = (X[:40] + 1, Y[:40])


def compiled(**arguments):
    torch.manual_seed(0)
    model = tpufit.Model(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 3)))
    model.compile("adamw", "cross_entropy", metrics=["accuracy"], **({"jit_compile": True} | arguments))
    torch.manual_seed(1)
    return model


class Record(Callback):
    """Records the calls in order: the number of each batch, and the logs of each validation."""

    def __init__(self, weights=False):
        self.events, self.train_logs, self.weights = [], [], [] if weights else None

    def on_train_batch_end(self, batch, logs=None):
        self.events.append(batch)
        self.train_logs.append(dict(logs))

    def on_test_begin(self, logs=None):
        assert self.model.module.training  # it is evaluated in eval mode, between two steps of training
        if self.weights is not None:
            self.weights.append(self.model.state_dict())

    def on_test_end(self, logs=None):
        self.events.append(dict(logs))

    @property
    def validated_after(self):
        """Return the batches that are followed by a validation."""
        return [before for before, event in zip(self.events, self.events[1:], strict=False) if isinstance(event, dict)]

    @property
    def tests(self):
        return [event for event in self.events if isinstance(event, dict)]


def fit(model, cores, callbacks=(), epochs=2, **arguments):
    given = {"batch_size": 32 // cores, "verbose": 0, "cores": cores, "validation_data": HELD}
    return model.fit(X, Y, epochs=epochs, callbacks=list(callbacks), **(given | arguments)).history


@pytest.mark.soak_on(8)
def test_validation_doesnt_affect_training(cores):
    """Weights, running means, seeds and graphs equal those of a fit that validates only at the epochs' ends."""
    model, twin, record, other = compiled(), compiled(), Record(weights=True), Record()
    before = runtime.counts()
    history = fit(model, cores, [record], epochs=3, validation_step_freq=2)
    counts = runtime.counts() - before
    assert fit(twin, cores, [other], epochs=3) == history
    assert record.train_logs == other.train_logs
    for name, value in model.state_dict().items():
        assert torch.equal(value, twin.state_dict()[name]), name

    assert record.validated_after == [1, 3, 5, 6] * 3
    assert not counts.captures and counts.host_reads == 0 and not counts.fallbacks
    assert counts.graphs["train"] <= 2 and counts.graphs["eval"] <= 2  # a whole batch, and a short batch
    waits = {reason: n for reason, n in counts.waits.items() if reason not in ("throttle", "capture", "audit", "state")}
    assert waits == {"logs": 3 + 4 * 3, "batch logs": 7 * 3}

    for weights, logs in zip(record.weights, record.tests, strict=True):
        twin.load_state_dict(weights)
        assert twin.evaluate(*HELD, 32 // cores, verbose=0, return_dict=True) == logs


def test_the_last_step_has_a_single_validation(cores):
    record = Record()
    history = fit(compiled(), cores, [record], validation_step_freq=7)
    assert record.validated_after == [6, 6] and history["val_loss"] == [logs["loss"] for logs in record.tests]


@pytest.mark.parametrize(
    ("freq", "options", "batches"),
    [
        (0.25, {}, [1, 3, 5, 6]),  # of 7 steps
        (1.0, {}, [6]),
        (0.01, {"limit": 3}, [0, 1, 2]),
        (4, {"steps_per_epoch": 5}, [3, 4]),
    ],
)
@pytest.mark.soak_on(8)
def test_a_fraction_of_an_epoch(cores, freq, options, batches):
    record = Record()
    fit(compiled(), cores, [record], epochs=1, validation_step_freq=freq, **options)
    assert record.validated_after == batches


@pytest.mark.soak_on(8)
def test_epochs_have_the_logs_of_their_last_validation(cores):
    record = Record()
    history = fit(compiled(), cores, [record], epochs=3, validation_step_freq=3, validation_freq=[2])
    assert record.validated_after == [2, 5, 2, 5, 6, 2, 5]
    last = [record.tests[i] for i in (1, 4, 6)]
    assert history["val_loss"] == [logs["loss"] for logs in last]
    assert history["val_accuracy"] == [logs["accuracy"] for logs in last]


def test_joined_steps_pending_gradients_and_averages(cores):
    record, other = Record(), Record()
    arguments = {"steps_per_execution": 2, "accumulate_steps": 3, "use_ema": True, "ema_momentum": 0.5}
    model, twin = compiled(**arguments), compiled(**arguments)
    history = fit(model, cores, [record, SwapEMAWeights()], validation_step_freq=3)
    assert fit(twin, cores, [other, SwapEMAWeights()]) == history
    assert record.validated_after == [3, 5, 6] * 2  # after the groups of the third and the sixth step
    for name, value in model.state_dict().items():
        assert torch.equal(value, twin.state_dict()[name]), name


def test_a_callback_may_stop_training_there(cores):
    class Stop(Record):
        def on_test_end(self, logs=None):
            super().on_test_end(logs)
            self.model.stop_training = True

    stop = Stop()
    history = fit(compiled(), cores, [stop], validation_step_freq=3, validation_freq=5)
    assert stop.validated_after == [2] and len(history["loss"]) == len(history["val_loss"]) == 1


@pytest.mark.soak_on(8)
def test_data_from_a_thread_wait_during_validation(cores):
    """The stream continues where it was: no batch is lost or read twice."""

    def batches():
        for i in range(0, 208, 32 // cores):
            reads.append(i)
            yield X[i : i + 32 // cores], Y[i : i + 32 // cores]

    reads, record = [], Record()
    history = compiled().fit(
        batches(), verbose=0, cores=cores, callbacks=[record], validation_data=HELD, validation_step_freq=1
    )
    assert record.validated_after == [*range(7)] and reads == [*range(0, 208, 32 // cores)]
    assert history.history["loss"] == fit(compiled(), cores, epochs=1, shuffle=False)["loss"]


def test_an_error_in_a_validation_inside_an_epoch_ends_training(cores):
    class Fail(Record):
        def on_test_batch_end(self, batch, logs=None):
            raise ValueError("here")

        def on_train_end(self, logs=None):
            self.events.append("end")

    fail = Fail()
    with pytest.raises(CallbackError, match="here"):
        fit(compiled(), cores, [fail], validation_step_freq=2)
    assert fail.events == [0, 1]  # only the callback that raised isn't ended
    assert np.isfinite(fit(compiled(), cores, epochs=1)["loss"]).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"validation_step_freq": 0}, "a whole number of at least 1 or a share of an epoch such as 0.25, got 0"),
        ({"validation_step_freq": 1.5}, "a share of an epoch such as 0.25, got 1.5"),
        ({"validation_step_freq": 8}, "never reached: an epoch has 7 steps"),
        ({"validation_step_freq": 2, "validation_data": None}, "needs validation_data or validation_split"),
    ],
)
def test_wrong_validation_arguments_are_errors(cores, arguments, message):
    with pytest.raises(ArgumentError, match=message):
        fit(compiled(), cores, **arguments)


def test_a_fraction_of_an_unknown_length(cores):
    with pytest.raises(ArgumentError, match="the number of batches is unknown"):
        compiled().fit(iter([HELD]), validation_data=HELD, validation_step_freq=0.5, verbose=0, cores=cores)
