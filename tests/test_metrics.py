"""Metrics: names are resolved by shapes, the running values are exact, and logs wait only when they are read."""

import pytest
import torch
import torchmetrics

from tpufit import metrics
from tpufit.errors import ArgumentError, UnknownNameError
from tpufit.metrics import LazyLogs, Metric, PassMetrics
from tpufit.runtime import HOST


def run(metric, batches):
    running = PassMetrics(metrics.build([metric]), HOST)
    for y_pred, y in batches:
        step(running, y_pred, y)
    return next(iter(running.results("test").values()))


def step(running, y_pred, y, **means):
    running.begin()
    running.add_means(means, len(y))
    running.update_metrics(y_pred, y)
    running.count(len(y), running.kept)


def batches(*sizes, classes=4):
    torch.manual_seed(0)
    return [(torch.randn(n, classes), torch.randint(0, classes, (n,))) for n in sizes]


def joined(parts):
    return (torch.cat(column) for column in zip(*parts, strict=True))


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("accuracy", torchmetrics.Accuracy(task="multiclass", num_classes=4)),
        ("acc", torchmetrics.Accuracy(task="multiclass", num_classes=4)),
        ("precision", torchmetrics.Precision(task="multiclass", num_classes=4)),
        ("recall", torchmetrics.Recall(task="multiclass", num_classes=4)),
        ("f1", torchmetrics.F1Score(task="multiclass", num_classes=4)),
        ("specificity", torchmetrics.Specificity(task="multiclass", num_classes=4)),
        ("auroc", torchmetrics.AUROC(task="multiclass", num_classes=4)),
    ],
)
def test_names_of_classification(name, theirs):
    parts = batches(7, 7, 3)
    assert run(name, parts) == pytest.approx(float(theirs(*joined(parts))), abs=1e-7)


@pytest.mark.parametrize("name", ["mse", "mae", "r2_score", "mean_squared_error"])
def test_names_of_regression(name):
    parts = [(torch.randn(n), torch.randn(n)) for n in (8, 5)]
    theirs = {"mse": torchmetrics.MeanSquaredError, "mae": torchmetrics.MeanAbsoluteError}
    theirs |= {"r2_score": torchmetrics.R2Score, "mean_squared_error": torchmetrics.MeanSquaredError}
    assert run(name, parts) == pytest.approx(float(theirs[name]()(*joined(parts))), abs=1e-6)


def test_a_metric_whose_sums_change_their_shape_keeps_that_of_the_first():
    parts = [(torch.randn(n, 1), torch.randn(n, 1)) for n in (8, 5, 5)]
    running = PassMetrics(metrics.build(["r2_score"]), HOST)
    shapes = []
    for y_pred, y in parts:
        step(running, y_pred, y)
        shapes.append([t.shape for t in running.tensors])
    assert shapes[0] == shapes[1] == [t.shape for t in running.begun]
    expected = float(torchmetrics.R2Score()(*joined(parts)))
    assert running.results("test")["r2_score"] == pytest.approx(expected, abs=1e-6)


def test_accuracy_by_shapes():
    tokens = torch.randn(2, 5, 3), torch.randint(0, 5, (2, 3))  # (batch, classes, length)
    assert run("accuracy", [tokens]) == pytest.approx((tokens[0].argmax(1) == tokens[1]).float().mean().item())
    binary = torch.tensor([0.9, 0.2, 0.7]), torch.tensor([1, 0, 0])
    assert run("accuracy", [binary]) == pytest.approx(2 / 3)
    column = torch.tensor([[0.9], [0.2], [0.7]]), torch.tensor([[1.0], [0.0], [0.0]])
    assert run("accuracy", [column]) == pytest.approx(2 / 3)
    multilabel = torch.tensor([[0.9, 0.1], [0.2, 0.8]]), torch.tensor([[1.0, 1.0], [0.0, 1.0]])
    assert run("accuracy", [multilabel]) == pytest.approx(3 / 4)


def test_shapes_that_tell_no_task():
    with pytest.raises(ArgumentError, match=r"can't tell its task from an output of shape \(2, 3, 4\)"):
        run("accuracy", [(torch.randn(2, 3, 4), torch.randint(0, 2, (2,)))])


