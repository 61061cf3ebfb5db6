"""Parameters that are split over the cores train as whole parameters do, with the right sharding."""

import warnings
from functools import partial

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, BATCH
from engines import engine_of
from torch import nn, optim

import tpufit
from tpufit.callbacks import Callback, EarlyStopping, SwapEMAWeights
from tpufit.errors import ArgumentError
from tpufit.step import sharding

CLASSES = 10
X = torch.randn(150, 64, generator=torch.Generator().manual_seed(1))
Y = X[:, :CLASSES].argmax(1)
SGD, ADAMW = partial(optim.SGD, lr=0.05, momentum=0.9), partial(optim.AdamW, lr=1e-3)


class Tied(nn.Module):
    """A matrix that is used twice, once transposed, and a matrix that is used directly."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)
        self.matrix = nn.Parameter(torch.randn(256, 256) / 16)
        self.norm, self.head = nn.LayerNorm(256), nn.Linear(64, CLASSES)

    def forward(self, x):
        y = torch.relu(self.norm(self.first(x)) @ self.matrix.t())
        return self.head(self.last(y) + y @ self.first.weight)


def net():
    torch.manual_seed(0)
    return Tied()


class Losses(Callback):
    def __init__(self):
        self.losses = []

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(logs["loss"])


def fitted(cores, shard, optimizer=ADAMW, epochs=2, fitting=(), module=None, **compiling):
    """Train 20 steps, the last of each epoch on fewer rows than cores. Return losses, model, graphs."""
    torch.manual_seed(0)
    model, seen = tpufit.Model(module or net()), Losses()
    model.compile(optimizer, "cross_entropy", metrics=["accuracy"], scale_lr=None, shard=shard, **compiling)
    options = {"batch_size": 16 // cores, "epochs": epochs, "verbose": 0, "cores": cores} | dict(fitting)
    model.fit(X, Y, callbacks=[seen, *options.pop("callbacks", ())], **options)
    return seen.losses, model, dict(model.report().counts.graphs)


def shardings(model):
    return engine_of(model).state.device.shardings


def assert_same_training(one, other, rtol=1e-6):
    """Compare the results of two trainings; weights by the norm of their difference."""
    np.testing.assert_allclose(one[0], other[0], rtol=rtol)
    assert one[2] == other[2]  # no more graphs are compiled
    weights, others = one[1].state_dict(), other[1].state_dict()
    for name, value in weights.items():
        difference = (value.double() - others[name].double()).norm()
        assert difference <= rtol * value.double().norm(), name


@pytest.mark.cores(2, 4, 8)
@pytest.mark.soak_on(2, 4)
@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.usefixtures("compiles_anew")
def test_twenty_steps_equal_whole_parameters(cores, optimizer):
    whole, split = (fitted(cores, shard, optimizer) for shard in (None, "fsdp"))
    assert len(whole[0]) == 20
    assert_same_training(whole, split)
    assert not shardings(whole[1])
    state = split[1].optimizer.state
    matrices = {"first.weight", "matrix", "last.weight"}
    expected = {id(p) for n, p in split[1].named_parameters() if n in matrices}
    expected |= {id(v) for n, p in split[1].named_parameters() if n in matrices for v in state[p].values() if v.dim()}
    assert shardings(split[1]).keys() == expected


OPTIONS = {
    "clip_norm": {"clip_norm": 0.1},
    "clip_value": {"clip_value": 0.01},
    "global_clip_norm": {"global_clip_norm": 0.1},
    "accumulation": {"accumulate_steps": 3},
    "averages": {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 4},
    "swapped averages": {"use_ema": True, "fitting": {"callbacks": [SwapEMAWeights()], "validation_data": (X, Y)}},
    "joined steps": {"steps_per_execution": 3},
    "traced": {"jit_compile": False},
    "strict": {"fitting": {"strict": True}},
    "best weights": {"fitting": {"callbacks": [EarlyStopping("loss", mode="max", restore_best_weights=True)]}},
    "class weights": {"fitting": {"class_weight": {0: 3.0}}},
}

TELLING_OPTIONS = ("global_clip_norm", "accumulation", "averages", "joined steps")


@pytest.mark.cores(8)
@pytest.mark.parametrize(
    "name", [name if name in TELLING_OPTIONS else pytest.param(name, marks=pytest.mark.soak) for name in OPTIONS]
)
@pytest.mark.usefixtures("compiles_anew")
def test_split_weights_train_alike_with_each_option(cores, name):
    whole, split = (fitted(cores, shard, SGD, **OPTIONS[name]) for shard in (None, "fsdp"))
    assert_same_training(whole, split)
    for own in engine_of(split[1]).state.optimizers.values():
        for part in own.kept:
            for parameter, tensor in part.by_parameter:
                assert (id(tensor) in shardings(split[1])) == (id(parameter) in shardings(split[1]))


@pytest.mark.cores(8)
@pytest.mark.parametrize("precision", ["bf16", "bf16-true"])
@pytest.mark.usefixtures("compiles_anew")
def test_split_weights_train_alike_in_bfloat16(cores, precision):
    whole, split = (fitted(cores, shard, SGD, precision=precision) for shard in (None, "fsdp"))
    assert_same_training(whole, split, rtol=1e-2)
    if precision == "bf16-true":
        assert {p.dtype for p in split[1].parameters()} == {torch.bfloat16}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64, bias=False)
        self.drop, self.matrix = nn.Dropout(0.1), nn.Parameter(torch.randn(64, 128) / 8)

    def forward(self, x):
        y = self.norm(x) @ self.matrix
        return x + self.drop(self.narrow(torch.relu(self.wide(y @ self.matrix.T))))


@pytest.mark.soak
@pytest.mark.cores(8)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.usefixtures("compiles_anew")
def test_with_recomputed_activations(cores, precision):
    trained = []
    for shard, remat in ((None, None), ("fsdp", True), (None, True), ("fsdp", "0")):
        torch.manual_seed(0)
        module = nn.Sequential(Block(), Block(), Block(), nn.Linear(64, CLASSES))
        slow = partial(SGD, lr=0.005)
        trained.append(fitted(cores, shard, slow, module=module, remat=remat, precision=precision))
    for other in trained[1:]:
        assert_same_training(trained[0], other, 1e-6 if precision == "fp32" else 1e-2)


@pytest.mark.cores(8)
def test_evaluating_and_predicting(cores):
    (_, whole, _), (_, split, _) = (fitted(cores, shard) for shard in (None, "fsdp"))
    expected, scores = whole.evaluate(X, Y, verbose=0), split.evaluate(X, Y, verbose=0)
    np.testing.assert_allclose(scores, expected, rtol=1e-6)
    np.testing.assert_allclose(split.predict(X[:13], verbose=0), whole.predict(X[:13], verbose=0), atol=1e-6)
    np.testing.assert_allclose(split(X[:3]).numpy(), whole(X[:3]).numpy(), atol=1e-6)
    fresh = tpufit.Model(net())
    fresh.compile(None, "cross_entropy", shard="fsdp")
    fresh.load_state_dict(split.state_dict())
    np.testing.assert_allclose(fresh.evaluate(X, Y, verbose=0, cores=cores), scores[0], rtol=1e-6)


@pytest.mark.cores(8)
def test_another_layout_from_one_fit_to_the_next(cores):
    trained = []
    for layouts in ((None, None, None), ("fsdp", None, {"matrix": 0, "*.weight": -1}), ({"matrix": 1}, "fsdp", None)):
        optimizer, (_, model, _) = None, fitted(cores, layouts[0], SGD)
        for shard in layouts[1:]:
            optimizer = model.optimizer
            model.compile(optimizer, "cross_entropy", scale_lr=None, shard=shard)
            model.fit(X, Y, 2, verbose=0, cores=cores, shuffle=False)
            axes = [s.axis for s in shardings(model).values()]
            assert bool(axes) == (shard is not None)
        module = model.to_cpu()
        assert all(p.device.type == "cpu" for p in module.parameters())
        trained.append(model.state_dict())
    for name, value in trained[0].items():
        for other in trained[1:]:
            torch.testing.assert_close(other[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.cores(8)
def test_split_parameters_are_reported(cores, capsys):
    _, model, _ = fitted(cores, "fsdp", fitting={"verbose": 2, "epochs": 1})
    first = capsys.readouterr().out.splitlines()[0]
    assert first.endswith("| fp32 | 3 of 7 parameters split, 157.6 KiB of 1.138 MiB state per core")
    model.summary()
    shown = capsys.readouterr().out
    assert "weight split along 0" in shown and "matrix split along 0" in shown and "weight split along 1" in shown
    assert "memory per core: 210.2 KiB = 52.54 KiB weights + 52.54 KiB gradients + 105.1 KiB optimizer" in shown


@pytest.mark.cores(8)
def test_patterns_and_whole_parameters(cores):
    _, model, _ = fitted(cores, {"first.*": 1, "last.weight": None, "*.weight": 0})
    names = {id(p): name for name, p in model.named_parameters()}
    axes = {names[key]: s.axis for key, s in shardings(model).items() if key in names}
    assert axes == {"first.weight": 1, "norm.weight": 0, "head.weight": 0}


@pytest.mark.parametrize(
    ("shard", "said"),
    [
        ("fdsp", "shard must be None, 'fsdp' or a dict"),
        (0, "shard must be None, 'fsdp' or a dict"),
        ({"frist.weight": 0}, r"matches no parameter.s name.*first\.weight"),
        ({"first.weight": 2}, r"shard\['first.weight'\] is dimension 2, and first.weight of shape \(256, 64\) has 2"),
        ({"first.weight": "0"}, "must be a dimension"),
        ({"first.weight": True}, "must be a dimension"),
    ],
)
def test_a_wrong_layout_is_refused_by_compile(shard, said):
    with pytest.raises(ArgumentError, match=said):
        tpufit.Model(net()).compile("sgd", "mse", shard=shard)


def test_a_tie_over_two_layouts_is_refused():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head, self.norm = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False), nn.BatchNorm1d(4)
            self.head.weight = self.words.weight

    model = tpufit.Model(Both())
    with pytest.raises(ArgumentError, match=r"words.weight is split along dimension 0, head.weight is whole"):
        model.compile("sgd", "mse", shard={"words.weight": 0})
    with pytest.raises(ArgumentError, match=r"matches only buffers \(norm.running_mean\)"):
        model.compile("sgd", "mse", shard={"*.running_mean": 0})
    model.compile("sgd", "mse", shard={"words.weight": 0, "head.weight": -2})


@pytest.mark.cores(1)
@pytest.mark.usefixtures("compiles_anew")
def test_one_core_splits_nothing(cores):
    whole, split = (fitted(cores, shard, epochs=1) for shard in (None, "fsdp"))
    assert not shardings(split[1])
    assert split[0] == whole[0]
    assert whole[2] == {"train": 2}
    assert split[2] == {}  # the same graphs


TELLING = ("encoder-decoder", "WGAN with gradient penalty")


@pytest.mark.cores(8, timeout=600)
@pytest.mark.parametrize(
    "name", [name if name in TELLING else pytest.param(name, marks=pytest.mark.soak) for name in ARCHITECTURES]
)
def test_typical_nets_train_alike_with_split_weights(cores, name, monkeypatch):
    monkeypatch.setattr(sharding, "_SMALL", 0)
    one, logs, weights = ARCHITECTURES[name], [], []
    for shard in (None, "fsdp"):
        tpufit.set_random_seed(0)
        module = one.net()
        model = one.model(module)
        model.compile(one.optimizer(module), one.loss, metrics=one.metrics, scale_lr=None, shard=shard)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if one.why_traced else "error")
            warnings.filterwarnings("ignore", "the device waited for data")  # on a busy machine
            fit = model.fit(*one.data, batch_size=BATCH // cores, verbose=0, shuffle=False, cores=cores)
        assert bool(shardings(model)) == (shard is not None)
        logs.append(fit.history)
        weights.append(model.state_dict())
    for key, values in logs[0].items():
        np.testing.assert_allclose(logs[1][key], values, rtol=1e-6)
    for key, value in weights[0].items():
        if not key.endswith("bias"):  # the bias of keys has a gradient of only rounding, which Adam turns into steps
            assert torch.allclose(weights[1][key], value, rtol=1e-5, atol=1e-6), key


@pytest.mark.cores(8)
def test_dimensions_that_the_cores_do_not_divide(cores):
    trained = []
    for shard in (None, "fsdp", {"*.weight": 0}, {"1.weight": 1, "2.weight": 0}):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Embedding(11, 5), nn.Linear(5, 3), nn.Linear(3, 13), nn.Flatten(), nn.Linear(26, 4))
        model = tpufit.Model(module)
        model.compile(ADAMW, "cross_entropy", scale_lr=None, shard=shard)
        x, y = torch.arange(60).view(30, 2) % 11, torch.arange(30) % 4
        history = model.fit(x, y, 2, 3, verbose=0, shuffle=False, cores=cores).history["loss"]
        trained.append((history, model.state_dict(), bool(shardings(model))))
    assert [split for *_, split in trained] == [False, False, True, True]  # so small a tensor isn't split by default
    for history, weights, _ in trained[1:]:
        np.testing.assert_allclose(history, trained[0][0], rtol=1e-6)
        for name, value in trained[0][1].items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.cores(8)
def test_other_methods_than_fit_are_equal_with_split_weights(cores, tmp_path):
    found = []
    for shard in (None, "fsdp"):
        torch.manual_seed(0)
        model = tpufit.Model(net())
        model.compile(SGD, "cross_entropy", metrics=["accuracy"], scale_lr=None, shard=shard)
        logs = [model.train_on_batch(X[:16], Y[:16], cores=cores)]
        curve = model.lr_find(X, Y, batch_size=2, steps=6)
        logs += [model.train_on_batch(X[:16], Y[:16]), model.test_on_batch(X[:13], Y[:13])]
        model.export(tmp_path / f"{shard}.pt2", X[:2])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of PyTorch's reader
            exported = torch.export.load(tmp_path / f"{shard}.pt2").module()(X[:5])
        found.append((curve.losses, np.array(logs, dtype=float), exported, model.predict_on_batch(X[:5])))
        assert bool(shardings(model)) == (shard is not None)
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(torch.as_tensor(other).detach(), torch.as_tensor(one).detach(), rtol=1e-5, atol=1e-6)
