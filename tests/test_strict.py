"""fit(strict=True) finds what makes steps slow, names the line, and leaves the weights unchanged."""

import random
import traceback

import numpy as np
import pytest
import torch
from torch import nn

import tpufit
from tpufit.callbacks import Callback
from tpufit.diagnostics import messages
from tpufit.errors import ArgumentError, StrictError

pytestmark = [pytest.mark.cores(1, 8, timeout=600), pytest.mark.soak_on(8)]

GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(69, 12)).astype("float32")
Y = GENERATOR.integers(0, 4, 69)


class Net(nn.Module):
    def __init__(self, extra=None):
        super().__init__()
        self.body, self.head, self.extra = nn.Linear(12, 16), nn.Linear(16, 4), extra

    def forward(self, x):
        h = self.body(x).relu()
        return self.head(h if self.extra is None else self.extra(self, h))


def compiled(extra=None, kind=tpufit.Model, **arguments):
    torch.manual_seed(0)
    model = kind(Net(extra))
    model.compile("adamw", "cross_entropy", metrics=["accuracy"], scale_lr=None, **arguments)
    return model


def fit(model, cores, **arguments):
    """Two whole batches of 32 rows and one of 5 in each epoch."""
    torch.manual_seed(1)
    given = {"batch_size": 32 // cores, "epochs": 3, "verbose": 0, "cores": cores, "strict": True}
    return model.fit(X, Y, **(given | arguments))


def reads_item(net, h):
    return h * (h.mean().item() > 0)


def branches_on_a_value(net, h):
    return h if h.mean() > 100 else h + 1


def prints_a_tensor(net, h):
    return h if repr(h) else h + 1


def falls_back_to_the_host(net, h):
    return h * torch.unique(h.detach()).numel()


def branch(net, h):
    return h * 2 if random.random() < 0.5 else h


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_equal(one, other):
    assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.soak_on(8)
@pytest.mark.parametrize(
    ("planted", "message"),
    [
        (reads_item, "the train step reads a value from the device at {}.*torch.where"),
        (branches_on_a_value, "the train step reads a value from the device at {}"),
        (prints_a_tensor, "the train step reads a value from the device at {}"),
        (
            falls_back_to_the_host,
            "has no aten::_unique2 for the device, which the train step calls at {}.*one-hot product",
        ),
    ],
    ids=["item", "if", "repr", "fallback"],
)
def test_reads_and_fallbacks_are_refused_at_their_line(cores, planted, message):
    model, line = compiled(planted), planted.__code__.co_firstlineno + 1
    before = weights(model)
    with pytest.raises(StrictError, match=message.format(rf"test_strict\.py:{line}\b")) as error:
        fit(model, cores)
    assert (__file__, line) in {(f.filename, f.lineno) for f in traceback.extract_tb(error.value.__traceback__)}
    assert_equal(before, weights(model))
    with pytest.warns(UserWarning, match="the train step (is traced again|runs operation by operation)"):
        fit(model, cores, strict=False, epochs=1)  # the same model continues
    with pytest.raises(StrictError, match=message.format(rf"test_strict\.py:{line}\b")):
        fit(model, cores)  # also if the step is known to be traced


def test_a_random_branch_is_refused_after_warm_up(cores):
    random.seed(0)
    model, line = compiled(branch), branch.__code__.co_firstlineno + 1
    with pytest.raises(StrictError, match=rf"draws a random number on the host at test_strict\.py:{line}\b") as error:
        fit(model, cores)
    assert (__file__, line) in {(f.filename, f.lineno) for f in traceback.extract_tb(error.value.__traceback__)}
    random.seed(0)
    other = compiled(branch, jit_compile=False)  # the steps before it equal those of a training without strict
    fit(other, cores, strict=False, epochs=1, limit=2)
    assert_equal(weights(model), weights(other))


def test_a_refused_steps_changes_are_undone(cores, monkeypatch):
    class Late(tpufit.Model):
        def train_step(self, batch):
            logs = super().train_step(batch)
            return logs | {"scaled": logs["loss"] * logs["loss"].item()}

    monkeypatch.setattr("tpufit.runtime.placement.CorePlacement.donates_from", 0)  # with donated memory
    model = compiled(kind=Late)
    before = weights(model)
    with pytest.raises(StrictError, match="the train step reads a value"):
        fit(model, cores)
    assert_equal(before, weights(model))
    assert all(v.abs().sum().item() == 0 for s in model.optimizer.state.values() for k, v in s.items() if "exp" in k)


def test_python_that_counts_is_named(cores):
    def counts(net, h):
        net.calls = getattr(net, "calls", 0) + 1
        return h

    with pytest.raises(StrictError, match="the train step can't be replayed: its Python changes Net.calls"):
        fit(compiled(counts), cores)


class Ragged:
    """Batches of 8 rows per core; from the second pass on, one of another shape."""

    def __init__(self):
        self.passes = 0

    def __iter__(self):
        self.passes += 1
        yield X[:8], Y[:8]
        yield X[:3], Y[:3]  # a shape of the first epoch is allowed
        if self.passes == 2:
            yield X[:7], Y[:7]


def test_a_new_shape_in_the_second_epoch_is_refused(cores):
    message = (
        r"in the fit at test_strict\.py:\d+: after its first pass.*x had the shape \(\d+, 12\), and now \(\d+, 12\)"
    )
    model = compiled()
    with pytest.raises(StrictError, match=message) as error:
        model.fit(Ragged(), epochs=3, verbose=0, cores=1 if cores == 1 else cores, strict=True)
    assert "PadToBuckets" in str(error.value)
    model.fit(Ragged(), epochs=3, verbose=0)


def test_strict_doesnt_change_a_good_training(cores, monkeypatch):
    monkeypatch.setattr(messages, "_SECONDS", float("inf"))  # what takes long on a busy machine isn't meant
    data = (X[:40], Y[:40])
    strict, plain = compiled(), compiled()
    assert (
        fit(strict, cores, validation_data=data).history
        == fit(plain, cores, validation_data=data, strict=False).history
    )
    assert_equal(weights(strict), weights(plain))
    assert not strict.report().problems


def test_another_graph_for_an_option_that_a_callback_changes(cores):
    class Momentum(Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.optimizer.param_groups[0]["betas"] = (0.9 if epoch < 2 else 0.5, 0.999)

    message = r"because betas in the optimizer's param_groups changed \(from \(0\.9, 0\.999\) to \(0\.5, 0\.999\)\)"
    with pytest.raises(StrictError, match=message):
        fit(compiled(), cores, callbacks=Momentum())


def test_strict_refuses_run_eagerly(cores):
    with pytest.raises(ArgumentError, match="run_eagerly=True. makes none"):
        fit(compiled(run_eagerly=True), cores)
