"""DatasetMetric: a metric of all rows together, equal to the same function of `predict`'s outputs."""

import numpy as np
import pytest
import torch
import torchmetrics
from sklearn.metrics import roc_auc_score
from torch import nn
from torchmetrics.text import BLEUScore

import tpufit
from tpufit import runtime
from tpufit.callbacks import EarlyStopping, LambdaCallback
from tpufit.errors import ArgumentError, DataError
from tpufit.metrics import build

X = torch.randn(77, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(77) % 3


def compiled(metrics, net=None, loss="cross_entropy", **arguments):
    torch.manual_seed(0)
    model = tpufit.Model(net or nn.Linear(6, 3))
    model.compile("adamw", loss, metrics=metrics, scale_lr=None, **arguments)
    return model


def auroc(predictions, targets):
    return roc_auc_score(targets, predictions.softmax(1), multi_class="ovr")


def spread(predictions, targets):
    error = (predictions.argmax(1) != targets).float()
    return {"wrong": error.sum(), "by_class": torch.bincount(targets), "median": np.float64(predictions.median())}


HOW = [{}, {"jit_compile": False}, {"run_eagerly": True}, {"steps_per_execution": 2}]


@pytest.mark.soak_on(8)
@pytest.mark.cores(1, 8)
@pytest.mark.parametrize("how", HOW, ids=str)
def test_evaluations_and_validations_see_each_row_once(cores, how):
    exact = tpufit.DatasetMetric(torchmetrics.AUROC(task="multiclass", num_classes=3))
    model = compiled(["accuracy", tpufit.DatasetMetric(auroc), exact, tpufit.DatasetMetric(spread)], **how)
    rows = {"batch_size": 16 // cores, "cores": cores, "verbose": 0}
    logged = []
    stop = EarlyStopping("val_auroc", mode="max", patience=9, restore_best_weights=True)
    seen = LambdaCallback(on_test_batch_end=lambda batch, logs: logged.append(set(logs)))
    history = model.fit(X, Y, epochs=3, validation_data=(X[:45], Y[:45]), callbacks=[stop, seen], **rows).history
    assert set(history) >= {"val_auroc", "val_multiclass_auroc", "val_wrong", "val_by_class", "val_median"}
    assert not {"auroc", "multiclass_auroc", "wrong", "val_spread"} & set(history)
    assert stop.best == max(history["val_auroc"])
    assert logged[-1] == {"loss", "accuracy"}
    for size in (77, 45):  # 77: the last batch has 13 rows
        logs = model.evaluate(X[:size], Y[:size], return_dict=True, **rows)
        predictions = torch.from_numpy(model.predict(X[:size], **rows))
        expected = torchmetrics.functional.auroc(predictions, Y[:size], "multiclass", num_classes=3).item()
        assert logs["auroc"] == pytest.approx(auroc(predictions, Y[:size]), abs=1e-7)
        assert logs["multiclass_auroc"] == pytest.approx(expected, abs=1e-7)
        assert logs["wrong"] == (predictions.argmax(1) != Y[:size]).sum().item()
        assert logs["by_class"].tolist() == np.bincount(Y[:size]).tolist()
        assert logs["median"] == predictions.median().item()


@pytest.mark.cores(8)
def test_rows_are_copied_while_steps_run(cores):
    """One wait for older steps and the copies of their rows at a time; the rest comes with the logs."""
    sizes = []
    model = compiled([tpufit.DatasetMetric(lambda predictions, targets: sizes.append(len(predictions)) or 1)])
    x, y = X[:64].repeat(20, 1), Y[:64].repeat(20)
    model.evaluate(x, y, batch_size=1, cores=cores, verbose=0)
    before = runtime.counts()
    model.evaluate(x, y, batch_size=1, cores=cores, verbose=0)  # 160 steps
    waits = (runtime.counts() - before).waits
    assert sizes == [1280, 1280]
    assert 0 < waits["kept rows"] <= waits["throttle"] and waits["logs"] == 1


class Boxes(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 8)

    def forward(self, x):
        return {"boxes": self.layer(x).view(-1, 2, 4), "scores": x[:, :2]}


class Detector(tpufit.Model):
    def compute_loss(self, x, y, y_pred, sample_weight=None):
        return (y_pred["boxes"] - y["boxes"]).abs().mean()


@pytest.mark.cores(1, 8)
def test_nests_of_tensors(cores):
    given = []
    targets = {"boxes": torch.randn(45, 2, 4), "count": torch.arange(45)}
    model = Detector(Boxes())
    model.compile(None, metrics={"seen": tpufit.DatasetMetric(lambda *both: given.append(both) or 0.5)})
    logs = model.evaluate(X[:45], targets, batch_size=16 // cores, cores=cores, verbose=0, return_dict=True)
    ((predictions, joined),) = given
    assert logs["seen"] == 0.5
    torch.testing.assert_close(joined, targets)
    torch.testing.assert_close(predictions["scores"], X[:45, :2])
    assert predictions["boxes"].shape == (45, 2, 4)


@pytest.mark.cores(1)
def test_a_dataset_metric_of_one_output_in_bfloat16(cores):
    class Two(nn.Module):
        def forward(self, x):
            return {"a": x[:, :3].bfloat16(), "b": x[:, 3:4]}

    def first(predictions, targets):
        return {"row": predictions[0, 0], "bits": predictions.dtype.itemsize}

    metrics = {"a": [tpufit.DatasetMetric(first)], "b": ["mae"]}
    model = compiled(metrics, Two(), {"a": "cross_entropy", "b": "mse"}, run_eagerly=True)
    logs = model.evaluate(X, {"a": Y, "b": X[:, :1]}, verbose=0, return_dict=True)
    assert (logs["a_row"], logs["a_bits"]) == (X[0, 0].bfloat16().item(), 4)
    assert model.metrics_names == ["loss", "a_loss", "b_loss", "a_first", "b_mae"]


@pytest.mark.cores(1)
@pytest.mark.parametrize("in_a_list", [False, True])
def test_a_dataset_metric_gets_all_outputs(cores, in_a_list):
    class Two(nn.Module):
        def forward(self, x):
            return {"a": x[:, :3], "b": x[:, 3:4]}

    def both(predictions, targets):
        return {name: (predictions[name] - targets[name]).abs().sum() for name in predictions}

    metric = tpufit.DatasetMetric(both)
    losses = {"a": "mse", "b": "l1_loss"}
    model = compiled([metric] if in_a_list else metric, Two(), losses, run_eagerly=True)
    logs = model.evaluate(X, {"a": X[:, 1:4], "b": X[:, :1]}, batch_size=16, verbose=0, return_dict=True)
    assert logs["a"] == pytest.approx((X[:, :3] - X[:, 1:4]).abs().sum().item(), rel=1e-6)
    assert logs["b"] == pytest.approx(logs["b_loss"] * len(X), rel=1e-5)
    with pytest.raises(ArgumentError, match="metrics must be a dict of 'a' and 'b', as loss is, got a list of 2"):
        compiled([metric, "mae"], Two(), losses)


@pytest.mark.cores(1)
def test_texts_are_decoded_in_the_function(cores):
    words = ["the", "cat", "sat", "on", "a", "mat"]

    def bleu(predictions, targets):
        decode = [" ".join(words[i] for i in row) for row in predictions.argmax(1).tolist()]
        return BLEUScore(n_gram=2)(decode, [[" ".join(words[i] for i in row)] for row in targets.tolist()])

    y = torch.randint(0, 6, (10, 5), generator=torch.Generator().manual_seed(0))
    x = nn.functional.one_hot(y, 6).movedim(2, 1).float()
    model = compiled([tpufit.DatasetMetric(bleu)], nn.Identity(), run_eagerly=True)
    assert model.evaluate(x, y, batch_size=4, verbose=0, return_dict=True)["bleu"] == 1.0
    x = x.roll(1, 0)
    expected = bleu(x, y).item()
    assert model.evaluate(x, y, batch_size=4, verbose=0, return_dict=True)["bleu"] == expected < 0.9


@pytest.mark.cores(1)
@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (None, "must return a number, an array of numbers or a dict of these, got None"),
        ([0.5], r"got \[0.5\]"),
        ({"a": "b"}, "got 'b'"),
        ({}, "got {}"),
        ({1: 0.5}, "got {1: 0.5}"),
        ({"loss": 0.5}, "the DatasetMetric 'lambda' returns 'loss', the name of another log"),
    ],
    ids=str,
)
def test_a_function_that_returns_something_else(cores, returned, says):
    model = compiled([tpufit.DatasetMetric(lambda predictions, targets: returned)], run_eagerly=True)
    with pytest.raises(ArgumentError, match=says):
        model.evaluate(X, Y, verbose=0)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (0.5, "takes a function of .predictions, targets. or a torchmetrics object, got 0.5"),
        (torchmetrics.AUROC, "takes a function .* got <class"),
        (lambda predictions: 0, r"with the arguments \(predictions\): too many positional arguments"),
    ],
    ids=["number", "class", "function of one"],
)
def test_a_function_without_two_arguments(function, says):
    with pytest.raises(ArgumentError, match=says):
        tpufit.DatasetMetric(function)


