"""A loss for each output: the sum, its parts and its weights equal a plain loop's, on 1 and on 8 cores."""

import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tpufit
from tpufit import runtime
from tpufit.errors import ArgumentError, DataError, LabelError, UnknownNameError
from tpufit.losses import Loss, LossByOutput, SharedLoss, build

on_cores = pytest.mark.cores(1, 8, timeout=300, quick=False)

GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(77, 12)).astype("float32")  # two steps of 32 rows and one of 13
KIND = GENERATOR.integers(0, 4, 77)
SIZE = GENERATOR.normal(size=(77, 1)).astype("float32")
TOKENS = GENERATOR.integers(0, 4, (77, 5))
BY_ROW = GENERATOR.random(77).astype("float32")
BY_TOKEN = GENERATOR.random((77, 5)).astype("float32")
CLASSES = torch.tensor([1.0, 2.0, 0.5, 1.0])


class ByName(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.kind, self.size = nn.Linear(12, 8), nn.Linear(8, 4), nn.Linear(8, 1)

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return {"kind": self.kind(h), "size": self.size(h)}


class ByPlace(ByName):
    def forward(self, x):
        return tuple(super().forward(x).values())


class Tagger(nn.Module):
    """Logits of shape `(batch, classes, time)`."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 4 * 5)

    def forward(self, x):
        return self.layer(x).unflatten(1, (4, 5))


def made(kind):
    torch.manual_seed(0)
    return kind()


def fit(model, cores, x, y, *, epochs=2, **arguments):
    before = runtime.counts()
    given = {"batch_size": 32 // cores, "epochs": epochs, "shuffle": False, "verbose": 0, "cores": cores}
    history = model.fit(x, y, **(given | arguments)).history
    return history, runtime.counts() - before


def plain(net, loss_of, *data, epochs=2, rate=0.1, over=lambda x, *targets: len(x)):
    """Train in plain PyTorch; `loss_of(net, *batch)` returns the loss and its parts.

    Return their means by epoch, in which a batch is weighted by `over(*batch)`.
    """
    optimizer = torch.optim.SGD(net.parameters(), rate)
    data = [torch.as_tensor(column) for column in data]
    history = []
    for _ in range(epochs):
        sums = weights = 0
        for i in range(0, 77, 32):
            batch = [column[i : i + 32] for column in data]
            values = loss_of(net, *batch)
            optimizer.zero_grad()
            values[0].backward()
            optimizer.step()
            sums = sums + torch.stack(values).detach() * over(*batch)
            weights = weights + over(*batch)
        history.append(sums / weights)
    return torch.stack(history)


def assert_trained_alike(model, net, history, expected, names):
    assert list(history) == names
    torch.testing.assert_close(torch.tensor(list(history.values())).T, expected, rtol=0, atol=1e-5)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, net.state_dict()[name], rtol=0, atol=1e-5)


def assert_replayed(model, counts, waits):
    """Check that every shape was traced once and proven once, without fallbacks, and only the epochs' ends waited."""
    assert not model.report().traced["train"]
    assert counts.graphs.get("train", 0) <= 2 and not counts.fallbacks and counts.host_reads == 0
    assert {k: n for k, n in counts.waits.items() if n and k not in ("throttle", "capture", "audit")} == {"logs": waits}


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.1)


@on_cores
@pytest.mark.parametrize("steps", [1, 2])
def test_losses_by_name_equal_a_plain_loop(cores, steps):
    def loss_of(net, x, kind, size):
        out = net(x)
        parts = F.cross_entropy(out["kind"], kind, CLASSES), F.l1_loss(out["size"], size)
        return parts[0] + 0.3 * parts[1], *parts

    model, net = tpufit.Model(made(ByName)), made(ByName)
    model.compile(
        sgd,
        {"kind": nn.CrossEntropyLoss(CLASSES.clone()), "size": "mae"},
        loss_weights={"kind": 1, "size": 0.3},
        scale_lr=None,
        jit_compile=True,
        steps_per_execution=steps,
    )
    history, counts = fit(model, cores, X, {"kind": KIND, "size": SIZE}, epochs=3)
    assert_replayed(model, counts, waits=3)

    def over(x, kind, size):
        return torch.stack([torch.ones(()), CLASSES[kind].sum(), torch.tensor(len(size))])

    expected = plain(net, loss_of, X, KIND, SIZE, epochs=3, over=over)
    expected[:, 0] = expected[:, 1] + 0.3 * expected[:, 2]
    assert_trained_alike(model, net, history, expected, ["loss", "kind_loss", "size_loss"])


