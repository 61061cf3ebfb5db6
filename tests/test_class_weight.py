"""`fit(class_weight=...)` weights rows by their class, looked up inside the step, for data of any form."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import tpufit
from tpufit import runtime
from tpufit.backend import HOST
from tpufit.errors import ArgumentError
from tpufit.losses import ClassWeight

on_cores = pytest.mark.cores(1, 8, timeout=300, quick=False)

GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(77, 6)).astype("float32")  # two steps of 32 rows and one of 13
Y = GENERATOR.integers(0, 4, 77)
TOKENS = GENERATOR.integers(0, 4, (77, 5))
WEIGHTS = {0: 0.5, 2: 3.0}
TABLE = torch.tensor([0.5, 1.0, 3.0, 1.0])


def net(seed=0, outputs=4):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, outputs))


def compiled(module, loss="cross_entropy", **arguments):
    model = tpufit.Model(module)
    model.compile(lambda p: torch.optim.SGD(p, 0.1), loss, scale_lr=None, **({"jit_compile": True} | arguments))
    return model


def fit(model, cores, x=X, y=Y, **arguments):
    given = {"batch_size": None if y is None else 32 // cores, "epochs": 2, "shuffle": False, "verbose": 0}
    return model.fit(x, y, cores=cores, **(given | arguments)).history


def plain(module, table=TABLE, x=X, y=Y, rows=None, epochs=2):
    """The same training in a plain loop; `rows` are sample weights."""
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    x, y = torch.from_numpy(x), torch.from_numpy(y)
    weights = table[y] if rows is None else table[y] * torch.from_numpy(rows)
    for _ in range(epochs):
        for i in range(0, 77, 32):
            part = slice(i, i + 32)
            loss = (F.cross_entropy(module(x[part]), y[part], reduction="none") * weights[part]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return module.state_dict()


def assert_equal(model, expected):
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-5)


@on_cores
@pytest.mark.parametrize("form", ["arrays", "loader", "iterable"])
def test_any_form_of_data_equals_a_plain_loop(cores, form):
    rows = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    loader = DataLoader(rows, 32 // cores)
    data = {"arrays": (X, Y), "loader": (loader, None), "iterable": (list(loader), None)}[form]
    model = compiled(net())
    before = runtime.counts()
    history = fit(model, cores, *data, class_weight=WEIGHTS)
    counts = runtime.counts() - before
    assert_equal(model, plain(net()))
    assert list(history) == ["loss"]
    assert not model.report().traced["train"]
    assert counts.graphs.get("train", 0) <= 2 and not counts.fallbacks and counts.host_reads == 0
    assert {k: n for k, n in counts.waits.items() if n and k not in ("throttle", "capture", "audit")} == {"logs": 2}


@on_cores
def test_a_second_fit_uses_its_own_weights(cores):
    module = net()
    model = compiled(module)
    expected = net()
    fit(model, cores, class_weight=WEIGHTS)
    plain(expected)
    before = runtime.counts()
    others = {0: 2.0, 2: 0.1}  # in a table of the same size: the same graph with other numbers
    fit(model, cores, class_weight=others)
    counts = runtime.counts() - before
    assert_equal(model, plain(expected, torch.tensor([2.0, 1.0, 0.1, 1.0])))
    assert counts.graphs.get("train", 0) == 0 and counts.captures == {"class_weight": 1}
    fit(model, cores)
    assert_equal(model, plain(expected, torch.ones(4)))
    before = runtime.counts()
    fit(model, cores, class_weight=dict(WEIGHTS))  # equal to the first: its graphs exist
    assert_equal(model, plain(expected))
    assert not (runtime.counts() - before).captures


@on_cores
def test_class_weights_multiply_sample_weights(cores):
    rows = GENERATOR.random(77).astype("float32")
    model = compiled(net(), metrics=["accuracy"], weighted_metrics=["accuracy"])
    history = fit(model, cores, sample_weight=rows, class_weight=WEIGHTS, validation_data=(X, Y))
    expected = net()
    assert_equal(model, plain(expected, rows=rows))
    loss = F.cross_entropy(expected(torch.from_numpy(X)), torch.from_numpy(Y)).item()
    assert history["val_loss"][-1] == pytest.approx(loss, abs=1e-5)
    assert history["val_accuracy"] == history["val_weighted_accuracy"]
    assert history["accuracy"] != history["weighted_accuracy"]


@on_cores
@pytest.mark.parametrize("how", [{"steps_per_execution": 2}, {"jit_compile": False}, {"run_eagerly": True}])
def test_class_weights_in_every_mode_of_steps(cores, how):
    model = compiled(net(), **how)
    fit(model, cores, class_weight=WEIGHTS)
    assert_equal(model, plain(net()))


@on_cores
@pytest.mark.parametrize(
    "y", [Y, np.eye(4, dtype="float32")[Y], torch.from_numpy(Y)], ids=["array", "one-hot", "tensor"]
)
def test_balanced_weights_are_scikit_learns(cores, y):
    model = compiled(net())
    x, held = np.concatenate([X, X]), np.zeros_like(Y)  # validation rows don't count
    both = np.concatenate([Y, held]) if y.ndim == 1 else np.concatenate([y, np.eye(4, dtype="float32")[held]])
    fit(model, cores, x=x, y=torch.from_numpy(both) if isinstance(y, torch.Tensor) else both, class_weight="balanced",
        validation_split=0.5)  # fmt: skip
    assert_equal(model, plain(net(), torch.from_numpy(77 / (4 * np.bincount(Y)))))


@on_cores
def test_an_empty_dict_means_no_weights(cores):
    model = compiled(net())
    fit(model, cores, class_weight={})
    assert_equal(model, plain(net(), torch.ones(4)))


@on_cores
def test_one_hot_targets(cores):
    model = compiled(net())
    fit(model, cores, y=np.eye(4, dtype="float32")[Y], class_weight=WEIGHTS)
    assert_equal(model, plain(net()))


@on_cores
def test_tokens_are_weighted_by_their_own_classes(cores):
    class Tagger(nn.Sequential):
        def forward(self, x):
            return super().forward(x).unflatten(1, (4, 5))

    model = compiled(Tagger(net(outputs=20)))
    fit(model, cores, y=TOKENS, class_weight=WEIGHTS)
    expected = plain(Tagger(net(outputs=20)), y=TOKENS)
    assert_equal(model, expected)


@on_cores
def test_a_custom_step_gets_class_weights_as_sample_weight(cores):
    class Own(tpufit.Model):
        def train_step(self, batch):
            x, y, sample_weight = batch
            loss = self.compute_loss(x, y, self(x), sample_weight)
            self.apply_gradients(loss)
            return {"loss": loss, "weight": sample_weight.mean()}

    model = Own(net())
    model.compile("sgd", "cross_entropy", jit_compile=True)
    history = fit(model, cores, class_weight=WEIGHTS)
    assert history["weight"] == pytest.approx([TABLE[torch.from_numpy(Y)].mean().item()] * 2, abs=1e-6)


def test_weights_of_all_kinds_of_labels():
    def weights(y, sample_weight=None):
        return ClassWeight(WEIGHTS).weigh((None, y, sample_weight), HOST)[2].tolist()

    assert weights(torch.tensor([0, 1, 2, 3, 99, -100])) == [0.5, 1, 3, 1, 1, 1]
    assert weights(torch.tensor([[0], [2]])) == [[0.5], [3]]
    assert weights(torch.tensor([[0.0], [2.0]])) == [0.5, 3]
    assert weights(torch.tensor([True, False])) == [1, 0.5]
    assert weights(torch.tensor([[0.1, 0.2, 0.7], [0.8, 0.1, 0.1]])) == [3, 0.5]
    assert weights(torch.tensor([0, 2]), torch.tensor([[2], [10]])) == [[1], [30]]
    assert weights(torch.tensor([[0, 2], [2, 1]]), torch.tensor([2.0, 10.0])) == [[1, 6], [30, 10]]
    assert weights(torch.tensor([0, 2]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])) == [[0.5, 1], [9, 12]]


def test_wrong_class_weights_are_errors():
    model = compiled(net())
    for wrong, message in [
        ({"cat": 1.0}, "the class 'cat': classes are whole numbers from 0"),
        ({0.5: 1.0}, "the class 0.5"),
        ({True: 1.0}, "the class True"),
        ({-1: 1.0}, "the class -1"),
        ({0: "heavy"}, "the weight 'heavy' for class 0"),
        ([1.0, 2.0], r"a dict of weights by class, such as \{0: 1.0, 1: 5.0\}, got \[1.0, 2.0\]"),
    ]:
        with pytest.raises(ArgumentError, match=message):
            model.fit(X, Y, class_weight=wrong)
    for data in (DataLoader(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), 32), [(X, Y)]):
        with pytest.raises(
            ArgumentError, match=r"'balanced' counts the labels of one array y, got y = None: pass other"
        ):
            model.fit(data, class_weight="balanced")
    several = compiled(net(), {"a": "mse", "b": "mse"})
    with pytest.raises(ArgumentError, match="a loss of one output, and this loss has several: pass sample_weight"):
        several.fit(X, Y, class_weight=WEIGHTS)
    weigh = ClassWeight({np.int64(1): np.float64(2.0)}).weigh
    with pytest.raises(ArgumentError, match="got y = None"):
        weigh((X,), HOST)
    with pytest.raises(ArgumentError, match="got y = a dict of 'a'"):
        weigh((X, {"a": torch.ones(2)}), HOST)
    with pytest.raises(ArgumentError, match=r"got floats of shape \(2, 3, 4\)"):
        weigh((X, torch.ones(2, 3, 4)), HOST)
    with pytest.raises(ArgumentError, match="sample_weight must be one tensor, got a list of 1"):
        weigh((X, torch.ones(2), [torch.ones(2)]), HOST)
