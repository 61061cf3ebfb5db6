"""Training and eval mode, gradients or none: frozen parts, `model(x, training=...)`, calls under `no_grad`."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tpufit
from tpufit.callbacks import Callback, Freeze
from tpufit.diagnostics import messages
from tpufit.errors import ArgumentError

pytestmark = pytest.mark.cores(1, 8)
X, Y = torch.randn(32, 4), torch.arange(32) % 2


def compiled(kind=tpufit.Model):
    model = kind(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)))
    model.compile("sgd", "cross_entropy")
    return model


def test_a_call_has_a_training_argument(cores):
    class Says(tpufit.Model):
        def train_step(self, batch):
            x, y = batch
            still = self(x, training=False)
            modes.append([layer.training for layer in self.module.modules()])
            y_pred = self(x, training=True)
            self.apply_gradients(self.compute_loss(x, y, y_pred))
            return {"differ": (y_pred - still).abs().mean()}

    modes = []
    model = compiled(Says)
    history = model.fit(X, Y, 4, 2, verbose=0, cores=cores).history
    assert min(history["differ"]) > 1e-3 and all(all(mode) for mode in modes) and modes
    assert not any(model.report().traced.values())
    expected = torch.tensor(model.predict(X, verbose=0))
    torch.testing.assert_close(model(X, training=False), expected)
    assert not torch.allclose(model(X, training=True), expected) and not model.module.training


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_only_fit_needs_gradients(cores, context, monkeypatch):
    monkeypatch.setattr(messages, "_SECONDS", float("inf"))  # what takes long on a busy machine isn't meant
    model, plain = compiled(), compiled()
    plain.load_state_dict(model.state_dict())
    with context():
        loss = model.evaluate(X, Y, verbose=0, cores=cores)
        assert model.test_on_batch(X, Y) == pytest.approx(loss) and model.predict_on_batch(X).shape == (32, 2)
        predicted = model.predict(torch.clone(X), verbose=0)
        torch.testing.assert_close(model(X, training=False), torch.tensor(predicted))
        for method in (model.fit, model.lr_find, model.train_on_batch):
            with pytest.raises(ArgumentError, match=f"{method.__name__} was called under torch.no_grad"):
                method(X, Y)
    assert plain.evaluate(X, Y, verbose=0, cores=cores) == loss
    model.fit(X, Y, 4, verbose=0)
    assert not model.report().problems


class Modes(Callback):
    """Records which parts of the module are in training mode after each epoch's first step."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        if batch == 0:
            self.seen.append("".join("t" if part.training else "e" for part in self.model.module.modules()))


def body_and_head():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    return body, nn.Sequential(body, nn.Linear(8, 2))


@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}, {"steps_per_execution": 2}], ids=str)
def test_a_frozen_part_in_eval_mode_stays_in_it(cores, options):
    body, net = body_and_head()
    body.requires_grad_(False).eval()
    plain = copy.deepcopy(net)
    optimizer = torch.optim.SGD(plain[1].parameters(), 0.1)
    model = tpufit.Model(net)
    model.compile(lambda parameters: torch.optim.SGD(parameters, 0.1), "cross_entropy", scale_lr=None, **options)
    for _ in range(2):  # `fit` leaves the whole module in eval mode, and the second fit knows which part was frozen
        model.fit(X, Y, 16 // cores, shuffle=False, verbose=0, cores=cores)
        model.train_on_batch(X[:16], Y[:16])
        for i in (0, 16, 0):
            optimizer.zero_grad()
            F.cross_entropy(plain(X[i : i + 16]), Y[i : i + 16]).backward()
            optimizer.step()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, plain.state_dict()[name], rtol=0, atol=1e-6, msg=name)


def test_a_training_call_keeps_a_frozen_part_in_eval_mode(cores):
    class Own(tpufit.Model):
        def train_step(self, batch):
            x, y = batch
            loss = F.cross_entropy(self(x, training=True), y)
            self.apply_gradients(loss)
            return {"loss": loss}

    body, net = body_and_head()
    before = copy.deepcopy(body.requires_grad_(False).eval().state_dict())
    model = Own(net)
    model.compile("sgd")
    model.fit(X, Y, 4, verbose=0, cores=cores)
    torch.testing.assert_close(dict(model.to_cpu()[0].state_dict()), dict(before), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("prepare", "expected"),
    [
        (lambda net: net.eval(), "tttttt"),  # as after inference: the whole module is trained
        (lambda net: net[0].eval(), "tttttt"),  # its weights learn
        (lambda net: net[0].requires_grad_(False), "tttttt"),  # in training mode, as in PyTorch
        (lambda net: net[0].requires_grad_(False).eval(), "teeeet"),
        (lambda net: net[0][2].eval(), "ttttet"),  # only a dropout
        (lambda net: net.eval()[0].requires_grad_(False), "tttett"),  # as in Hugging Face's models: with dropout
    ],
    ids=["all", "learning", "frozen", "frozen in eval", "dropout", "all and frozen"],
)
def test_which_parts_stay_in_eval_mode(cores, prepare, expected):
    _, net = body_and_head()
    prepare(net)
    modes = Modes()
    model = tpufit.Model(net)
    model.compile("sgd", "cross_entropy", run_eagerly=True)
    for _ in range(2):
        model.fit(X, Y, 4, verbose=0, cores=cores, callbacks=[modes])
    assert modes.seen == [expected] * 2


def test_freezing_and_unfreezing_between_fits(cores):
    body, net = body_and_head()
    modes = Modes()
    model = tpufit.Model(net)
    model.compile("sgd", "cross_entropy")
    model.fit(X, Y, 4, verbose=0, cores=cores, callbacks=[modes])
    body.requires_grad_(False).eval()
    before = model.state_dict()["0.1.running_mean"]
    model.fit(X, Y, 4, verbose=0, callbacks=[modes])
    assert torch.equal(model.state_dict()["0.1.running_mean"], before)
    model.compile("sgd", "cross_entropy")
    model.fit(X, Y, 4, verbose=0, callbacks=[modes])
    body.requires_grad_(True)
    model.fit(X, Y, 4, verbose=0, callbacks=[modes])
    assert modes.seen == ["tttttt", "teeeet", "teeeet", "tttttt"]
    assert not torch.equal(model.state_dict()["0.1.running_mean"], before)


def test_freeze_has_the_same_effect(cores):
    body, net = body_and_head()
    body.eval()
    modes = Modes()
    model = tpufit.Model(net)
    model.compile("sgd", "cross_entropy")
    model.fit(X, Y, 4, epochs=3, verbose=0, cores=cores, callbacks=[Freeze("0", until=2), modes])
    assert modes.seen == ["teeeet", "teeeet", "tttttt"]