@on_cores
def test_losses_by_position_equal_a_plain_loop(cores):
    def loss_of(net, x, kind, size):
        one, other = net(x)
        parts = F.cross_entropy(one, kind), F.smooth_l1_loss(other, size)
        return 2 * parts[0] + parts[1], *parts

    model, net = tpufit.Model(made(ByPlace)), made(ByPlace)
    losses = ["cross_entropy", lambda y_pred, y: F.smooth_l1_loss(y_pred, y)]
    model.compile(sgd, losses, loss_weights=[2.0, 1.0], scale_lr=None, jit_compile=True)
    history, counts = fit(model, cores, X, (KIND, SIZE))
    assert_replayed(model, counts, waits=2)
    expected = plain(net, loss_of, X, KIND, SIZE)
    assert_trained_alike(model, net, history, expected, ["loss", "output_0_loss", "output_1_loss"])


@on_cores
def test_an_evaluation_returns_each_outputs_loss(cores):
    model, net = tpufit.Model(made(ByName)), made(ByName)
    model.compile(sgd, {"kind": "cross_entropy", "size": "mse"}, loss_weights={"kind": 1.0, "size": 3.0})
    y = {"kind": KIND, "size": SIZE}
    values = model.evaluate(X, y, batch_size=32 // cores, verbose=0, return_dict=True, cores=cores)
    with torch.no_grad():
        out = net(torch.from_numpy(X))
        kind = F.cross_entropy(out["kind"], torch.from_numpy(KIND)).item()
        size = F.mse_loss(out["size"], torch.from_numpy(SIZE)).item()
    assert list(values) == ["loss", "kind_loss", "size_loss"]
    assert list(values.values()) == pytest.approx([kind + 3 * size, kind, size], abs=1e-5)


@on_cores
@pytest.mark.parametrize("form", ["one for all", "by name", "for one alone"])
def test_sample_weights_by_output(cores, form):
    by_size = BY_ROW[::-1].copy()
    weights = {"one for all": BY_ROW, "by name": {"kind": BY_ROW, "size": by_size}, "for one alone": {"kind": BY_ROW}}
    of_size = {"one for all": BY_ROW, "by name": by_size, "for one alone": np.ones_like(BY_ROW)}[form]

    def loss_of(net, x, kind, size, w_kind, w_size):
        out = net(x)
        of_kind = (F.cross_entropy(out["kind"], kind, reduction="none") * w_kind).mean()
        of_size = (F.mse_loss(out["size"], size, reduction="none")[:, 0] * w_size).mean()
        return of_kind + of_size, of_kind, of_size

    model, net = tpufit.Model(made(ByName)), made(ByName)
    model.compile(sgd, {"kind": "cross_entropy", "size": "mse"}, scale_lr=None, jit_compile=True)
    y = {"kind": KIND, "size": SIZE}
    history, counts = fit(model, cores, X, y, sample_weight=weights[form])
    assert_replayed(model, counts, waits=2)
    expected = plain(net, loss_of, X, KIND, SIZE, BY_ROW, of_size)
    assert_trained_alike(model, net, history, expected, ["loss", "kind_loss", "size_loss"])


@on_cores
def test_weights_of_tokens_equal_a_plain_loop(cores):
    def loss_of(net, x, tokens, weight):
        return [(F.cross_entropy(net(x), tokens, reduction="none") * weight).sum() / weight.numel()]

    model, net = tpufit.Model(made(Tagger)), made(Tagger)
    model.compile(sgd, "cross_entropy", scale_lr=None, jit_compile=True)
    history, counts = fit(model, cores, X, TOKENS, sample_weight=BY_TOKEN)
    assert_replayed(model, counts, waits=2)
    expected = plain(net, loss_of, X, TOKENS, BY_TOKEN)
    assert_trained_alike(model, net, history, expected, ["loss"])


@on_cores
def test_auxiliary_losses_of_a_step_are_logged(cores):
    class Regularized(tpufit.Model):
        def train_step(self, batch):
            x, y = batch
            y_pred = self(x)
            kl = 0.1 * sum(p.square().sum() for p in self.module.parameters())
            loss = self.compute_loss(x, y, y_pred) + kl
            self.apply_gradients(loss)
            return {"loss": loss, "kl": kl}

    def loss_of(net, x, kind, size):
        out = net(x)
        parts = F.cross_entropy(out["kind"], kind), F.mse_loss(out["size"], size)
        kl = 0.1 * sum(p.square().sum() for p in net.parameters())
        return sum(parts) + kl, kl, *parts

    model, net = Regularized(made(ByName)), made(ByName)
    model.compile(sgd, {"kind": "cross_entropy", "size": "mse"}, scale_lr=None, jit_compile=True)
    history, counts = fit(model, cores, X, {"kind": KIND, "size": SIZE})
    assert_replayed(model, counts, waits=2)
    expected = plain(net, loss_of, X, KIND, SIZE)
    assert_trained_alike(model, net, history, expected, ["loss", "kl", "kind_loss", "size_loss"])


@on_cores
def test_an_output_with_a_loss_needs_a_target(cores):
    model = tpufit.Model(made(ByName))
    model.compile(sgd, {"kind": "cross_entropy", "size": "mse"})
    with pytest.raises(DataError, match="output 'size' has a loss, but its target is None: pass a target, or None"):
        fit(model, cores, X, {"kind": KIND, "size": None})


@on_cores
def test_labels_are_checked_for_each_output(cores):
    model = tpufit.Model(made(ByName))
    model.compile(sgd, {"kind": "cross_entropy", "size": "mse"})
    fit(model, cores, X, {"kind": KIND, "size": SIZE})
    wrong = KIND.copy()
    wrong[40] = 9
    with pytest.raises(LabelError, match="output 'kind': label 9 is outside the module's 4 classes"):
        fit(model, cores, X, {"kind": wrong, "size": SIZE})  # in a replayed step


@on_cores
@pytest.mark.parametrize(
    ("kind", "loss", "y", "error", "message"),
    [
        (
            ByName,
            {"kind": "mse", "age": "mse"},
            {"kind": KIND, "age": SIZE},
            ArgumentError,
            "got a dict of 'kind' and 'size'",
        ),
        (ByName, {"kind": "cross_entropy"}, {"kind": KIND}, ArgumentError, "'kind' and 'size'.*None"),
        (ByName, ["mse", "mse"], (KIND, SIZE), ArgumentError, "tuple or list of 2, as loss is, got a dict"),
        (ByPlace, ["mse"], (SIZE,), ArgumentError, "tuple or list of 1, as loss is, got a tuple of 2"),
        (ByName, "mse", SIZE, ArgumentError, "returns a dict of 'kind' and 'size'. Give each output a loss"),
        (
            ByName,
            {"kind": "mse", "size": "mse"},
            {"kind": KIND},
            DataError,
            "the targets must be.*got a dict of 'kind'",
        ),
        (ByName, {"kind": "mse", "size": "mse"}, SIZE, DataError, "the targets must be.*got one tensor of shape"),
    ],
)
@pytest.mark.soak_on(8)
def test_losses_for_missing_outputs(cores, kind, loss, y, error, message):
    model = tpufit.Model(made(kind))
    model.compile(sgd, loss)
    before = runtime.counts()
    with pytest.raises(error, match=message):
        fit(model, cores, X, y)
    assert not (runtime.counts() - before).graphs.get("train")  # nothing was compiled


@on_cores
def test_an_output_without_a_loss(cores):
    model, net = tpufit.Model(made(ByName)), made(ByName)
    model.compile(sgd, {"kind": None, "size": "mse"}, scale_lr=None)
    history, _ = fit(model, cores, X, {"size": SIZE})
    expected = plain(net, lambda net, x, size: [F.mse_loss(net(x)["size"], size)], X, SIZE)
    assert_trained_alike(model, net, history, expected, ["loss"])


def test_mistakes_that_compile_finds():
    model = tpufit.Model(made(ByName))
    both = {"kind": "cross_entropy", "size": "mse"}
    for loss, weights, message in [
        (both, {"age": 1.0}, "loss_weights must be a dict of 'kind' and 'size', as loss is, got a dict of 'age'"),
        (both, {"kind": 1.0, "size": 1.0, "age": 1.0}, "got a dict of 'kind', 'size' and 'age'"),
        (both, [1.0, 2.0], "got a list of 2"),
        (["mse", "mse"], [1.0], "a tuple or list of 2, as loss is, got a list of 1"),
        (["mse", "mse"], [1.0, "2"], "must be numbers, got '2'"),
        ("mse", 0.5, "loss_weights need a dict or a list of losses"),
        ({0: "mse"}, None, "the names of the outputs"),
        ({"kind": None}, None, "at least one output needs a loss"),
        ([nn.MSELoss], None, "an instance, not the class"),
    ]:
        with pytest.raises(ArgumentError, match=re.escape(message)):
            model.compile(sgd, loss, loss_weights=weights)
    with pytest.raises(UnknownNameError, match="did you mean 'cross_entropy'"):
        model.compile(sgd, {"kind": "crossentropy"})


def test_a_loss_without_a_weight_has_weight_1():
    ones = {"a": torch.tensor(1.0), "b": torch.tensor(1.0)}
    assert LossByOutput({"a": "mse", "b": "mse"}, {"b": 3.0}).total(ones) == 4.0
    assert LossByOutput(["mse", None, "mse"], [None, None, 3]).total({0: ones["a"], 2: ones["b"]}) == 4.0


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 5)])
def test_sample_weights_of_1_change_nothing(reduction, shape):
    torch.manual_seed(0)
    logits, labels = torch.randn(3, 4, 5), torch.randint(0, 4, (3, 5))
    labels[0, 2:] = -100  # padding, which doesn't count as elements either
    module = nn.CrossEntropyLoss(reduction=reduction, ignore_index=-100 if reduction != "none" else -1)
    labels = labels.clamp(min=0) if reduction == "none" else labels
    loss = Loss(module)
    torch.testing.assert_close(loss(logits, labels, torch.ones(shape)), loss(logits, labels))


