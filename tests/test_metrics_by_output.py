"""Metrics for each output and with weights are exact on 1 and on 8 cores; untraceable metrics run on the host."""

import re
from inspect import isfunction

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn
from torchmetrics.functional import classification

import tpufit
from tpufit import metrics, runtime
from tpufit.backend import HOST
from tpufit.errors import ArgumentError, UnknownNameError
from tpufit.metrics import PassMetrics
from tpufit.metrics.extra_metrics import RowMean
from tpufit.runtime.driver import driver

on_cores = pytest.mark.cores(1, 8, timeout=300)

GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(77, 12)).astype("float32")  # two batches of 32 rows and one of 13
KIND = GENERATOR.integers(0, 4, 77)
SIZE = GENERATOR.normal(size=(77, 1)).astype("float32")
WEIGHT = GENERATOR.random(77).astype("float32")


class ByName(nn.Module):
    def __init__(self):
        super().__init__()
        self.kind, self.size = nn.Linear(12, 4), nn.Linear(12, 1)

    def forward(self, x):
        return {"kind": self.kind(x), "size": self.size(x)}


class ByPlace(ByName):
    def forward(self, x):
        return list(super().forward(x).values())


class Kind(ByName):
    def forward(self, x):
        return self.kind(x)


class Size(ByName):
    def forward(self, x):
        return self.size(x)


def made(kind):
    torch.manual_seed(0)
    return kind()


def outputs():
    with torch.no_grad():
        return {name: value.clone() for name, value in made(ByName)(torch.from_numpy(X)).items()}


def evaluated(cores, kind, y, loss, sample_weight=None, on_host=None, **arguments):
    """Return the logs of a replayed evaluation; `on_host` says where its metrics must have been updated."""
    model = tpufit.Model(made(kind))
    model.compile("sgd", loss, jit_compile=True, **arguments)
    given = {"batch_size": 32 // cores, "verbose": 0, "return_dict": True, "sample_weight": sample_weight}
    model.evaluate(X, y, cores=cores, **given)
    model.evaluate(X, y, **given)
    before = runtime.counts()
    logs = model.evaluate(X, y, **given)
    counts = runtime.counts() - before
    assert not model.report().traced["eval"]
    assert on_host is None or [metric._device_metric.keeps_batches for metric in model.metrics] == [on_host]
    assert not counts.graphs and not counts.fallbacks and counts.host_reads == 0
    assert {k: n for k, n in counts.waits.items() if n and k not in ("throttle", "capture", "audit")} == {"logs": 1}
    return logs


def right():
    return outputs()["kind"].argmax(1) == torch.from_numpy(KIND)


def error():
    return (outputs()["size"] - torch.from_numpy(SIZE))[:, 0]


@on_cores
def test_metrics_by_name(cores):
    logs = evaluated(
        cores,
        ByName,
        {"kind": KIND, "size": SIZE},
        {"kind": "cross_entropy", "size": "mse"},
        metrics={"kind": ["accuracy", "auroc"], "size": "mae"},
    )
    assert list(logs) == ["loss", "kind_loss", "size_loss", "kind_accuracy", "kind_auroc", "size_mae"]
    auroc = classification.multiclass_auroc(outputs()["kind"], torch.from_numpy(KIND), 4)
    expected = [right().float().mean().item(), auroc.item(), error().abs().mean().item()]
    assert list(logs.values())[3:] == pytest.approx(expected, abs=1e-5)


@on_cores
def test_metrics_by_position(cores):
    logs = evaluated(cores, ByPlace, [KIND, SIZE], ["cross_entropy", "mse"], metrics=[["accuracy"], "mae"])
    assert list(logs) == ["loss", "output_0_loss", "output_1_loss", "output_0_accuracy", "output_1_mae"]
    expected = [right().float().mean().item(), error().abs().mean().item()]
    assert list(logs.values())[3:] == pytest.approx(expected, abs=1e-5)


@on_cores
def test_metrics_of_outputs_with_a_custom_loss(cores):
    def loss(y_pred, y):
        return (y_pred["size"] - y["size"]).square().mean()

    y = {"kind": KIND, "size": SIZE}
    logs = evaluated(cores, ByName, y, loss, metrics={"kind": ["accuracy"], "size": []})
    assert list(logs) == ["loss", "kind_accuracy"]
    assert logs["kind_accuracy"] == pytest.approx(right().float().mean().item(), abs=1e-6)


class Cost(torchmetrics.Metric):
    """A user's metric that takes weights."""

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, preds, target, sample_weights):
        self.total = self.total + ((preds - target).abs()[:, 0] * sample_weights).sum()

    def compute(self):
        return self.total


