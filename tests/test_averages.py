"""Losses are means over all rows: batches that are combined count as one, for any division and any cores."""

import copy
import math
import os
import signal

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tpufit
from tpufit import runtime
from tpufit.errors import ArgumentError
from tpufit.losses import weighted_mean

ROWS, TIME, WORDS = 72, 6, 11
GENERATOR = torch.Generator().manual_seed(1)
X = torch.randint(0, WORDS, (ROWS, TIME), generator=GENERATOR)
# The first texts have one counted word, the next none, and the others all.
LENGTHS = torch.tensor([1] * 16 + [0] * 16 + [TIME] * 40)
Y = torch.randint(0, WORDS, (ROWS, TIME), generator=GENERATOR)
Y[torch.arange(TIME) >= LENGTHS[:, None]] = -100
VALUES = torch.randn(ROWS, TIME, generator=GENERATOR)
LABELS = torch.arange(ROWS) // 12 % 3
CLASSES = torch.linspace(0.2, 5, WORDS)
SAMPLES = torch.rand(ROWS, generator=GENERATOR) + (torch.arange(ROWS) < 20) * 5


class Net(nn.Module):
    """Returns logits of words, values of words, and logits of texts."""

    def __init__(self):
        super().__init__()
        self.body, self.words, self.values = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS), nn.Linear(8, 1)
        self.label = nn.Linear(8, 3)

    def forward(self, x):
        h = self.body(x)
        return {"words": self.words(h).mT, "values": self.values(h)[..., 0], "label": self.label(h.mean(1))}


class Words(Net):
    def forward(self, x):
        return super().forward(x)["words"]


class OwnLoss(Words):
    """As a model of transformers: its loss is of the next words, and returned with the logits."""

    def forward(self, x, labels=None):
        logits = super().forward(x)
        return {"loss": F.cross_entropy(logits[..., :-1], labels[:, 1:]), "logits": logits}


def masked(y_pred, y):
    return F.cross_entropy(y_pred, y, reduction="none"), y != -100


def masked_and_reduced(y_pred, y):
    counts = (y != -100).sum()
    return (F.cross_entropy(y_pred, y, reduction="none") * (y != -100)).sum() / counts, counts