def test_weights_of_tokens_and_of_rows():
    torch.manual_seed(0)
    logits, labels = torch.randn(3, 4, 5), torch.randint(0, 4, (3, 5))
    each, weight = F.cross_entropy(logits, labels, reduction="none"), torch.rand(3, 5)
    torch.testing.assert_close(Loss("cross_entropy")(logits, labels, weight), (each * weight).mean())
    torch.testing.assert_close(
        Loss("cross_entropy")(logits, labels, weight[:, 0]), (each.mean(1) * weight[:, 0]).mean()
    )
    for wrong in (torch.ones(3, 4), torch.ones(4), torch.ones(3, 5, 2)):
        with pytest.raises(ArgumentError, match=r"doesn't fit losses of shape \(3, 5\)"):
            Loss("cross_entropy")(logits, labels, wrong)
    with pytest.raises(ArgumentError, match="one tensor for one output, got a dict of 'a'"):
        Loss("cross_entropy")(logits, labels, {"a": weight})


def test_weights_for_missing_outputs():
    loss = build({"a": "mse", "b": "mse"})
    ones = {"a": torch.ones(2), "b": torch.ones(2)}
    with pytest.raises(ArgumentError, match="sample_weight must be a dict of 'a' and 'b'.*got a dict of 'c'"):
        loss.parts(ones, ones, {"c": torch.ones(2)})