@on_cores
@pytest.mark.parametrize("weighted", [True, False], ids=["with", "without"])
def test_weighted_metrics(cores, weighted):
    logs = evaluated(
        cores,
        ByName,
        {"kind": KIND, "size": SIZE},
        {"kind": "cross_entropy", "size": "mse"},
        WEIGHT if weighted else None,
        metrics={"kind": ["accuracy"]},
        weighted_metrics={"kind": ["accuracy"], "size": ["mae", "mean_squared_error", Cost()]},
    )
    weight = torch.from_numpy(WEIGHT if weighted else np.ones_like(WEIGHT))

    def mean(values):
        return ((values * weight).sum() / weight.sum()).item()

    expected = {
        "kind_accuracy": right().float().mean().item(),
        "kind_weighted_accuracy": mean(right()),
        "size_mae": mean(error().abs()),
        "size_mean_squared_error": mean(error().square()),
        "size_cost": (error().abs() * weight).sum().item(),
    }
    assert {name: logs[name] for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert list(logs)[3:] == sorted(expected)  # as in Keras


@on_cores
def test_weighted_metrics_during_training(cores):
    model, net = tpufit.Model(made(Size)), made(Size)
    model.compile(lambda p: torch.optim.SGD(p, 0.1), "mse", weighted_metrics=["mse"], scale_lr=None, jit_compile=True)
    history = model.fit(X, SIZE, 32 // cores, 2, verbose=0, shuffle=False, sample_weight=WEIGHT, cores=cores).history
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    x, y, weight = map(torch.from_numpy, (X, SIZE, WEIGHT))
    expected = []
    for _ in range(2):
        total = 0.0
        for i in range(0, 77, 32):
            part = slice(i, i + 32)
            each = (net(x[part]) - y[part]).square()[:, 0] * weight[part]
            optimizer.zero_grad()
            each.mean().backward()
            optimizer.step()
            total += each.sum().item()
        expected.append(total / weight.sum().item())
    assert history["mse"] == pytest.approx(expected, abs=1e-5)


class Reading(torchmetrics.Metric):
    """Its update reads a value."""

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, preds, target):
        if (target == 0).sum().item() > 2:
            self.total += preds.argmax(1)[target == 0].float().sum()

    def compute(self):
        return self.total


class Counting(torchmetrics.Metric):
    """Its update counts in Python."""

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.rows = 0

    def update(self, preds, target):
        self.rows += len(preds)
        self.total += preds.sum()

    def compute(self):
        return self.total / self.rows


class Arrays(torchmetrics.Metric):
    """Its update uses NumPy."""

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, preds, target):
        if not target.numpy().any():
            raise ValueError("nothing to find")  # for zeros, but not for these data
        self.total += float(np.percentile(preds.numpy(), 75))

    def compute(self):
        return self.total


class Histogram(torchmetrics.Metric):
    """Its update uses an operation that the device lacks."""

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.zeros(5), dist_reduce_fx="sum")

    def update(self, preds, target):
        self.total += torch.histc(preds, 5, -1, 1)

    def compute(self):
        return self.total


def distance(y_pred, y):
    """Return a function's value for each row."""
    return (y_pred - y[:, None]).abs().amax(1)


def with_numpy(y_pred, y):
    return np.abs(y_pred.numpy() - y.numpy()[:, None]).max(keepdims=True)


