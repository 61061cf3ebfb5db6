"""Metrics: names are resolved by shapes, running values are exact, and only reading logs waits."""

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn

import tpufit
from tpufit import metrics, runtime
from tpufit.backend import HOST
from tpufit.errors import ArgumentError, ReplayError, UnknownNameError
from tpufit.metrics import LazyLogs, PassMetrics
from tpufit.metrics.metric import Metric
from tpufit.metrics.sum_table import SumTable


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
        ("auroc", torchmetrics.AUROC(task="multiclass", num_classes=4)),
        *(
            (f"{name}{ending}", kind(task="multiclass", num_classes=4, average=average))
            for name, kind in {
                "precision": torchmetrics.Precision,
                "recall": torchmetrics.Recall,
                "f1": torchmetrics.F1Score,
                "f1_score": torchmetrics.F1Score,
                "specificity": torchmetrics.Specificity,
            }.items()
            for ending, average in {"": "macro", "_micro": "micro"}.items()
        ),
    ],
)
def test_names_of_classification(name, theirs):
    parts = batches(7, 7, 3)
    assert run(name, parts) == pytest.approx(float(theirs(*joined(parts))), abs=1e-7)


def test_f1_averages_over_labels_and_over_two_classes():
    several = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.7, 0.6]]), torch.tensor([[1.0, 1.0], [0.0, 1.0], [1.0, 1.0]])
    expected = torchmetrics.functional.f1_score(several[0], several[1].long(), "multilabel", num_labels=2, average=None)
    assert run("f1", [several]) == pytest.approx(expected.mean().item()) != pytest.approx(run("f1_micro", [several]))
    binary = torch.tensor([0.9, 0.2, 0.7]), torch.tensor([1, 0, 0])
    assert run("f1", [binary]) == run("f1_micro", [binary]) == pytest.approx(2 / 3)


def test_ignored_labels_after_one_hot_targets():
    running = PassMetrics(metrics.build(["accuracy"], [], ignored={None: -100}), HOST)
    for y in (torch.eye(4), torch.tensor([-100, -100, 2, 3])):
        running.begin()
        running.update_metrics(torch.eye(4), y)
        running.count(4, running.kept)
    assert running.results("test")["accuracy"] == 1.0


def test_one_hot_targets_are_classes_to_a_loss_of_classes():
    ((y_pred, y),) = batches(40)
    soft = torch.nn.functional.one_hot(y, 4) * 0.9 + 0.025

    def values(y, ignored):
        names = ["accuracy", "f1", "recall_micro", "auroc"]
        running = PassMetrics(metrics.build(names, ["accuracy"], ignored=ignored), HOST)
        for part in (slice(0, 25), slice(25, 40)):
            running.begin()
            running.update_metrics(y_pred[part], y[part], torch.arange(40.0)[part])
            running.count(1, running.kept)
        return running.results("test")

    for label in (-100, 0):  # PyTorch ignores it in probabilities
        assert values(soft, {None: label}) == pytest.approx(values(y, {None: -100}))
    assert run("accuracy", [(soft.clamp(0, 1), (soft > 0.5).float())]) == 1.0  # otherwise of several labels


def test_functions_are_averaged_over_rows():
    def error(y_pred, y):
        return (y_pred - y).abs()

    parts = [(torch.randn(n, 2), torch.randn(n, 2)) for n in (7, 3)]
    rows = error(*joined(parts)).mean(1)
    weight = torch.arange(10.0)
    built = metrics.build({"each": error, "one": lambda p, y: error(p, y).max().item()}, [error])
    assert [m.name for m in built] == ["each", "one", "error"]
    assert [m.name for m in metrics.build([error, lambda p, y: p], {"b": error})] == ["error", "lambda", "b"]
    assert [m.name for m in metrics.build({"b": [error], "a": error})] == ["a_error", "b_error"]
    running = PassMetrics(built, HOST)
    for (y_pred, y), own in zip(parts, weight.split([7, 3]), strict=True):
        running.begin()
        running.update_metrics(y_pred, y, own)
        running.count(len(y), running.kept)
    expected = {
        "each": rows.mean().item(),
        "one": sum(len(y) * error(p, y).max().item() for p, y in parts) / 10,
        "error": ((rows * weight).sum() / weight.sum()).item(),
    }
    assert running.results("test") == pytest.approx(expected)
    assert run(lambda p, y: 2, parts) == 2.0


