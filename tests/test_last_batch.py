"""`fit(last_batch=...)`: one program for all batches, with the results of two."""

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tpufit
from tpufit import runtime
from tpufit.callbacks import ModelCheckpoint
from tpufit.errors import ArgumentError, DataError

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(104, 6)).astype("float32")  # three steps of 32 rows, and one of 8
Y = DRAW.integers(0, 4, 104)
HELD = (X[:50] + 1, Y[:50])
SOME = np.where(DRAW.random(104) < 0.3, -100, Y)


def network():
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 4))


def compiled(net=None, loss="cross_entropy", metrics=("accuracy", "f1", "auroc"), **arguments):
    torch.manual_seed(0)
    model = tpufit.Model(net() if net else network())
    model.compile("adamw", loss, metrics=list(metrics), **({"jit_compile": True} | arguments))
    torch.manual_seed(1)
    return model


def fit(cores, last_batch, compile=None, x=X, y=Y, net=None, **arguments):
    model = compiled(net, **(compile or {}))
    before = runtime.counts()
    given = {"batch_size": 32 // cores, "epochs": 2, "verbose": 0, "cores": cores, "validation_data": HELD}
    history = model.fit(x, y, last_batch=last_batch, **(given | arguments)).history
    return history, model.state_dict(), runtime.counts() - before


def loader(cores, **arguments):
    return DataLoader(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), 32 // cores, **arguments)


WEIGHED = {"weighted_metrics": ["accuracy"]}
SMOOTH = nn.CrossEntropyLoss(torch.arange(1.0, 5.0), label_smoothing=0.1)
CASES = {
    "sample weights, ignored labels": (WEIGHED, {"sample_weight": DRAW.random(104), "y": SOME}, (1, 1)),
    "class weights, smoothed labels": (WEIGHED | {"loss": SMOOTH}, {"class_weight": {0: 3.0, 2: 0.5}}, (1, 1)),
    "accumulation": ({"accumulate_steps": 3}, {}, (2, 1)),  # a step of the optimizer, or none
    "joined steps of an epoch": ({"steps_per_execution": 2}, {"steps_per_epoch": 2}, (1, 1)),
}


@pytest.mark.cores(1, 8, quick=False)
@pytest.mark.parametrize(
    ("compile", "arguments", "graphs"),
    [pytest.param(*case, marks=pytest.mark.soak_on(1 if case[1] else 8)) for case in CASES.values()],
    ids=CASES,
)
@pytest.mark.usefixtures("compiles_anew")
def test_padding_is_exact_with_one_program(cores, compile, arguments, graphs):
    history, weights, counts = fit(cores, "pad", compile, **arguments)
    expected, same, more = fit(cores, "exact", compile, **arguments)
    assert history.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=2e-5, err_msg=name)
    for name, value in same.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6, msg=name)
    assert (counts.graphs["train"], counts.graphs["eval"]) == graphs
    assert more.graphs["train"] and more.graphs["eval"]  # the graphs of the short batches; the others exist


@pytest.mark.cores(1, 8)
@pytest.mark.usefixtures("compiles_anew")
def test_a_loader_and_resuming(cores, tmp_path):
    given = {"x": loader(cores), "y": None, "batch_size": None}
    given["validation_data"] = DataLoader(TensorDataset(*map(torch.from_numpy, HELD)), 32 // cores)
    history, weights, counts = fit(cores, "pad", **given)
    assert (counts.graphs["train"], counts.graphs["eval"]) == (1, 1)
    keep = {"callbacks": [ModelCheckpoint(tmp_path, save_freq=1)], "resume": True}
    fit(cores, "pad", **given, **keep, max_steps=3)  # the next step is the short batch
    again, resumed, _ = fit(cores, "pad", **given, **keep)
    assert again == history
    assert all(torch.equal(resumed[name], value) for name, value in weights.items())


@pytest.mark.cores(1, 8)
@pytest.mark.usefixtures("compiles_anew")
def test_drop_trains_only_on_whole_batches(cores):
    history, weights, counts = fit(cores, "drop", shuffle=False)
    expected, same, _ = fit(cores, "exact", x=X[:96], y=Y[:96], shuffle=False)
    assert history == expected  # the validation too, which counts every row
    assert all(torch.equal(weights[name], value) for name, value in same.items())
    assert (counts.graphs["train"], counts.graphs["eval"]) == (1, 2)


class Own(tpufit.Model):
    def compute_loss(self, x, y, y_pred, sample_weight=None):
        return nn.functional.cross_entropy(y_pred, y)


REFUSED = {
    "a loss without labels": ({"loss": "mse", "metrics": ()}, {}, "the loss must ignore a label"),
    "a metric object": (
        {"metrics": [torchmetrics.classification.MulticlassAccuracy(4)]},
        {},
        "these metrics count every row: multiclass_accuracy",
    ),
    "a batch norm": (
        {"net": lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 4))},
        {},
        "batch norms .*, here '0'",
    ),
    "a transform": ({}, {"device_transform": lambda batch: batch}, "the device_transform may mix rows"),
    "unknown sizes": ({}, {"x": [(X, Y)].__iter__(), "y": None}, "needs data with a known number of rows"),
    "an unknown word": ({}, {"last_batch": "fill"}, "last_batch must be"),
}


@pytest.mark.cores(1)
@pytest.mark.parametrize(("compile", "arguments", "says"), REFUSED.values(), ids=REFUSED)
def test_padding_that_would_change_results_is_refused(cores, compile, arguments, says):
    model = compiled(**compile)
    with pytest.raises(ArgumentError, match=says):
        model.fit(**({"x": X, "y": Y, "last_batch": "pad", "verbose": 0} | arguments))
    assert model.steps_taken == 0


@pytest.mark.cores(1)
def test_custom_steps_and_targets_are_refused(cores):
    own = Own(nn.Linear(6, 4))
    own.compile("sgd", "cross_entropy")
    with pytest.raises(ArgumentError, match="Own overrides a part of the step"):
        own.fit(X, Y, last_batch="pad", verbose=0)
    with pytest.raises(DataError, match="the targets aren't labels"):
        compiled().fit(X, np.eye(4, dtype="float32")[Y], last_batch="pad", verbose=0)
    with pytest.raises(ArgumentError, match="pass only one of steps_per_epoch and last_batch"):
        compiled().fit(X, Y, last_batch="drop", steps_per_epoch=3, verbose=0)


@pytest.mark.cores(1)
def test_a_frozen_batch_norm_is_allowed(cores):
    frozen = lambda: nn.Sequential(nn.BatchNorm1d(6).requires_grad_(False).eval(), nn.Linear(6, 4))  # noqa: E731
    history, _, _ = fit(cores, "pad", net=frozen)
    expected, _, _ = fit(cores, "exact", net=frozen)
    np.testing.assert_allclose(history["loss"], expected["loss"], rtol=2e-5)