def test_a_single_loss_in_a_dict_has_no_separate_log():
    loss = LossByOutput({"a": "mse"})
    assert loss.logs(loss.parts({"a": torch.ones(2)}, {"a": torch.zeros(2)})) == {}
    assert build(None) is None and type(build("mse")) is SharedLoss


class InNests(ByName):
    def forward(self, x):
        kind, size = super().forward(x).values()
        return {"both": (kind, size), "more": [{"size": 2 * size}]}


NESTED = {"both": [KIND, SIZE], "more": [{"size": SIZE}]}


@on_cores
@pytest.mark.soak_on(8)
def test_losses_in_a_nest_equal_a_plain_loop(cores):
    def loss_of(net, x, kind, size):
        out = net(x)
        parts = F.cross_entropy(out["both"][0], kind), F.l1_loss(out["more"][0]["size"], size)
        return 2 * parts[0] + parts[1], *parts

    model, net = tpufit.Model(made(InNests)), made(InNests)
    losses = {"both": ["cross_entropy", None], "more": [{"size": "mae"}]}
    weights = {"both": (2.0, None), "more": [{"size": 1.0}]}
    metrics = {"both": (["accuracy"], "mse"), "more": [{"size": ["mae"]}]}
    model.compile(sgd, losses, metrics=metrics, loss_weights=weights, scale_lr=None, jit_compile=True)
    history, counts = fit(model, cores, X, NESTED)
    assert_replayed(model, counts, waits=2)
    of_metrics = ["both/output_0_accuracy", "both/output_1_mse", "more/output_0/size_mae"]
    taken = {name: history.pop(name) for name in of_metrics}
    assert taken["more/output_0/size_mae"] == pytest.approx(history["more/output_0/size_loss"], abs=1e-5)
    expected = plain(net, loss_of, X, KIND, SIZE)
    names = ["loss", "both/output_0_loss", "more/output_0/size_loss"]
    assert_trained_alike(model, net, history, expected, names)
    assert model.metrics_names == [*names, *of_metrics]