@pytest.mark.cores(1)
def test_a_batch_dependent_metric_is_reported_once(cores):
    def farthest(y_pred, y):
        return float(np.abs(y_pred.numpy() - y.numpy()).max())

    model = tpufit.Model(nn.Linear(2, 1))
    model.compile("sgd", "mse", metrics=[farthest])
    x = torch.randn(12, 2)
    with pytest.warns(UserWarning, match="'farthest' returns a number .* tpufit.DatasetMetric.function. com") as told:
        model.fit(x, x[:, :1], batch_size=4, epochs=2, validation_split=0.5, verbose=0)
    assert len(told) == 1


def test_a_function_must_return_a_value_for_each_row_or_one_number():
    with pytest.raises(ArgumentError, match=r"one value for each of 3 rows, or one number, got shape \(4,\)"):
        run(lambda p, y: torch.zeros(4), [(torch.ones(3), torch.ones(3))])
    weighted = PassMetrics(metrics.build(None, [lambda p, y: (p - y).mean()]), HOST)
    with pytest.raises(ArgumentError, match=r"each of 3 rows, as there are sample weights, got shape \(\)"):
        weighted.update_metrics(torch.ones(3), torch.ones(3), torch.ones(3))
    weighted.update_metrics(torch.ones(3), torch.ones(3))  # without support for weights


@pytest.mark.parametrize("name", ["mse", "mae", "r2_score", "mean_squared_error"])
def test_names_of_regression(name):
    parts = [(torch.randn(n), torch.randn(n)) for n in (8, 5)]
    theirs = {"mse": torchmetrics.MeanSquaredError, "mae": torchmetrics.MeanAbsoluteError}
    theirs |= {"r2_score": torchmetrics.R2Score, "mean_squared_error": torchmetrics.MeanSquaredError}
    assert run(name, parts) == pytest.approx(float(theirs[name]()(*joined(parts))), abs=1e-6)


@pytest.mark.parametrize("name", ["mse", "mape", "r2_score"])
def test_regression_targets_for_a_class_metric_are_refused(name):
    with pytest.raises(ArgumentError, match=rf"'{name}' compares numbers of one shape, got .*\(5, 4\) and .*\(5,\)"):
        run(name, [(torch.randn(5, 4), torch.arange(5))])


def test_a_metric_keeps_the_shape_of_its_first_sums():
    parts = [(torch.randn(n, 1), torch.randn(n, 1)) for n in (8, 5, 5)]
    running = PassMetrics(metrics.build(["r2_score"]), HOST)
    shapes = []
    for y_pred, y in parts:
        step(running, y_pred, y)
        shapes.append([t.shape for t in running.tensors])
    assert shapes[0] == shapes[1] == [t.shape for t in running.before]
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


def test_shapes_without_a_clear_task():
    with pytest.raises(ArgumentError, match=r"can't tell its task from an output of shape \(2, 3, 4\)"):
        run("accuracy", [(torch.randn(2, 3, 4), torch.randint(0, 2, (2,)))])


