"""Callbacks written for Keras run unchanged, because they use only Keras's documented interface."""

import math
import time

import numpy as np
import pytest
import torch
from torch import nn

import tpufit
from tpufit import runtime
from tpufit.callbacks import Callback

pytestmark = [pytest.mark.cores(1, 8), pytest.mark.soak_on(8)]

X = np.random.default_rng(0).normal(size=(150, 6)).astype("float32")  # ten batches of 16, the last of 6
Y = X @ np.random.default_rng(1).normal(size=(6, 1)).astype("float32")


class BatchLosses(Callback):
    """Keeps the loss of every batch and every epoch."""

    def __init__(self):
        super().__init__()
        self.batches = []
        self.epochs = []

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(logs["loss"])

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(logs.get("loss"))


class StopAtMinimum(Callback):
    """Stops when the loss hasn't decreased for some epochs, and restores the weights of its minimum."""

    def __init__(self, patience=0):
        super().__init__()
        self.patience = patience
        self.best_weights = None

    def on_train_begin(self, logs=None):
        self.wait = 0
        self.stopped_epoch = 0
        self.best = np.inf

    def on_epoch_end(self, epoch, logs=None):
        current = logs.get("loss")
        if np.less(current, self.best):
            self.best = current
            self.wait = 0
            self.best_weights = self.model.get_weights()
        else:
            self.wait += 1
            if self.wait >= self.patience:
                self.stopped_epoch = epoch
                self.model.stop_training = True
                self.model.set_weights(self.best_weights)


class Staircase(Callback):
    """Sets the rate of each epoch from a table."""

    def __init__(self, table):
        super().__init__()
        self.table = table
        self.seen = []

    def on_epoch_begin(self, epoch, logs=None):
        if not hasattr(self.model.optimizer, "learning_rate"):
            raise ValueError('Optimizer must have a "learning_rate" attribute.')
        rate = float(self.model.optimizer.learning_rate)
        rate = next((value for start, value in self.table if epoch == start), rate)
        self.model.optimizer.learning_rate = rate
        self.seen.append(float(np.asarray(self.model.optimizer.learning_rate)))


class Keys(Callback):
    """Records every hook with the names of its logs."""

    def __init__(self):
        super().__init__()
        self.log = []


def _note(hook, numbered):
    def with_number(self, number, logs=None):
        self.log.append((hook, number, sorted(logs.keys())))

    def without(self, logs=None):
        self.log.append((hook, sorted(logs.keys())))

    return with_number if numbered else without


for _what in ("train", "test", "predict"):
    for _when in ("begin", "end"):
        setattr(Keys, f"on_{_what}_{_when}", _note(f"{_what}_{_when}", False))
        setattr(Keys, f"on_{_what}_batch_{_when}", _note(f"{_what}_batch_{_when}", True))
        setattr(Keys, f"on_epoch_{_when}", _note(f"epoch_{_when}", True))


class NaNClock(Callback):
    """Ends training at a NaN loss, and times batches and epochs, by the old names of the hooks."""

    def on_train_begin(self, logs=None):
        self.seconds = []
        self.expected = self.params["epochs"] * self.params["steps"]
        self.verbose = self.params["verbose"]
        self.bad_batch = None

    def on_batch_begin(self, batch, logs=None):
        self.begun = time.time()

    def on_batch_end(self, batch, logs=None):
        self.seconds.append(time.time() - self.begun)
        loss = (logs or {}).get("loss")
        if loss is not None and (math.isnan(loss) or math.isinf(loss)):
            self.bad_batch = batch
            self.model.stop_training = True


def compiled(lr=0.05, **arguments):
    torch.manual_seed(0)
    model = tpufit.Model(nn.Linear(6, 1))
    model.compile(lambda p: torch.optim.SGD(p, lr), "mse", metrics=["mae"], scale_lr=None, **arguments)
    return model