@on_cores
@pytest.mark.parametrize(
    ("metric", "on_host"),
    [
        ("f1_score", False),
        (torchmetrics.classification.MulticlassF1Score(4), False),
        ("auroc", True),
        (torchmetrics.classification.MulticlassAUROC(4, thresholds=20), False),
        (torchmetrics.classification.MulticlassConfusionMatrix(4), False),
        (torchmetrics.classification.MulticlassCalibrationError(4), True),  # keeps lists
        (Reading(), True),
        (Counting(), True),
        (Arrays(), True),
        (Histogram(), True),
        (distance, False),
        (with_numpy, True),
    ],
    ids=lambda value: (
        str(value) if isinstance(value, (str, bool)) else getattr(value, "__name__", type(value).__name__)
    ),
)
def test_metrics_are_exact_with_a_short_last_batch(cores, metric, on_host):
    where = on_host if driver().name == "torch_xla" else None  # TorchTPU lacks bincount, but has histc
    logs = evaluated(cores, Kind, KIND, "cross_entropy", on_host=where, metrics={"it": metric})
    named = {
        "f1_score": torchmetrics.F1Score(task="multiclass", num_classes=4, average="macro"),
        "auroc": torchmetrics.AUROC(task="multiclass", num_classes=4),
    }
    expected = RowMean(metric) if isfunction(metric) else named.get(metric, metric).clone()
    y_pred, y = outputs()["kind"], torch.from_numpy(KIND)
    for i in range(0, 77, 32):
        expected.update(y_pred[i : i + 32], y[i : i + 32])
    np.testing.assert_allclose(logs["it"], expected.compute().numpy(), rtol=1e-6, atol=1e-5)


