"""Rows that the cores can't divide evenly are indexed, set, sorted and paired as in plain PyTorch."""

import sys

import numpy as np
import pytest
import torch
from row_losses import KINDS
from torch import nn, optim
from torch.nn import functional as F

import tpufit
from tpufit import runtime
from tpufit.backend import Sharding
from tpufit.runtime.ops.kernels import replace_kernels


def drawn(rows):
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 3, generator=generator), torch.arange(rows) % 4


def results(kinds, x, y, weight):
    """Return the loss of each kind, and its gradient."""
    weight.requires_grad_()
    losses = [KINDS[kind](x @ weight, y) for kind in kinds]
    return [(loss.detach(), torch.autograd.grad(loss, weight)[0]) for loss in losses]


def check(place, rows, kinds):
    weight = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    x, y, there = runtime.to_device([*drawn(rows), weight], place, [Sharding.ROWS, Sharding.ROWS, Sharding.WHOLE])
    with replace_kernels():
        found = results(kinds, x, y, there)
    values = iter(runtime.to_host([place.pin(tensor) for pair in found for tensor in pair], "test"))
    for kind, pair in zip(kinds, results(kinds, *drawn(rows), weight), strict=True):
        for expected in pair:
            torch.testing.assert_close(next(values), expected, atol=1e-4, rtol=1e-3, msg=lambda m, k=kind: f"{k}: {m}")


@pytest.mark.cores(1, 8)
@pytest.mark.parametrize("rows", [13, pytest.param(24, marks=pytest.mark.soak)])
def test_rows_are_indexed_as_in_pytorch(place, rows):
    check(place, rows, list(KINDS))


# Each ended the process where 8 cores share 13 rows.
ABORTED = ("index", "gather", "one-hot by scatter_", "index_add_", "a margin at the label", "half of the rows")


class Trained(tpufit.Model):
    def train_step(self, batch):
        x, y = batch
        mixed = torch.randperm(len(y), device=y.device)
        out = self(x)
        loss = sum(KINDS[kind](out, y) for kind in ABORTED) + F.cross_entropy(out[mixed], y[mixed])
        self.apply_gradients(loss)
        return {"loss": loss}


@pytest.mark.cores(1, 8)
@pytest.mark.parametrize(
    "options", [{}, {"steps_per_execution": 2}, {"run_eagerly": True}], ids=["captured", "joined", "eagerly"]
)
def test_an_epoch_with_a_short_last_batch_is_exact(cores, options):
    x, y = drawn(61)
    torch.manual_seed(0)
    net = nn.Linear(3, 4)
    plain = nn.Linear(3, 4)
    plain.load_state_dict(net.state_dict())
    model = Trained(net)
    model.compile(optim.SGD(net.parameters(), 0.1), scale_lr=None, **options)
    history = model.fit(x, y, batch_size=16 // cores, epochs=2, shuffle=False, verbose=0, cores=cores).history
    optimizer = optim.SGD(plain.parameters(), 0.1)
    expected = []
    for _ in range(2):
        total = 0.0
        for rows, labels in zip(x.split(16), y.split(16), strict=True):
            out = plain(rows)
            loss = sum(KINDS[kind](out, labels) for kind in ABORTED) + F.cross_entropy(out, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(labels)
        expected.append(total / len(y))
    assert history["loss"] == pytest.approx(expected, rel=1e-5)
    predicted = model.predict(x, batch_size=16 // cores, verbose=0)
    np.testing.assert_allclose(predicted, plain(x).detach(), atol=1e-5)


@pytest.mark.cores(1, 8)
@pytest.mark.parametrize("rows", [1, 2, 13, 1000])
@pytest.mark.runtime("torch_xla")
def test_randperm_is_a_permutation_by_the_seed(place, rows):
    import torch_xla.core.xla_model as xm

    def drawn_order():
        (x,) = runtime.to_device([torch.arange(float(rows))], place, Sharding.ROWS)
        xm.set_rng_state(3, place.device_name)
        return x[torch.randperm(rows, device=place.device)]

    first, second = runtime.to_host([drawn_order(), drawn_order()], "test")
    assert torch.equal(first.sort().values, torch.arange(float(rows))) and torch.equal(first, second)
    assert rows < 13 or not torch.equal(first, first.sort().values)


@pytest.mark.cores(1)
@pytest.mark.runtime("torch_xla")  # PyTorch's error
def test_randperm_of_a_dtype(place):
    order = torch.randperm(5, device=place.device, dtype=torch.int32)
    assert order.dtype is torch.int32 and not len(torch.randperm(0, device=place.device))
    with pytest.raises(RuntimeError, match="n must be non-negative, got -1"):
        torch.randperm(-1, device=place.device)


@pytest.mark.soak
@pytest.mark.cores(8)
@pytest.mark.parametrize("rows", range(1, 65))
def test_any_number_of_rows_is_indexed_as_in_pytorch(place, rows):
    check(place, rows, list(KINDS)[rows % 3 :: 3])  # a third of the kinds: all would take minutes


# A replayed step can't have these: they read a value, or the host computes them.
ON_HOST = {
    *("cdist", "class weights by bincount", "kthvalue", "largest row", "masked rows that are set", "max_unpool"),
    *("one column for all", "rows of a mask", "unfold"),
}


class OfAllKinds(tpufit.Model):
    def train_step(self, batch):
        x, y = batch
        out = self(x)
        loss = sum(KINDS[kind](out, y) for kind in KINDS if kind not in ON_HOST)
        self.apply_gradients(loss)
        return {"loss": loss}


@pytest.mark.soak
@pytest.mark.skipif(sys.version_info < (3, 11), reason="the TPU's compiler needs a JAX for Python 3.11")
@pytest.mark.parametrize("rows", [1, 13])
def test_the_compiler_of_tpus_takes_any_number_of_rows(rows):
    model = OfAllKinds(nn.Linear(3, 4))
    model.compile(optim.SGD(model.module.parameters(), 0.1))
    report = model.preflight(*drawn(64 + rows), 8, tpu="v5e-8", verbose=0)
    assert [(program.role, program.rows) for program in report.programs] == [("train", 64), ("train", rows)]