class OwnStep(tpufit.Model):
    """Steps by hand, with a loss of PyTorch."""

    def train_step(self, batch):
        x, y = batch
        loss = F.cross_entropy(self.module(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.detach()}

    def test_step(self, batch):
        x, y = batch
        return {"loss": nn.CrossEntropyLoss()(self.module(x), y)}


class OwnAverage(tpufit.Model):
    """Steps that compute their own loss, and a penalty."""

    def train_step(self, batch):
        loss, penalty = self.losses(batch)
        self.apply_gradients(loss + penalty)
        return {"loss": loss}

    def test_step(self, batch):
        return {"loss": self.losses(batch)[0]}

    def losses(self, batch):
        x, y = batch
        each = F.cross_entropy(self(x), y, reduction="none")
        return self.average(each, y != -100), 0 * self.module.words.weight.square().sum()


class OwnLosses(tpufit.Model):
    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        return 2 * F.cross_entropy(y_pred, y)


def by_output(out, y):
    words = F.cross_entropy(out["words"], y["words"], CLASSES)
    return words + 3 * F.mse_loss(out["values"], y["values"]) + F.cross_entropy(out["label"], y["label"])


def weighed(logits, y, samples):
    return (F.cross_entropy(logits, y, reduction="none") * samples[:, None]).sum() / (y != -100).sum()


TARGETS = {"words": Y, "values": VALUES, "label": LABELS}
LOSSES = {"words": nn.CrossEntropyLoss(CLASSES.clone()), "values": "mse", "label": "cross_entropy"}
# Of each kind the net, the class of the model, the loss, the data, and the loss of all rows in PyTorch.
PLAIN = Words, tpufit.Model
KINDS = {
    "ignored labels": (*PLAIN, "cross_entropy", (X, Y), F.cross_entropy),
    "class weights": (
        *(*PLAIN, nn.CrossEntropyLoss(CLASSES.clone(), label_smoothing=0.1), (X, Y.clamp(0))),
        nn.CrossEntropyLoss(CLASSES, label_smoothing=0.1),
    ),
    "another ignored label": (
        *(*PLAIN, nn.CrossEntropyLoss(CLASSES.clone(), ignore_index=3), (X, Y.clamp(0))),
        nn.CrossEntropyLoss(CLASSES, ignore_index=3),
    ),
    "sample weights": (*PLAIN, "cross_entropy", (X, Y, SAMPLES), weighed),
    "a sum": (*PLAIN, nn.CrossEntropyLoss(reduction="sum"), (X, Y), nn.CrossEntropyLoss(reduction="sum")),
    "a function": (*PLAIN, lambda p, y: F.cross_entropy(p.flatten(2), y.flatten(1)), (X, Y), F.cross_entropy),
    "a function's sum": (
        *PLAIN,
        *[lambda p, y: F.cross_entropy(p, y, reduction="sum"), (X, Y)],
        nn.CrossEntropyLoss(reduction="sum"),
    ),
    "losses and a mask": (*PLAIN, masked, (X, Y), F.cross_entropy),
    "a mean and its weight": (*PLAIN, masked_and_reduced, (X, Y), F.cross_entropy),
    "by output": (
        *(Net, tpufit.Model, (LOSSES, {"words": 1, "values": 3, "label": 1}), (X, TARGETS)),
        by_output,
    ),
    "of the module": (
        *(OwnLoss, tpufit.Model, "module", ({"x": X, "labels": Y},)),
        lambda out, y: out["loss"],
    ),
    "a step": (Words, OwnStep, None, (X, Y), F.cross_entropy),
    "a step's average": (Words, OwnAverage, None, (X, Y), F.cross_entropy),
    "compute_loss": (Words, OwnLosses, None, (X, Y), lambda p, y: 2 * F.cross_entropy(p, y)),
}


def made(name, **compiling):
    kind, model, loss, data, _ = KINDS[name]
    torch.manual_seed(0)
    net = kind()
    loss, loss_weights = loss if isinstance(loss, tuple) else (loss, None)
    model = model(copy.deepcopy(net))
    model.compile(sgd, loss, loss_weights=loss_weights, scale_lr=None, **compiling)
    return net, model, dict(zip(("x", "y", "sample_weight"), data, strict=False))


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def whole(net, name, rows=slice(None)):
    """Return the loss of all rows in PyTorch."""
    _, _, _, (x, *targets), loss_of = KINDS[name]
    out = net(**{key: value[rows] for key, value in x.items()}) if isinstance(x, dict) else net(x[rows])
    y = [{k: v[rows] for k, v in t.items()} if isinstance(t, dict) else t[rows] for t in targets] or [None]
    return loss_of(out, *y)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.cores(1, 8)
def test_evaluate_returns_the_loss_of_all_rows(cores, name):
    net, model, data = made(name)
    with torch.no_grad():
        expected = float(whole(net, name))
    for size in (8, 40):  # 9 batches, of which two have no counted word; or 2 batches, the last of 32 rows
        found = model.evaluate(**data, batch_size=size // cores, verbose=0, cores=cores)
        found = found[0] if isinstance(found, list) else found
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.cores(1, 8)
def test_metrics_count_labels_as_the_loss_does(cores):
    net, model, data = made("ignored labels")

    def share(y_pred, y):
        return y_pred.argmax(1) == y, y != -100

    def share_as_a_number(y_pred, y):
        counts = (y != -100).sum()
        return (y_pred.argmax(1) == y).sum() / counts, counts

    model.compile("sgd", "cross_entropy", metrics=["accuracy", share, share_as_a_number])
    with torch.no_grad():
        expected = (net(X).argmax(1) == Y)[Y != -100].float().mean().item()
    for size in (8, 40):
        _, *found = model.evaluate(**data, batch_size=size // cores, verbose=0, cores=cores)
        assert found == pytest.approx([expected] * 3, rel=1e-6)


def on_the_host(name, rows, clip=None):
    """Return the weights after two epochs of big batches in plain PyTorch."""
    net, _, _ = made(name)
    optimizer = sgd(net.parameters())
    for _ in range(2):
        for first in range(0, ROWS, rows):
            optimizer.zero_grad()
            whole(net, name, slice(first, first + rows)).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
    return net.state_dict()


WAYS = {
    "captured": {"accumulate_steps": 3},
    "joined": {"accumulate_steps": 2, "steps_per_execution": 2, "global_clip_norm": 0.3},
}


# The kinds that `make test` tries on 8 cores too.
ON_CORES = ("ignored labels", "sample weights", "by output", "a step", "compute_loss")


def assert_the_step_of_one(cores, name, accumulate_steps, global_clip_norm=None, **compiling):
    options = {"accumulate_steps": accumulate_steps, "global_clip_norm": global_clip_norm} | compiling
    _, model, data = made(name, **options)
    before = runtime.counts()
    history = model.fit(**data, batch_size=16 // cores, epochs=2, shuffle=False, verbose=0, cores=cores).history
    made_since = runtime.counts() - before
    expected = on_the_host(name, 16 * accumulate_steps, global_clip_norm)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5)
    assert all(math.isfinite(loss) for loss in history["loss"])
    assert not model.report().traced.get("train")
    assert made_since.host_reads == 0 and not made_since.fallbacks


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "name", [name if name in ON_CORES else pytest.param(name, marks=pytest.mark.soak_on(8)) for name in KINDS]
)
@pytest.mark.cores(1, 8)
def test_accumulated_batches_step_as_one_batch(cores, name, way):
    """Batches of 16 rows, the last of 8: three are 48 rows and then 24; two are 32, 32, and 8."""
    assert_the_step_of_one(cores, name, **WAYS[way])


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.cores(1)
def test_eager_steps_accumulate_the_same(cores, name):
    assert_the_step_of_one(cores, name, 3, run_eagerly=True)


class StopAt(tpufit.callbacks.Callback):
    """Ends the process in one step of the run."""

    def __init__(self, step):
        self.left = step

    def on_train_batch_begin(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.cores(1, 8)
def test_pending_gradients_are_in_a_checkpoint(cores, tmp_path):
    def fit(*callbacks):
        _, model, data = made("by output", accumulate_steps=3)
        options = {"batch_size": 16 // cores, "epochs": 2, "shuffle": False, "verbose": 0, "cores": cores}
        return model, model.fit(**data, callbacks=callbacks, **options).history

    expected, history = fit()
    with pytest.raises(SystemExit):
        fit(tpufit.callbacks.BackupAndRestore(tmp_path), StopAt(2))
    resumed, again = fit(tpufit.callbacks.BackupAndRestore(tmp_path))
    assert again == history
    for key, value in resumed.state_dict().items():
        assert torch.equal(value, expected.state_dict()[key])


@pytest.mark.parametrize(
    ("values", "weights"), [(torch.ones(4, 2), torch.ones(2)), (torch.ones(4), 3), (torch.ones(4), torch.ones(4, 2))]
)
def test_weights_of_another_shape(values, weights):
    with pytest.raises(ArgumentError, match=r"losses of shape \(4.* need weights of their shape or of shape \(4,\)"):
        weighted_mean(values, weights)


class Encoder(tpufit.Model):
    """A loss of two sums, divided or not, as in examples of variational autoencoders."""

    def train_step(self, batch):
        x, y = batch
        error = F.mse_loss(self(x), y, reduction="sum")
        loss = (error + self.module.weight.square().sum()) / len(x)
        self.apply_gradients(loss)
        return {"loss": loss, "error": error}


@pytest.mark.cores(1, 8)
def test_sums_in_a_step_are_weighted_by_rows(cores):
    model = Encoder(nn.Linear(1, 1, bias=False))
    nn.init.zeros_(model.module.weight)
    model.compile(lambda parameters: torch.optim.SGD(parameters, 0.0))
    x = torch.ones(24, 1)
    history = model.fit(x, x, 16 // cores, shuffle=False, verbose=0, cores=cores).history
    assert history["loss"] == [1.0] and history["error"] == pytest.approx([(16 * 16 + 8 * 8) / 24])


class Graphs(tpufit.Model):
    """A batch with fewer targets than rows; a custom step returns its logs."""

    def train_step(self, batch):
        (nodes, *_), y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
        loss = self.module(nodes).mean() * 0 + y.mean()
        self.apply_gradients(loss)
        return {"loss": loss, "first": y[0]}


@pytest.mark.parametrize("form", [lambda x, y: ((x,), y), lambda x, y: {"x": (x,), "y": y}], ids=["pair", "dict"])
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.cores(1, 8)
def test_logs_are_weighted_by_the_rows_of_the_targets(cores, form, steps):
    """Eight graphs of 80 nodes, eight of 80, and then sixteen of 16: their losses are 1, 3 and 5."""
    model = Graphs(nn.Linear(2, 1))
    model.compile("sgd", steps_per_execution=steps)
    batches = [
        form(torch.ones(nodes, 2), torch.full((graphs,), loss))
        for nodes, graphs, loss in [(80, 8, 1.0), (80, 8, 3.0), (16, 16, 5.0)]
    ]
    seen = []
    show = tpufit.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(logs["loss"]))
    history = model.fit(batches, batch_size="global", callbacks=[show], verbose=0, cores=cores).history
    assert history == {"loss": [3.5], "first": [3.5]}
    assert seen == [1.0, 2.0, 3.5][steps - 1 :]
