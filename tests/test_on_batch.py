"""Custom training loops: one batch at a time, with the same results as `fit`."""

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
        model.compile("adamw", "cross_entropy", metrics=["accuracy"], jit_compile=True)
    torch.manual_seed(1)
    return model


def test_a_custom_loop_equals_fit(cores):
    fitted, own = make(), make()
    history = fitted.fit(X, Y, 16 // cores, 3, verbose=0, cores=cores).history
    before = runtime.counts()
    for epoch in range(3):
        logs, rows = [], []
        for batch in own.batches(X, Y, batch_size=16 // cores, epoch=epoch, cores=cores):
            logs.append(own.train_on_batch(*batch, return_dict=True))
            rows.append(len(batch[0]))
        means = {name: np.average([one[name] for one in logs], weights=rows) for name in logs[0]}
        assert means == pytest.approx({name: values[epoch] for name, values in history.items()}, abs=1e-6)
    counts = runtime.counts() - before
    for name, value in fitted.state_dict().items():
        assert torch.equal(own.state_dict()[name], value), name
    assert not own.report().traced["train"]
    assert counts.waits["batch logs"] == 21 and counts.graphs["train"] == 0  # the graphs of `fit`


def test_values_are_of_the_single_batch(cores):
    model = make()
    model.compile("adamw", "cross_entropy", metrics=["accuracy", "auroc"])  # which keeps whole batches
    for role in ("test", "train", "test"):
        for rows in (slice(0, 32), slice(32, 64), slice(64, 96)):
            logs = model.evaluate(X[rows], Y[rows], verbose=0, cores=cores)
            if role == "test":
                assert model.test_on_batch(X[rows], Y[rows]) == pytest.approx(logs, abs=1e-6)
            else:
                model.train_on_batch(X[rows], Y[rows])
    rows = slice(0, 32)
    later = [model.test_on_batch(X[rows], Y[rows], return_dict=True), model.test_on_batch(X[32:64], Y[32:64])][0]
    assert list(later.values()) == model.test_on_batch(X[rows], Y[rows])  # also if they are read later
    model.reset_metrics()
    assert model.test_on_batch(X[rows], Y[rows]) == list(later.values())
    assert model.metrics_names == ["loss", "accuracy", "auroc"]


def test_a_step_that_is_not_finite_has_its_own_number(cores):
    model = make()
    model.compile(lambda p: torch.optim.SGD(p, 0.0), "cross_entropy", scale_lr=None)
    for x in (X[:16], X[16:32], X[:16] * np.nan):
        assert model.first_bad_step is None
        loss = model.train_on_batch(x, Y[:16], cores=cores)
    assert np.isnan(loss) and model.first_bad_step == 3


def test_class_weights_follow_sample_weights(cores):
    one, other = make(), make()
    for model in (one, other):
        model.compile(lambda p: torch.optim.SGD(p, 0.1), "cross_entropy", scale_lr=None)
    weights = WEIGHTS * np.array([2.0, 0.5, 1.0], "float32")[Y]
    logs = one.train_on_batch(X[:32], Y[:32], WEIGHTS[:32], {0: 2.0, 1: 0.5}, True, cores=cores)
    assert dict(logs) == pytest.approx({"loss": other.train_on_batch(X[:32], Y[:32], weights[:32])}, abs=1e-6)
    for name, value in one.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], value)
    assert one.train_on_batch(X[:32], Y[:32], class_weight={}) > 0


def test_weights_are_current_after_every_batch(cores):
    model = make()
    for _ in range(4):
        before = model.module[0].weight.detach().cpu().clone()
        model.train_on_batch(X[:32], Y[:32], WEIGHTS[:32], cores=cores)
        assert not torch.equal(before, model.module[0].weight.detach().cpu())
    assert model.module.training  # unchanged


def test_predictions_of_a_batch(cores):
    model = make()
    outputs = model.predict_on_batch(X[:21], cores=cores)
    assert outputs.shape == (21, 3)
    np.testing.assert_allclose(outputs, model.predict(X[:21], verbose=0), atol=1e-6)


def test_rows_that_the_cores_cant_divide_evenly_are_evaluated(cores):
    model, plain = make(), make()
    plain.compile("adamw", "cross_entropy", metrics=["accuracy"], run_eagerly=True)
    assert model.test_on_batch(X[:13], Y[:13], cores=cores) == pytest.approx(
        plain.test_on_batch(X[:13], Y[:13]), abs=1e-5
    )


def test_errors_are_the_same_as_in_fit(cores):
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
    with pytest.raises(WeightsError, match="has 4 tensors, got 1 weight: see get_weights"):
        other.set_weights(weights[:1])
    with pytest.raises(WeightsError, match="of another shape"):
        other.set_weights([*weights[:3], np.zeros(4)])