@pytest.mark.parametrize(
    "theirs",
    [
        torchmetrics.F1Score(task="multiclass", num_classes=4, average="macro"),
        torchmetrics.AUROC(task="multiclass", num_classes=4),  # keeps whole batches
        torchmetrics.AUROC(task="multiclass", num_classes=4, thresholds=20),  # has a buffer
        torchmetrics.MinMaxMetric(torchmetrics.Accuracy(task="multiclass", num_classes=4)),  # wraps another
    ],
    ids=["sums", "lists", "buffer", "wrapper"],
)
def test_objects_are_cloned_and_exact(theirs):
    parts = batches(7, 7, 3)
    before = theirs._update_count
    ours = run(theirs, parts)
    assert theirs._update_count == before
    expected = theirs.clone()
    for part in parts:
        expected.update(*part)
    value = expected.compute()
    assert ours == pytest.approx(float(value), abs=1e-6) if isinstance(value, torch.Tensor) else ours == value


def test_a_metric_of_several_numbers_is_an_array():
    parts = batches(7, 3)
    ours = run(torchmetrics.ConfusionMatrix(task="multiclass", num_classes=4), parts)
    expected = torchmetrics.functional.confusion_matrix(*joined(parts), task="multiclass", num_classes=4)
    assert ours.tolist() == expected.tolist()


def test_a_mean_is_over_rows_and_exact_after_many_batches():
    running = PassMetrics([], HOST)
    step(running, None, [0] * 3, loss=torch.tensor(1.0))
    step(running, None, [0], loss=torch.tensor(5.0))
    assert running.results("test") == {"loss": 2.0}
    running.reset()
    for _ in range(20_000):
        step(running, None, [0], loss=torch.tensor(0.1))
    assert running.results("test")["loss"] == pytest.approx(0.1, rel=1e-7)  # a plain float32 sum: 0.1 * (1 + 1e-4)


def test_logs_of_a_batch_hold_its_own_values():
    running = PassMetrics(metrics.build(["accuracy"]), HOST)
    kept = []
    for y_pred, y in batches(4, 4, 4):
        step(running, y_pred, y, loss=y_pred.mean())
        kept.append(running.lazy())
    parts = batches(4, 4, 4)
    for i, logs in enumerate(kept):
        y_pred, y = joined(parts[: i + 1])
        assert logs["accuracy"] == pytest.approx((y_pred.argmax(1) == y).float().mean().item())
        assert logs["loss"] == pytest.approx(y_pred.mean().item(), abs=1e-6)


def test_logs_are_read_once_and_only_if_somebody_looks():
    reads = []

    def read():
        reads.append(1)
        return {"loss": 0.5, "accuracy": 0.25}

    logs = LazyLogs(["loss", "accuracy"], read)
    assert len(logs) == 2 and "loss" in logs and list(logs) == ["loss", "accuracy"] and bool(logs)
    assert "not read yet" in repr(logs) and not reads
    logs["lr"] = 0.1
    logs["accuracy"] = 1.0
    assert reads == []
    assert dict(logs) == {"loss": 0.5, "accuracy": 1.0, "lr": 0.1} and {**logs}["loss"] == logs.get("loss") == 0.5
    assert reads == [1]
    del logs["lr"]
    with pytest.raises(KeyError):
        logs["lr"]


def test_names():
    assert [m.name for m in metrics.build(["acc", torchmetrics.AUROC(task="binary")])] == ["acc", "binary_auroc"]
    assert [m.name for m in metrics.build({"top": "accuracy"})] == ["top"]
    assert [m.name for m in metrics.build(torchmetrics.MeanSquaredError())] == ["mean_squared_error"]
    assert metrics.build(None) == []
    assert Metric("mse").higher_is_better is False and Metric("accuracy").higher_is_better is True


def test_bad_metrics():
    with pytest.raises(UnknownNameError, match="did you mean 'accuracy'"):
        metrics.build(["acuracy"])
    with pytest.raises(ArgumentError, match="an instance, not the class"):
        metrics.build([torchmetrics.MeanSquaredError])
    with pytest.raises(ArgumentError, match="taken more than once"):
        metrics.build(["accuracy", "accuracy"])
    with pytest.raises(ArgumentError, match="one output tensor with one target"):
        PassMetrics(metrics.build(["accuracy"]), HOST).update_metrics((torch.ones(2), torch.ones(2)), torch.ones(2))
    with pytest.raises(ArgumentError, match="scalar tensors by name, got 'loss': a tensor of shape"):
        PassMetrics([], HOST).add_means({"loss": torch.ones(2)}, 2)