@pytest.mark.parametrize(
    "theirs",
    [
        torchmetrics.F1Score(task="multiclass", num_classes=4, average="macro"),
        torchmetrics.AUROC(task="multiclass", num_classes=4),  # keeps whole batches
        torchmetrics.AUROC(task="multiclass", num_classes=4, thresholds=20),  # has a buffer
        torchmetrics.MinMaxMetric(torchmetrics.Accuracy(task="multiclass", num_classes=4)),  # wraps another metric
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
        kept.append(running.make_lazy_logs())
    parts = batches(4, 4, 4)
    for i, logs in enumerate(kept):
        y_pred, y = joined(parts[: i + 1])
        assert logs["accuracy"] == pytest.approx((y_pred.argmax(1) == y).float().mean().item())
        assert logs["loss"] == pytest.approx(y_pred.mean().item(), abs=1e-6)


def test_logs_are_read_once_and_only_on_access():
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


def test_metrics_have_the_expected_names():
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
    with pytest.raises(ArgumentError, match="used twice or more"):
        metrics.build(["accuracy", "accuracy"])
    with pytest.raises(ArgumentError, match="one output tensor with one target"):
        PassMetrics(metrics.build(["accuracy"]), HOST).update_metrics((torch.ones(2), torch.ones(2)), torch.ones(2))
    with pytest.raises(ArgumentError, match="scalar tensors by name, but 'loss' is a tensor of shape"):
        PassMetrics([], HOST).add_means({"loss": torch.ones(2)}, 2)


X, Y = torch.randn(77, 6, generator=torch.Generator().manual_seed(0)), torch.arange(77) % 3
HOW = [{"jit_compile": True}, {"jit_compile": False}, {"run_eagerly": True}, {"steps_per_execution": 2}]


class ByHand(tpufit.Model):
    """Its metrics are attributes that its steps update."""

    def __init__(self, module):
        super().__init__(module)
        self.seen = torchmetrics.MeanMetric()
        self.f1 = torchmetrics.F1Score(task="multiclass", num_classes=3, average="macro")
        self.auroc = torchmetrics.AUROC(task="multiclass", num_classes=3)
        self.unused = torchmetrics.MeanSquaredError()

    def train_step(self, batch):
        return self.add(*batch, learns=True)

    def test_step(self, batch):
        return self.add(*batch, learns=False)

    def add(self, x, y, learns):
        y_pred = self(x)
        loss = self.compute_loss(x, y, y_pred)
        if learns:
            self.apply_gradients(loss)
        self.seen.update(loss, weight=len(x))
        for _ in range(2):  # twice the same rows: the same value
            self.f1(y_pred, target=y)
        self.auroc.update(y_pred, y)
        return {"loss": self.seen.compute(), "area": self.auroc, "first": loss}


def model_of(kind, **arguments):
    torch.manual_seed(0)
    model = kind(nn.Linear(6, 3))
    model.compile(lambda p: torch.optim.SGD(p, 0.0), "cross_entropy", scale_lr=None, **arguments)
    return model


def test_parts_of_joined_batches_are_freed():
    sums = SumTable(HOST)
    part = torch.zeros(3)
    sums.parts[part] = torch.arange(6.0).view(2, 3), 1
    assert sums.find_host_value(part).tolist() == [3, 4, 5]
    del part
    other = torch.ones(3)  # Python reuses the memory of the previous part
    assert sums.find_host_value(other).tolist() == [1, 1, 1] and not sums.parts


@pytest.mark.soak_on(8)
@pytest.mark.cores(1, 8)
@pytest.mark.parametrize("how", HOW, ids=str)
def test_metrics_that_are_attributes_belong_to_a_pass(cores, how):
    model = model_of(ByHand, metrics=["accuracy"], **how)
    before = runtime.counts()
    history = model.fit(X, Y, 16 // cores, 3, verbose=0, validation_data=(X[:40], Y[:40]), cores=cores).history
    counts = runtime.counts() - before
    for prefix, size in (("", 77), ("val_", 40)):
        y_pred, y = model.predict(X[:size], verbose=0), Y[:size]
        y_pred = torch.from_numpy(y_pred)
        expected = {
            "loss": nn.functional.cross_entropy(y_pred, y).item(),
            "area": torchmetrics.functional.auroc(y_pred, y, "multiclass", num_classes=3).item(),
            "f1": torchmetrics.functional.f1_score(y_pred, y, "multiclass", num_classes=3, average="macro").item(),
        }
        expected["first"] = expected["loss"]
        for name, value in expected.items():  # the same in each epoch, because the rate is 0
            assert history[f"{prefix}{name}"] == pytest.approx([value] * 3, abs=1e-5), name
    assert list(history)[:4] == ["loss", "area", "first", "f1"] and len(history) == 8
    if how.get("jit_compile") is True:
        assert counts.host_reads == 0 and not counts.fallbacks and counts.graphs.get("train", 0) <= 2
    assert [model.f1 is metric for metric in model.metrics] == [False, False, True, False, False]
    assert model.metrics_names == ["loss", "accuracy", "seen", "f1", "auroc", "unused"]
    assert model.higher_is_better("val_f1") is True
    assert int(model.f1.tp.sum()) == 0 and model.f1._update_count == 0
    model.f1.update(torch.tensor([0, 1]), torch.tensor([0, 1]))  # outside a step it belongs to the user
    assert model.f1.compute() == 1.0


def scores(**options):
    """Precision and recall have the same sums, the two F1s only sums of the same shape, and the area keeps batches."""
    of_three = {"task": "multiclass", "num_classes": 3}
    several = {
        "precision": torchmetrics.Precision(**of_three, average="macro"),
        "recall": torchmetrics.Recall(**of_three, average="macro"),
        "f1": torchmetrics.F1Score(**of_three, average="macro"),
        "f1_of_two": torchmetrics.F1Score(**of_three, average="macro", top_k=2),
        "area": torchmetrics.AUROC(**of_three),
    }
    return torchmetrics.MetricCollection(several, **options)


class Collected(tpufit.Model):
    """Its metrics are a collection, which training updates and evaluation calls."""

    def __init__(self, module):
        super().__init__(module)
        self.scores = scores(prefix="own_", postfix="_now")

    def train_step(self, batch):
        x, y = batch
        y_pred = self(x)
        loss = self.compute_loss(x, y, y_pred)
        self.apply_gradients(loss)
        self.scores.update(y_pred, target=y)
        return {"loss": loss, "both": self.scores["f1_of_two"].compute()}

    def test_step(self, batch):
        return {"first": self.scores(self(batch[0]), batch[1])["own_f1_now"]}


@pytest.mark.soak_on(8)
@pytest.mark.cores(1, 8)
@pytest.mark.parametrize("how", HOW[::2], ids=str)
def test_a_collection_that_is_an_attribute_belongs_to_a_pass(cores, how):
    model = model_of(Collected, **how)
    before = runtime.counts()
    history = model.fit(X, Y, 16 // cores, 3, verbose=0, validation_data=(X[:40], Y[:40]), cores=cores).history
    counts = runtime.counts() - before
    y_pred, expected = torch.from_numpy(model.predict(X, verbose=0)), scores(prefix="own_", postfix="_now")
    expected.update(y_pred, Y)
    plain = {name: value.item() for name, value in expected.compute().items()}
    plain["both"] = plain.pop("own_f1_of_two_now")
    assert len(set(plain.values())) == 5
    expected.reset()
    expected.update(y_pred[:40], Y[:40])
    plain |= {f"val_{name}": value.item() for name, value in expected.compute().items()}
    plain["val_first"] = plain.pop("val_own_f1_now")
    assert history.keys() == {"loss", *plain}
    for name, value in plain.items():  # the same in each epoch, because the rate is 0
        assert history[name] == pytest.approx([value] * 3, abs=1e-5), name
    if how.get("jit_compile"):
        assert counts.host_reads == 0 and not counts.fallbacks and counts.graphs.get("train", 0) <= 2
    assert model.metrics_names == ["loss", *expected.keys()]
    assert model.higher_is_better("val_own_recall_now") is True
    # Outside a step it belongs to the user, with groups of equal sums, which a step ignores.
    model.scores.update(y_pred, Y)
    assert len(model.scores.compute_groups) == 3 and model.scores.compute()["own_f1_now"] == pytest.approx(
        plain["own_f1_now"], abs=1e-5
    )
    logs = model.evaluate(X[:40], Y[:40], 16 // cores, verbose=0, return_dict=True)
    assert {f"val_{name}": value for name, value in logs.items()} == pytest.approx(
        {name: value for name, value in plain.items() if name.startswith("val_")}, abs=1e-5
    )
    assert model.scores.compute()["own_f1_now"] == pytest.approx(plain["own_f1_now"], abs=1e-5)


@pytest.mark.cores(1, 8)
def test_a_replaced_metric_is_noticed(cores):
    model = model_of(ByHand)
    model.evaluate(X, Y, 16 // cores, verbose=0, cores=cores)
    model.f1 = torchmetrics.MeanMetric(nan_strategy="ignore")
    model.add = lambda x, y, learns: model.f1.update(x.mean()) or {"loss": 2}
    assert model.evaluate(X[:32], Y[:32], 32 // cores, verbose=0, return_dict=True) == pytest.approx(
        {"loss": 2.0, "f1": X[:32].mean().item()}
    )
    model.add = lambda x, y, learns: {"loss": torchmetrics.MeanMetric()}
    with pytest.raises(ArgumentError, match=r"by name, but 'loss' is MeanMetric\(\)"):
        model.evaluate(X[:48], Y[:48], 48 // cores, verbose=0)
    model.add = lambda x, y, learns: {"loss": model.seen.update("a word")}
    with pytest.raises(ArgumentError, match="inside a step seen.update takes tensors and numbers, got 'a word'"):
        model.evaluate(X[:24], Y[:24], 24 // cores, verbose=0)


class Numbers(tpufit.Model):
    """Its steps log numbers of the host."""

    steps = 0

    def train_step(self, batch):
        logs = super().train_step(batch)
        self.steps += self.counts
        return {**logs, "number": 0.5, "tensor": torch.tensor([3]), "steps": self.steps}

    def test_step(self, batch):
        return {**super().test_step(batch), "number": 0.5, "tensor": torch.tensor([3])}


@pytest.mark.cores(1, 8)
@pytest.mark.parametrize("how", HOW, ids=str)
def test_a_step_may_log_numbers_of_the_host(cores, how):
    model = model_of(Numbers, **how)
    model.counts = 0
    history = model.fit(X, Y, 16 // cores, 4, verbose=0, validation_data=(X, Y), cores=cores).history
    constant = {"number": 0.5, "tensor": 3.0, "val_number": 0.5, "val_tensor": 3.0, "steps": 0.0}
    assert {name: set(history[name]) for name in constant} == {name: {value} for name, value in constant.items()}


@pytest.mark.cores(1, 8)
def test_a_number_that_changes_is_not_frozen(cores):
    model = model_of(Numbers)
    model.counts = 1
    with pytest.warns(UserWarning, match="traced again on every call, which is slow, because its Python changes"):
        history = model.fit(X[:64], Y[:64], 16 // cores, 3, verbose=0, cores=cores).history
    assert history["steps"] == [2.5, 6.5, 10.5]
    model = model_of(Numbers, jit_compile=True)
    model.counts = 1
    with pytest.raises(ReplayError, match=r"its Python changes Numbers\.steps"):
        model.fit(X, Y, 16 // cores, 3, verbose=0, cores=cores)


class Keras(tpufit.Model):
    """Overrides the methods that a subclass of `keras.Model` may override."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, y, y_pred, sample_weight, training) * (1 if training else 2)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return {**super().compute_metrics(x, y, y_pred, sample_weight), "largest": y_pred.max() * 0 + 3}

    def get_metrics_result(self):
        logs = super().get_metrics_result()
        return {**logs, "wrong": 1 - logs["accuracy"]}


@pytest.mark.cores(1, 8)
@pytest.mark.parametrize("how", [{"jit_compile": True}, {"run_eagerly": True}], ids=str)
def test_the_methods_of_keras_may_be_overridden(cores, how):
    model = model_of(Keras, metrics=["accuracy"], **how)
    assert tpufit.Model.get_metrics_result(model) == {}
    history = model.fit(X, Y, 16 // cores, 2, verbose=0, validation_data=(X, Y), validation_step_freq=2, cores=cores)
    logs = {name: values[-1] for name, values in history.history.items()}
    assert logs["val_loss"] == pytest.approx(2 * logs["loss"], abs=1e-5)
    assert logs["wrong"] == 1 - logs["accuracy"] and logs["val_wrong"] == 1 - logs["val_accuracy"]
    assert logs["largest"] == logs["val_largest"] == 3.0
    logs = model.evaluate(X, Y, 16 // cores, verbose=0, return_dict=True)
    assert model.get_metrics_result() == logs and list(logs) == ["loss", "largest", "accuracy", "wrong"]
    loss, accuracy, largest = model.test_on_batch(X[:16], Y[:16])
    assert model.get_metrics_result() == {
        "loss": loss, "largest": largest, "accuracy": accuracy, "wrong": 1 - accuracy
    }  # fmt: skip


@pytest.mark.cores(1, 8)
def test_a_custom_compute_loss_may_omit_training(cores):
    class Own(tpufit.Model):
        def compute_loss(self, x, y, y_pred, sample_weight=None):
            return super().compute_loss(x, y, y_pred, sample_weight) + 1

    logs = [model_of(kind).evaluate(X, Y, 16 // cores, verbose=0, cores=cores) for kind in (Own, tpufit.Model)]
    assert logs[0] == pytest.approx(logs[1] + 1, abs=1e-5)


@pytest.mark.slow
def test_without_metrics_torchmetrics_isnt_imported(run_python):
    done = run_python(
        "import sys, torch, tpufit\n"
        "model = tpufit.Model(torch.nn.Linear(4, 1))\n"
        "model.compile('sgd', 'mse_loss')\n"
        "assert not {'torchmetrics', 'torch_xla', 'scipy', 'matplotlib'} & set(sys.modules)\n"
        "model.compile('sgd', 'mse_loss', metrics=['mae'])\n"
        "assert 'torchmetrics' in sys.modules",
        fresh=True,
    )
    assert done.returncode == 0, done.stderr


ROWS = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
HALVES = (ROWS[:, 0] > 0).long()
THIRDS = torch.arange(48) % 3
C = torchmetrics.classification


def _sum_of(pred, target):
    return pred.mean() + 0 * target.sum()


@pytest.mark.cores(1, 8)
@pytest.mark.parametrize("how", [{"run_eagerly": True}, {}, {"steps_per_execution": 2}], ids=str)
@pytest.mark.parametrize(
    ("metric", "outputs", "y", "says"),
    [
        (C.BinaryAccuracy(), 2, HALVES, "expected to have the same shape"),
        (C.MulticlassAccuracy(5), 2, HALVES, "equal to number of classes"),
        (C.MultilabelF1Score(3), 4, torch.ones(48, 4), "equal to the number of labels"),
        (C.MulticlassAUROC(4), 3, THIRDS, "equal to the number of classes but got 3 and 4"),
        (torchmetrics.wrappers.ClasswiseWrapper(C.MulticlassAccuracy(5, average=None)), 2, HALVES, "number of classes"),
        (C.BinaryAccuracy(), 1, THIRDS, r"values in `target`: tensor\(\[0, 1, 2\]\)"),
        (C.BinaryAccuracy(), 1, HALVES * 0.8 + 0.1, r"`target`: tensor\(\[0.1000, 0.9000\]\)"),
        (C.MulticlassAccuracy(3), 3, torch.arange(48) % 5, "classes from 0 to 4, but num_classes=3"),
        (C.MulticlassAccuracy(3), 3, THIRDS - 1, "classes from -1 to 1"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, torchmetrics.Metric) else "",
)
def test_batches_that_torchmetrics_refuses(cores, how, metric, outputs, y, says):
    model = tpufit.Model(nn.Linear(4, outputs))
    model.compile("sgd", _sum_of, metrics=[metric], **how)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ArgumentError, match=f"{type(metric).__name__}, can't take an output and targets.*{says}"):
        model.fit(ROWS, y, batch_size=16 // cores, verbose=0, cores=cores)
    same = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert same or "run_eagerly" in how  # an eager step has already changed the weights when it updates the metrics


@pytest.mark.cores(1, 8)
@pytest.mark.parametrize("how", [{"run_eagerly": True}, {}, {"steps_per_execution": 2}], ids=str)
def test_batches_that_torchmetrics_accepts(cores, how):
    """Labels in floating point, ignored labels, and collections with other metrics."""
    several = torchmetrics.MetricCollection({"f1": C.MulticlassF1Score(2), "top": C.MulticlassAccuracy(2)}, prefix="c_")
    for metrics_, outputs, y, loss in (
        ([C.BinaryAccuracy()], 1, HALVES.float(), "binary_cross_entropy_with_logits"),
        (["accuracy", several], 2, HALVES, "cross_entropy"),
        ([C.MulticlassAccuracy(3, ignore_index=-100)], 3, torch.where(ROWS[:, 1] > 1, -100, THIRDS), "cross_entropy"),
    ):
        torch.manual_seed(0)
        net = nn.Linear(4, outputs)
        model = tpufit.Model(net)
        model.compile("sgd", loss, metrics=metrics_, **how)
        logs = model.evaluate(ROWS, y, batch_size=16 // cores, verbose=0, cores=cores, return_dict=True)
        pred = model.predict(ROWS, verbose=0)
        pred = torch.as_tensor(pred).squeeze(-1)
        for theirs in metrics_:
            if isinstance(theirs, torchmetrics.MetricCollection):
                for name, value in theirs(pred, y.long()).items():
                    assert logs[name] == pytest.approx(float(value), abs=1e-6)
            elif theirs != "accuracy":
                name = {"BinaryAccuracy": "binary_accuracy"}.get(type(theirs).__name__, "multiclass_accuracy")
                assert logs[name] == pytest.approx(float(theirs(pred, y.long())), abs=1e-6)


@pytest.mark.cores(1, 8)
def test_a_metric_of_a_step_is_checked_too(cores):
    class Own(tpufit.Model):
        def __init__(self, module):
            super().__init__(module)
            self.score = C.MulticlassAccuracy(5)

        def train_step(self, batch):
            x, y = batch
            y_pred = self(x)
            self.score.update(y_pred, y)
            loss = self.compute_loss(x, y, y_pred)
            self.apply_gradients(loss)
            return {"loss": loss}

    model = Own(nn.Linear(4, 2))
    model.compile("sgd", "cross_entropy")
    with pytest.raises(ArgumentError, match="'score', MulticlassAccuracy, can't take"):
        model.fit(ROWS, HALVES, batch_size=16 // cores, verbose=0, cores=cores)


def test_collections_by_name():
    scores = torchmetrics.MetricCollection([C.BinaryAccuracy(), C.BinaryF1Score()])
    assert [m.name for m in metrics.build(["mae", scores])] == ["mae", "BinaryAccuracy", "BinaryF1Score"]
    assert [m.name for m in metrics.build({"all": scores})] == ["all_BinaryAccuracy", "all_BinaryF1Score"]
