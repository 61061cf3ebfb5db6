"""Values that a step's Python reads may change: between epochs this is seen at once, inside an epoch seen or announced.

The reference is a training that traces every step (`jit_compile=False`), bit for bit. Cases are in `python_reads.py`.
"""

import warnings
from itertools import count

import numpy as np
import pytest
import torch
import torchmetrics
from conftest import ROOT
from python_reads import AT_ONCE, CASES, Net, table

import tpufit
from tpufit.callbacks import Callback

pytestmark = [pytest.mark.cores(1, 8, quick=False, timeout=600), pytest.mark.soak_on(8)]

GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(96, 6)).astype("float32")
Y = GENERATOR.integers(0, 3, 96)
STEPS = 12  # in each epoch
VALUE = 3.0  # the value that replaces 1
RANDOM = ["a dropout rate", "a seed inside the step"]  # the host draws other numbers than the device
ROUNDING = 1e-3  # of an eager step: one case multiplies in bfloat16
ANNOUNCED = "has changed while steps ran"
SOME = ["a long list of a closure", "a file", "a numpy view of a tensor on the host", "a tensor hook"]


class Changing(Callback):
    """Changes a value that a step reads, before an epoch or after a batch of the second epoch."""

    def __init__(self, change, epoch=None, batch=None):
        self.change, self.epoch, self.batch, self.now = change, epoch, batch, None

    def on_epoch_begin(self, epoch, logs=None):
        self.now = epoch
        if epoch == self.epoch:
            self.change(self.model.module, VALUE)

    def on_train_batch_end(self, batch, logs=None):
        if self.now == 1 and batch == self.batch:
            self.change(self.model.module, VALUE)


class Sees:
    """A training of a case: its logs, and the announced changes."""

    def __init__(
        self, cores, name, *, few=False, jit_compile="auto", epoch=None, batch=None, loss="cross_entropy", **options
    ):
        self.steps, self.epochs = (6, 3) if few else (STEPS, 4)
        fitting = {key: options.pop(key) for key in ("metrics", "validation_data") if key in options}
        read, change = CASES[name]()
        torch.manual_seed(0)
        self.net = Net(read)
        self.model, self.cores, self.change = tpufit.Model(self.net), cores, change
        metrics = fitting.pop("metrics", None)
        self.model.compile("sgd", loss, metrics=metrics, scale_lr=None, jit_compile=jit_compile, **options)
        torch.manual_seed(1)
        callbacks = [] if epoch is None and batch is None else [Changing(change, epoch, batch)]
        with warnings.catch_warnings(record=True) as self.given:
            warnings.simplefilter("always")
            try:
                self.use(callbacks, **fitting)
            finally:
                getattr(self.net, "_the_test_ends", lambda: None)()
        self.announced = [str(one.message) for one in self.given if ANNOUNCED in str(one.message)]

    def use(self, callbacks, **fitting):
        rows = X.shape[0] // self.steps // self.cores
        self.logs = self.model.fit(
            X, Y, rows, self.epochs, verbose=0, callbacks=callbacks, cores=self.cores, **fitting
        ).history


# `make test` tries every case in the next test, and these in both.
TELLING = (
    *("a number of the module", "a long list of a closure", "a global number", "a deque", "a partial function"),
    *("a generator", "a file", "a forward hook", "a tensor hook", "a dropout rate", "whether autocast is on"),
    *("a large tensor on the host", "an attribute of a tensor"),
)


@pytest.mark.parametrize(
    "name", [name if name in TELLING else pytest.param(name, marks=pytest.mark.soak) for name in CASES]
)
def test_a_change_between_epochs_is_seen_immediately(cores, name):
    how = {"validation_data": (X[:32], Y[:32]), "few": True}
    replayed = Sees(cores, name, epoch=2, **how)
    assert replayed.logs == Sees(cores, name, epoch=2, jit_compile=False, **how).logs
    assert replayed.announced == []
    eager = Sees(cores, name, epoch=2, run_eagerly=True, **how)
    assert eager.logs != Sees(cores, name, run_eagerly=True, **how).logs  # otherwise the case changes nothing
    if name not in RANDOM:
        assert all(np.allclose(eager.logs[log], values, rtol=ROUNDING) for log, values in replayed.logs.items())


@pytest.mark.parametrize("name", CASES)
def test_a_change_inside_an_epoch_is_seen_or_announced(cores, name):
    replayed = Sees(cores, name, batch=2, few=True)
    seen = replayed.logs == Sees(cores, name, batch=2, jit_compile=False, few=True).logs
    assert (seen and not replayed.announced) if name in AT_ONCE else (seen or len(replayed.announced) == 1)


