"""Weights of convolutions, which a TPU stores with outputs last: training and the user's view are unchanged."""

import copy
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from engines import engine_of
from torch import nn

import tpufit
from tpufit import runtime
from tpufit.errors import ReplayError
from tpufit.runtime import placement
from tpufit.step.runner import StepRunner

pytestmark = pytest.mark.cores(1, 8)


@pytest.fixture
def packs(monkeypatch):
    monkeypatch.setattr(placement, "PACKED_ON", {"TPU", "CPU"})


def net():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
        nn.Conv2d(8, 6, 1, bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4),
    )  # fmt: skip


rng = np.random.default_rng(0)
X, Y = rng.standard_normal((88, 3, 6, 6), dtype=np.float32), rng.integers(0, 4, 88)


def trained(cores, module=None, epochs=3, **options):
    module = net() if module is None else module
    model = tpufit.Model(module)
    options = {"jit_compile": True} | options
    model.compile(torch.optim.AdamW(module.parameters(), lr=0.01), "cross_entropy", metrics=["accuracy"], **options)
    history = model.fit(X, Y, batch_size=16 // cores, epochs=epochs, cores=cores, verbose=0, validation_split=0.25)
    return model, history.history


def check_equal(one, other):
    for a, b in zip(one.module.state_dict().values(), other.module.state_dict().values(), strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a.cpu(), b.cpu())


@pytest.mark.parametrize(
    "options",
    [
        {},
        *(pytest.param(options, marks=pytest.mark.soak) for options in ({"use_ema": True}, {"clip_norm": 1.0})),
        pytest.param({"accumulate_steps": 2}, marks=pytest.mark.soak_on(8)),
    ],
    ids=str,
)
def test_training_is_the_same_with_packed_weights(cores, monkeypatch, options):
    plain, losses = trained(cores, **options)
    monkeypatch.setattr(placement, "PACKED_ON", {"TPU", "CPU"})
    packed, others = trained(cores, **options)
    assert others.keys() == losses.keys()
    for name, values in losses.items():
        np.testing.assert_allclose(others[name], values, rtol=1e-5)
    check_equal(plain, packed)


def test_the_device_has_outputs_last_and_the_user_first(cores, packs):
    place = runtime.make_placement(runtime.start(cores, "a test"))
    shapes = (8, 3, 1, 1), (8, 6, 3, 2), (8, 3, 1), (9, 8, 3, 4, 5), (8, 3, 3, 3), (8, 1, 3, 3), (8, 3), (8,)
    host = [torch.randn(shape) for shape in shapes]
    tensors = runtime.to_device(host, place)
    state = runtime.make_state(place, tensors)
    for _ in range(2):
        state.hold()
        assert [tuple(value.shape) for value in state.values] == [
            (1, 1, 3, 8), (3, 2, 6, 8), (1, 3, 8), (3, 4, 5, 8, 9), (8, 3, 3, 3), (8, 1, 3, 3), (8, 3), (8,),
        ]  # fmt: skip
        state.write_back()
        for tensor, value in zip(runtime.to_host(tensors, "a test"), host, strict=True):
            assert torch.equal(tensor, value)


def test_a_change_by_the_user_counts(cores, packs):
    model, _ = trained(cores, epochs=1)
    model.write_back()
    with torch.no_grad():
        model.module[0].weight.zero_()
    model.module[5].weight.data = torch.zeros_like(model.module[5].weight)
    model.compile(torch.optim.SGD(model.module.parameters(), lr=0.0), "cross_entropy")
    model.fit(X, Y, batch_size=16 // cores, epochs=1, verbose=0)
    model.write_back()
    assert not model.module[0].weight.any()
    assert not model.module[5].weight.any()


@pytest.mark.soak_on(8)
def test_weights_that_a_step_keeps_arent_replaced(cores, packs):
    module = net()
    module[0].requires_grad_(False)
    before = copy.deepcopy(module[0].weight)
    model, _ = trained(cores, module)
    engine = engine_of(model)
    run, held = StepRunner(engine, "train"), []
    for _ in range(4):  # the first two are captured
        for group in run.send([(torch.from_numpy(X[:16]), torch.from_numpy(Y[:16]))]):
            run(group)
        held.append(dict(zip(map(id, engine.state.device.tensors), engine.state.device.values, strict=True)))
    for part, is_replaced in ((module[0], False), (module[5], True)):
        assert (held[2][id(part.weight)] is not held[3][id(part.weight)]) == is_replaced
    model.write_back()
    assert torch.equal(module[0].weight.cpu(), before)


@pytest.mark.parametrize("jit_compile", [False, "auto"])
@pytest.mark.soak_on(8)
def test_traced_steps(cores, packs, jit_compile):
    class Reading(nn.Sequential):
        def forward(self, x):
            y = super().forward(x)
            return y * (1 if jit_compile is False or float(y.detach().sum()) else 2)

    module = Reading(*net())
    reference = trained(cores)[0]
    if jit_compile == "auto" and cores > 1 and find_spec("torch_tpu"):
        with pytest.raises(ReplayError, match="reads a value"):
            trained(cores, module, jit_compile=jit_compile)
        return
    why = "is traced again|operation by operation"  # torch_xla's, and TorchTPU's
    context = pytest.warns(UserWarning, match=why) if jit_compile == "auto" else torch.enable_grad()
    with context:
        model, _ = trained(cores, module, jit_compile=jit_compile)
    check_equal(model, reference)


def test_a_failed_step_leaves_the_weights(cores, packs):
    class Failing(nn.Sequential):
        fails = False

        def forward(self, x):
            y = super().forward(x)
            if self.fails:
                raise ZeroDivisionError
            return y

    module = Failing(*net())
    model, _ = trained(cores, module, epochs=1)
    before = {name: value.cpu().clone() for name, value in module.state_dict().items()}
    module.fails = True
    model.compile(torch.optim.SGD(module.parameters()), "cross_entropy")
    with pytest.raises(ZeroDivisionError):
        model.fit(X, Y, batch_size=16 // cores, verbose=0)
    for name, value in module.state_dict().items():
        assert torch.equal(value.cpu(), before[name])


def test_after_a_failed_trace_the_users_weights_count(cores, packs):
    class Failing(tpufit.Model):
        def train_step(self, batch):
            logs = super().train_step(batch)
            if self.fails:
                raise ZeroDivisionError
            return logs

    model = Failing(net())
    model.fails = False
    model.compile(torch.optim.SGD(model.module.parameters(), lr=0.0), "cross_entropy", jit_compile=True)
    for _ in range(3):  # captured twice, then replayed
        model.train_on_batch(X[:16], Y[:16], cores=cores)
    model.fails = True
    with pytest.raises(ZeroDivisionError):
        model.train_on_batch(X[:16], Y[:16], cores=cores)
    model.fails = False
    model.load_state_dict({name: value.zero_() for name, value in model.state_dict().items()})
    model.train_on_batch(X[:16], Y[:16], cores=cores)
    assert not any(weight.any() for weight in model.state_dict().values() if weight.dim() > 1)