def test_a_nest_of_another_structure_is_an_error():
    ones, loss = torch.ones(2), build({"both": ["mse", "mse"], "more": "mse"})
    right = {"both": (ones, ones), "more": ones}
    assert float(loss.total(loss.parts(right, right))) == 0
    for wrong, says in [
        (
            {"both": ones, "more": ones},
            "the targets under 'both' must be a tuple or list of 2, as loss is, got one tens",
        ),
        (
            {"both": [ones] * 3, "more": ones},
            "the targets under 'both' must be a tuple or list of 2, as loss is, got a",
        ),
        ({"both": [ones] * 2}, "the targets must be a dict of 'both' and 'more'"),
    ]:
        with pytest.raises(DataError, match=says):
            loss.parts(right, wrong)


class Sizes(ByName):
    def forward(self, x):
        size = super().forward(x)["size"]
        return [size, {"double": 2 * size}]


@on_cores
@pytest.mark.parametrize("loss", ["mse", nn.MSELoss()], ids=["name", "module"])
@pytest.mark.soak_on(8)
def test_one_loss_is_for_each_output(cores, loss):
    def loss_of(net, x, size):
        one, other = net(x)
        parts = F.mse_loss(one, size), F.mse_loss(other["double"], size)
        return parts[0] + parts[1], *parts

    model, net = tpufit.Model(made(Sizes)), made(Sizes)
    model.compile(sgd, loss, scale_lr=None)
    history, _ = fit(model, cores, X, (SIZE, {"double": SIZE}))
    names = ["loss", "output_0_loss", "output_1/double_loss"]
    assert_trained_alike(model, net, history, plain(net, loss_of, X, SIZE), names)
    assert model.metrics_names == names


@on_cores
def test_labels_are_checked_with_one_loss_for_each_output(cores):
    class Kinds(ByName):
        def forward(self, x):
            kind = super().forward(x)["kind"]
            return kind, kind[:, :3]

    model = tpufit.Model(made(Kinds))
    model.compile(sgd, "cross_entropy")
    with pytest.raises(LabelError, match="output 'output_1': label 3 is outside the module's 3 classes"):
        fit(model, cores, X, (KIND, KIND))


@on_cores
@pytest.mark.parametrize("y", [(SIZE, SIZE), [SIZE], {"a": SIZE}], ids=["tuple", "list of one", "dict"])
@pytest.mark.soak_on(8)
def test_several_targets_for_one_output(cores, y):
    model = tpufit.Model(nn.Linear(12, 1))
    model.compile(sgd, "mse")
    with pytest.raises(ArgumentError, match="what the module returns must be a .* as the targets are, got one tensor"):
        fit(model, cores, X, y)
