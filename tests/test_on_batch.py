"""Training loops of one's own: a batch at a time, with the same results as `fit`."""

import numpy as np
import pytest
import torch
from torch import nn

import tpufit
from tpufit import runtime
from tpufit.errors import DataError, NotCompiledError, WeightsError

pytestmark = pytest.mark.cores(1, 8, timeout=300)

X = np.random.default_rng(0).normal(size=(100, 6)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, 100)
WEIGHTS = np.linspace(0.5, 1.5, 100).astype("float32")


def make(compiled=True):
    torch.manual_seed(0)
    model = tpufit.Model(nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 3)))
    if compiled:
        model.compile("adamw", "cross_entropy", ["accuracy"], jit_compile=True)
    torch.manual_seed(1)
    return model


def test_a_loop_of_ones_own_is_fit(cores):
    fitted, own = make(), make()
    history = fitted.fit(X, Y, 16 // cores, 3, verbose=0, cores=cores).history
    before = runtime.counts()
    for epoch in range(3):
        own.reset_metrics()
        for batch in own.batches(X, Y, batch_size=16 // cores, epoch=epoch, cores=cores):
            logs = own.train_on_batch(*batch, return_dict=True)
        assert dict(logs) == {name: values[epoch] for name, values in history.items()}
    counts = runtime.counts() - before
    for name, value in fitted.state_dict().items():
        assert torch.equal(own.state_dict()[name], value), name
    assert not own._engine.programs["train"][0].traced_because
    assert counts.waits["batch logs"] == 3 and counts.graphs["train"] == 0  # the graphs are those of `fit`


def test_values_are_running_means_until_they_are_reset(cores):
    model = make()
    first = model.test_on_batch(X[:16], Y[:16], cores=cores)
    both = model.test_on_batch(X[16:48], Y[16:48])
    assert both == pytest.approx(model.evaluate(X[:48], Y[:48], verbose=0), abs=1e-6)
    assert model.test_on_batch(X[:16], Y[:16]) == pytest.approx(first, abs=1e-6)  # evaluate began anew
    model.reset_metrics()
    loss, accuracy = model.test_on_batch(X[16:48], Y[16:48])
    assert [loss, accuracy] == pytest.approx(model.evaluate(X[16:48], Y[16:48], verbose=0), abs=1e-6)
    assert model.metrics_names == ["loss", "accuracy"]


def test_weights_are_current_after_every_batch(cores):
    model = make()
    for _ in range(4):
        before = model.module[0].weight.detach().cpu().clone()
        model.train_on_batch(X[:32], Y[:32], WEIGHTS[:32], cores=cores)
        assert not torch.equal(before, model.module[0].weight.detach().cpu())
    assert model.module.training  # as it was made


def test_predictions_of_a_batch(cores):
    model = make()
    outputs = model.predict_on_batch(X[:21], cores=cores)
    assert outputs.shape == (21, 3)
    np.testing.assert_allclose(outputs, model.predict(X[:21], verbose=0), atol=1e-6)


def test_a_last_batch_that_is_uneven(cores):
    model, plain = make(), make()
    plain.compile("adamw", "cross_entropy", ["accuracy"], run_eagerly=True)
    assert model.test_on_batch(X[:13], Y[:13], cores=cores) == pytest.approx(
        plain.test_on_batch(X[:13], Y[:13]), abs=1e-5
    )


def test_errors_are_those_of_fit(cores):
    with pytest.raises(NotCompiledError, match="train_on_batch needs a compiled model"):
        make(compiled=False).train_on_batch(X, Y, cores=cores)
    with pytest.raises(DataError, match="the loss needs targets"):
        make().train_on_batch(X, cores=cores)


def test_weights_as_arrays(cores):
    model, other = make(), make()
    model.fit(X, Y, 16 // cores, 1, verbose=0, cores=cores)
    weights = model.get_weights()
    assert [w.shape for w in weights] == [(16, 6), (16,), (3, 16), (3,)] and weights[0].dtype == np.float32
    other.set_weights(weights)
    assert all(np.array_equal(a, b) for a, b in zip(weights, other.get_weights(), strict=True))
    with pytest.raises(WeightsError, match="has 4 tensors, got 1 weight:"):
        other.set_weights(weights[:1])
    with pytest.raises(WeightsError, match="of another shape"):
        other.set_weights([*weights[:3], np.zeros(4)])