class Tagger(ByName):
    """Logits of shape `(batch, time, classes)`."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 5 * 4)

    def forward(self, x):
        return self.layer(x).unflatten(1, (5, 4))


@on_cores
def test_tokens_with_classes_last(cores):
    tokens = np.random.default_rng(1).integers(0, 4, (77, 5))
    weight = np.random.default_rng(2).random((77, 5)).astype("float32")

    def loss(y_pred, y):
        return nn.functional.cross_entropy(y_pred.movedim(2, 1), y, reduction="none")

    logs = evaluated(cores, Tagger, tokens, loss, weight, metrics=["accuracy", "auroc"], weighted_metrics=["accuracy"])
    with torch.no_grad():
        y_pred, y = made(Tagger)(torch.from_numpy(X)).flatten(0, 1), torch.from_numpy(tokens).flatten()
    correct, weight = (y_pred.argmax(1) == y).float(), torch.from_numpy(weight).flatten()
    expected = {
        "loss": (nn.functional.cross_entropy(y_pred, y, reduction="none") * weight).mean().item(),
        "accuracy": correct.mean().item(),
        "auroc": classification.multiclass_auroc(y_pred, y, 4).item(),
        "weighted_accuracy": ((correct * weight).sum() / weight.sum()).item(),
    }
    assert logs == pytest.approx(expected, abs=1e-5)


@on_cores
@pytest.mark.parametrize(("loss", "ignored"), [("cross_entropy", -100), (nn.CrossEntropyLoss(ignore_index=9), 9)])
def test_metrics_ignore_the_losss_ignored_labels(cores, loss, ignored):
    tokens = np.random.default_rng(1).integers(0, 4, (77, 5))
    tokens[np.random.default_rng(2).random((77, 5)) < 0.4] = ignored
    tokens[40:50] = ignored

    class Last(Tagger):
        def forward(self, x):
            return super().forward(x).movedim(2, 1)

    with torch.no_grad():
        y_pred, y = made(Last)(torch.from_numpy(X)).movedim(1, 2).flatten(0, 1), torch.from_numpy(tokens).flatten()
    counts = y != ignored
    correct, weight = y_pred[counts].argmax(1) == y[counts], torch.from_numpy(WEIGHT)[:, None].expand(77, 5).flatten()
    expected = {
        "accuracy": correct.float().mean().item(),
        "weighted_accuracy": ((correct * weight[counts]).sum() / weight[counts].sum()).item(),
        "auroc": classification.multiclass_auroc(y_pred, y, 4, ignore_index=ignored).item(),
    }
    named = ["f1", "precision", "recall", "specificity"]
    for name in named:
        of_counted = getattr(classification, f"multiclass_{'f1_score' if name == 'f1' else name}")
        for ending, average in (("", "macro"), ("_micro", "micro")):
            value = of_counted(y_pred[counts], y[counts], 4, average=average)
            expected[f"{name}{ending}"] = value.item()
    named = [name for name in expected if name != "weighted_accuracy"]
    logs = evaluated(cores, Last, tokens, loss, WEIGHT, metrics=named, weighted_metrics=["accuracy"])
    assert {name: logs[name] for name in expected} == pytest.approx(expected, abs=1e-6)


@on_cores
def test_each_outputs_loss_has_its_own_ignored_labels(cores):
    kind = np.where(KIND == 0, 9, KIND)
    losses = {"kind": nn.CrossEntropyLoss(ignore_index=9), "size": "mse"}
    metrics = {"kind": ["accuracy"], "size": ["mae"]}
    model = tpufit.Model(made(ByName))
    model.compile("sgd", losses, metrics=metrics)
    logs = model.evaluate(X, {"kind": kind, "size": SIZE}, 32 // cores, verbose=0, return_dict=True, cores=cores)
    assert logs["kind_accuracy"] == pytest.approx(right()[torch.from_numpy(KIND) != 0].float().mean().item())
    assert list(logs) == model.metrics_names == ["loss", "kind_loss", "size_loss", "kind_accuracy", "size_mae"]


@on_cores
def test_untraceable_metrics_add_no_wait(cores):
    model = tpufit.Model(made(Kind))
    model.compile("sgd", "cross_entropy", metrics=[Reading(), "auroc"], jit_compile=True)
    before = runtime.counts()
    history = model.fit(X, KIND, 32 // cores, 3, verbose=0, cores=cores).history
    counts = runtime.counts() - before
    assert all(np.isfinite(history["reading"]))
    assert counts.host_reads == 0 and not counts.fallbacks and counts.graphs.get("train", 0) <= 2
    assert {k: n for k, n in counts.waits.items() if n and k not in ("throttle", "capture", "audit")} == {"logs": 3}


@on_cores
def test_a_metrics_error_is_raised_at_the_first_step(cores):
    model = tpufit.Model(made(Kind))
    model.compile("sgd", "cross_entropy", metrics=[torchmetrics.MeanSquaredError()])
    before = runtime.counts()
    with pytest.raises(RuntimeError, match="same shape"):
        model.fit(X, KIND, 32 // cores, 1, verbose=0, cores=cores)
    assert not (runtime.counts() - before).graphs.get("train")


def names(*arguments):
    return [metric.name for metric in metrics.build(*arguments)]


def test_a_dict_is_by_output_or_by_name():
    assert names({"top1": "accuracy", "top5": "acc"}) == ["top1", "top5"]
    assert names({"a": ["accuracy"], "b": "mae"}) == ["a_accuracy", "b_mae"]
    assert names({"a": "accuracy"}, None, ["a", "b"]) == ["a_accuracy"]  # the metric of output a, as the loss says
    assert names({"a": {"top1": "accuracy"}, "b": ["mae", None]}, None, ["a", "b"]) == ["a_top1", "b_mae"]
    assert names([["accuracy"], []]) == ["output_0_accuracy"]
    assert names(["accuracy", "mae"], None, [0, 1]) == ["output_0_accuracy", "output_1_mae"]
    assert names(["accuracy", None], [None, "mae"], [0, 1]) == ["output_0_accuracy", "output_1_mae"]


def test_a_weighted_metric_is_prefixed_only_if_needed():
    assert names(["accuracy"], ["mae", "accuracy"]) == ["accuracy", "mae", "weighted_accuracy"]
    assert names({"b": ["mse", "acc"]}, {"a": "mae"}, ["b", "a"]) == ["a_mae", "b_acc", "b_mse"]  # as Keras sorts them
    assert names({"a": "mae"}, {"a": "mae", "b": "mae"}, ["a", "b"]) == ["a_mae", "a_weighted_mae", "b_mae"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({"c": ["mae"]}, None, ["a", "b"]), "metrics must be a dict of 'a' and 'b', as loss is, got a dict of 'c'"),
        ((["mae"], None, ["a", "b"]), "metrics must be a dict of 'a' and 'b', as loss is, got a list of 1"),
        ((None, ["mae"], [0, 1]), "weighted_metrics must be a tuple or list of 2, as loss is, got a list of 1"),
        (("mae", None, ["a", "b"]), "as loss is, got 'mae'"),
        (({"a": ["mae", "mae"]},), "['a_mae'] is used twice or more"),
        (({"a": {"loss": "mae"}}, None, ["a", "b"]), "['a_loss'] is used twice or more"),
        ((None, ["mae", "mae"]), "['mae'] is used twice or more"),
        (
            (None, ["auroc"]),
            "can't have 'auroc', which takes no weights. Metrics that take weights: 'accuracy', 'binary_accuracy'",
        ),
        ((None, [torchmetrics.MeanSquaredError()]), "can't have MeanSquaredError(), which takes no weights"),
        ((None, [torchmetrics.MeanMetric()]), "after the output and the target"),
    ],
)
def test_mistakes_that_compile_finds(arguments, message):
    with pytest.raises(ArgumentError, match=re.escape(message)):
        metrics.build(*arguments)


def test_an_unknown_name():
    with pytest.raises(UnknownNameError, match="did you mean 'accuracy'"):
        metrics.build(None, {"a": ["acuracy"]})


def added(metric, *batches, **arguments):
    running = PassMetrics(metrics.build(**({"metrics": [metric]} | arguments)), HOST)
    for batch in batches:
        running.begin()
        running.update_metrics(*batch)
        running.count(len(batch[1]), running.kept)
    return next(iter(running.results("test").values()))


def test_missing_outputs():
    with pytest.raises(ArgumentError, match="for output 'b', but the module returns a dict of 'a'"):
        added(None, ({"a": torch.ones(2)}, {"a": torch.ones(2)}), metrics={"b": ["mae"]})
    with pytest.raises(ArgumentError, match="the targets are one tensor of shape"):
        added("mae", ({"a": torch.ones(2)}, torch.ones(2)))


@pytest.mark.parametrize("name", ["accuracy", "f1_score", "auroc"])
def test_classes_may_be_last_if_recognizable(name):
    torch.manual_seed(0)
    y_pred, y = torch.rand(6, 4, 5), torch.randint(0, 4, (6, 5))
    assert added(name, (y_pred.movedim(1, 2), y)) == pytest.approx(added(name, (y_pred, y)))
    # As many time steps as classes: PyTorch's order, unless the first batch has shown another.
    square = torch.rand(6, 4, 4), torch.randint(0, 4, (6, 4))
    assert added("accuracy", square) == pytest.approx((square[0].argmax(1) == square[1]).float().mean().item())
    first_last = (y_pred.movedim(1, 2), y), (square[0].movedim(1, 2), square[1])
    assert added(name, *first_last) == pytest.approx(added(name, (y_pred, y), square))
    with pytest.raises(ArgumentError, match=r"\(batch, classes, ...\).*cross_entropy"):
        added(name, square, (y_pred.movedim(1, 2), y))


def test_a_weighted_accuracy_by_shapes():
    torch.manual_seed(0)
    rows, tokens = torch.rand(6), torch.rand(6, 5)

    def mean(correct, weight):
        weight = weight.reshape(*weight.shape, *[1] * (correct.dim() - weight.dim())).expand(correct.shape)
        return pytest.approx((correct * weight).sum().item() / weight.sum().item())

    def weighted(*batch):
        return added(None, batch, metrics=None, weighted=["accuracy"])

    y_pred, y = torch.randn(6, 4, 5), torch.randint(0, 4, (6, 5))
    for weight in (rows, tokens, rows[:, None]):
        assert weighted(y_pred, y, weight) == mean(y_pred.argmax(1) == y, weight)
    assert weighted(y_pred.movedim(1, 2), y, tokens) == mean(y_pred.argmax(1) == y, tokens)
    logits, labels = torch.randn(6), torch.randint(0, 2, (6,))
    assert weighted(logits, labels, rows) == mean((logits > 0) == labels, rows)
    assert weighted(logits[:, None], labels[:, None].float(), rows) == mean((logits > 0) == labels, rows)
    several, marks = torch.rand(6, 3), torch.randint(0, 2, (6, 3)).float()
    assert weighted(several, marks, rows) == mean((several > 0.5) == marks, rows)
    with pytest.raises(ArgumentError, match="can't tell its task"):
        weighted(torch.randn(6, 4, 5), torch.randint(0, 4, (6, 3)), rows)
    with pytest.raises(ArgumentError, match="of one shape"):
        added(None, (torch.ones(6, 2), torch.ones(6), rows), metrics=None, weighted=["mae"])
    numbers = torch.randn(6), torch.randint(0, 9, (6,))
    error = mean((numbers[0] - numbers[1]).abs(), rows)
    for column in (numbers, (numbers[0][:, None], numbers[1]), (numbers[0], numbers[1][:, None])):  # as in Keras
        assert added(None, (*column, rows), metrics=None, weighted=["mae"]) == error