def fit(model, cores, *callbacks, epochs=3, y=Y, **arguments):
    before = runtime.counts()
    given = {"batch_size": 16 // cores, "verbose": 0, "cores": cores, "epochs": epochs}
    history = model.fit(X, y, callbacks=list(callbacks), **(given | arguments)).history
    return history, runtime.counts() - before


def waits(counts):
    return {reason: n for reason, n in counts.waits.items() if n and reason not in ("throttle", "capture", "audit")}


def test_a_loss_history_per_batch_fetches_once_a_step(cores):
    losses = BatchLosses()
    history, counts = fit(compiled(), cores, losses)
    assert losses.epochs == history["loss"] and len(losses.batches) == 30
    assert losses.batches[9::10] == history["loss"]  # running means: the last value is the epoch's
    assert all(isinstance(loss, float) for loss in losses.batches)
    # one wait per step, and one for the epoch, as without any callback
    assert waits(counts) == {"batch logs": 30, "logs": 3}
    assert counts.host_reads == 0


def test_hooks_that_read_nothing_cost_no_wait(cores):
    _, counts = fit(compiled(), cores, Keys(), Callback())
    assert waits(counts) == {"logs": 3} and counts.host_reads == 0


def test_stopping_at_the_minimum_restores_the_weights(cores):
    class Worse(Callback):
        """From the third epoch on, training only raises the loss."""

        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                self.model.optimizer.learning_rate = 1.5
                self.at_its_best = self.model.get_weights()

    worse, stop = Worse(), StopAtMinimum(patience=2)
    model = compiled()
    history, _ = fit(model, cores, worse, stop, epochs=10)
    assert stop.stopped_epoch == 3 and len(history["loss"]) == 4 and stop.best == history["loss"][1]
    for now, best in zip(model.get_weights(), worse.at_its_best, strict=True):
        assert np.array_equal(now, best)
    assert model.evaluate(X, Y, verbose=0)[0] < history["loss"][0]


def test_a_custom_schedule_sets_the_rate(cores):
    staircase = Staircase([(1, 0.02), (3, 0.01)])
    model = compiled()
    _, counts = fit(model, cores, staircase, epochs=5)
    assert staircase.seen == [0.05, 0.02, 0.02, 0.01, 0.01]
    assert model.optimizer.param_groups[0]["lr"] == 0.01 and counts.graphs["train"] <= 2


def test_hooks_have_keras_order_and_keys(cores):
    keys, model = Keys(), compiled()
    fit(model, cores, keys, epochs=1, validation_data=(X[:32], Y[:32]), steps_per_epoch=2)
    logs, validation = ["loss", "mae"], ["loss", "mae", "val_loss", "val_mae"]

    def batches(name, count, end):
        return [(f"{name}_batch_{w}", i, k) for i in range(count) for w, k in (("begin", []), ("end", end))]

    tested = [("test_begin", []), *batches("test", 2, logs), ("test_end", logs)]
    trained = [("epoch_begin", 0, []), *batches("train", 2, logs), *tested, ("epoch_end", 0, validation)]
    assert keys.log == [("train_begin", []), *trained, ("train_end", validation)]
    keys.log.clear()
    model.evaluate(X[:32], Y[:32], 16 // cores, verbose=0, callbacks=[keys])
    assert keys.log == tested
    keys.log.clear()
    model.predict(X[:32], 16 // cores, verbose=0, callbacks=[keys])
    assert keys.log == [("predict_begin", []), *batches("predict", 2, ["outputs"]), ("predict_end", [])]


def test_the_old_hook_names_and_the_parameters(cores):
    clock = NaNClock()
    fit(compiled(), cores, clock, epochs=2)
    assert len(clock.seconds) == clock.expected == 20 and clock.bad_batch is None and clock.verbose == 0
    broken = Y.copy()
    broken[40] = np.nan  # of the third batch
    with pytest.warns(UserWarning, match="y has NaN, first in row 40"):
        history, _ = fit(compiled(), cores, clock, y=broken, shuffle=False)
    assert clock.bad_batch == 2 and len(history["loss"]) == 1 and math.isnan(history["loss"][0])