@pytest.mark.cores(1)
def test_invalid_arguments(cores):
    with pytest.raises(ArgumentError, match="weighted_metrics can't have a DatasetMetric"):
        build(None, [tpufit.DatasetMetric(auroc)])
    with pytest.raises(ArgumentError, match="used twice or more"):
        build([tpufit.DatasetMetric(auroc), "auroc"])
    model = compiled([tpufit.DatasetMetric(auroc)], nn.Identity(), lambda p, y: p.mean(), run_eagerly=True)
    with pytest.raises(DataError, match=r"some have shape \(5,\) and others \(6,\): pad them to one shape"):
        model.evaluate([(X[:4], Y[:4]), (X[:4, :5], Y[:4])], verbose=0)
    with pytest.raises(ArgumentError, match=r"takes predictions and targets of tensors that have rows"):
        model.metrics[0].update(None, 0, X, torch.tensor(1.0), None)


def test_callbacks_know_if_higher_is_better():
    auroc_object = torchmetrics.AUROC(task="binary")
    own = [tpufit.DatasetMetric(auroc_object), tpufit.DatasetMetric(auroc), tpufit.DatasetMetric(spread, False)]
    model = compiled(own)
    names = ("val_binary_auroc", "val_auroc", "val_spread")
    assert [model.higher_is_better(name) for name in names] == [True, None, False]