def test_the_documentation_has_the_table(cores):
    assert table() in (ROOT / "docs" / "pages" / "guides" / "speed.md").read_text()


@pytest.mark.soak
@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize(
    "options", [{"steps_per_execution": 3}, {"accumulate_steps": 5}], ids=["joined", "accumulated"]
)
def test_joined_steps_and_accumulated_steps(cores, name, options):
    replayed = Sees(cores, name, epoch=2, **options)
    assert replayed.logs == Sees(cores, name, epoch=2, jit_compile=False, **options).logs and not replayed.announced
    inside = Sees(cores, name, batch=5, **options)
    assert inside.logs == Sees(cores, name, batch=5, jit_compile=False, **options).logs or inside.announced


class EachRole(Sees):
    """Evaluates and predicts several times, and changes the value in between."""

    def use(self, callbacks, **fitting):
        self.logs = []
        for turn in range(4):
            if turn == 2:
                self.change(self.net, VALUE)
            # Each pass replays from its second batch on, and has a short batch at its end.
            self.logs += [self.model.evaluate(X, Y, 8, verbose=0, cores=self.cores)]
            self.logs += self.model.predict(X, 10, verbose=0).tolist()


@pytest.mark.parametrize("name", [name for name in SOME if "gradient" not in name])
def test_evaluate_and_predict(cores, name):
    replayed = EachRole(cores, name)
    assert replayed.logs == EachRole(cores, name, jit_compile=False).logs and not replayed.announced


class ByBatch(Sees):
    """Trains by single batches, and changes the value between two of them."""

    def use(self, callbacks, **fitting):
        self.logs = []
        for step in range(100):
            if step == 20:
                self.change(self.net, VALUE)
            self.logs.append(self.model.train_on_batch(X[:16], Y[:16], cores=self.cores))


@pytest.mark.soak
@pytest.mark.parametrize("name", SOME)
def test_single_batches(cores, name, monkeypatch):
    # An audit is made only if enough time has passed since the last one, so here each step takes long.
    monkeypatch.setattr("tpufit.runtime.replay_audits.perf_counter", count(0, 1000).__next__)
    assert len(ByBatch(cores, name).announced) == 1


class TwoFits(Sees):
    """Fits twice, and changes the value in between; the second fit resumes in the middle of an epoch."""

    def use(self, callbacks, **fitting):
        super().use(callbacks)
        first = self.logs
        self.change(self.net, VALUE)
        super().use(callbacks)
        self.logs = [first, self.logs]


@pytest.mark.soak
@pytest.mark.parametrize("name", SOME)
def test_a_change_before_another_fit_takes_effect(cores, name):
    replayed = TwoFits(cores, name)
    assert replayed.logs == TwoFits(cores, name, jit_compile=False).logs and not replayed.announced


WEIGHTS = [[1.0] * 300]


def own_loss(y_pred, y):
    return torch.nn.functional.cross_entropy(y_pred, y) * WEIGHTS[0][250]


def own_metric(y_pred, y):
    return (y_pred.argmax(1) == y).float().mean() * WEIGHTS[0][250]


class OwnMetric(torchmetrics.MeanMetric):
    """A metric whose update reads the value."""

    def update(self, value, target):
        super().update((value.argmax(1) == target).float() * WEIGHTS[0][250])


@pytest.mark.parametrize("options", [{"loss": own_loss}, {"metrics": [own_metric]}, {"metrics": [OwnMetric()]}])
def test_the_python_of_losses_and_metrics(cores, options):
    def run(**how):
        class Case(Sees):
            def use(self, callbacks, **fitting):
                WEIGHTS[0][250] = 1.0
                for callback in callbacks:
                    callback.change = lambda net, value: WEIGHTS[0].__setitem__(250, value)
                super().use(callbacks, **fitting)

        return Case(cores, "a set", **options, **how)

    held_out = {"validation_data": (X[:32], Y[:32])}
    assert run(epoch=2, **held_out).logs == run(epoch=2, jit_compile=False, **held_out).logs
    inside = run(batch=6)
    assert inside.logs == run(batch=6, jit_compile=False).logs or inside.announced


def test_a_step_with_a_hidden_count_is_traced(cores):
    """A replay doesn't increase the count, so no audit would see it change: only inspecting the count does."""
    counts, where = [[0] * 300], "a set"

    def run(jit_compile):
        class Case(Sees):
            def use(self, callbacks, **fitting):
                counts[0][250] = 0
                super().use(callbacks, **fitting)

        def loss(y_pred, y):
            counts[0][250] += 1
            return torch.nn.functional.cross_entropy(y_pred, y) * (3.0 if counts[0][250] > 30 else 1.0)

        return Case(cores, where, loss=loss, jit_compile=jit_compile)

    assert run("auto").logs == run(False).logs
