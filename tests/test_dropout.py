"""Dropout of our own: bits by the place of each number, the rate that was asked for, and no row of another core."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tpufit.runtime import devices, placement_on
from tpufit.runtime.ops.kernels import own_kernels

PARITY = 0x1BD11BDA
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def threefry(key, x, y):
    """Threefry-2x32 of 20 rounds, in NumPy."""
    keys = [np.uint32(key[0]), np.uint32(key[1]), np.uint32(key[0]) ^ np.uint32(key[1]) ^ np.uint32(PARITY)]
    x, y = x + keys[0], y + keys[1]
    for turn in range(5):
        for by in ROTATIONS[turn % 2]:
            x = x + y
            y = ((y << np.uint32(by)) | (y >> np.uint32(32 - by))) ^ x
        x, y = x + keys[(turn + 1) % 3], y + keys[(turn + 2) % 3] + np.uint32(turn + 1)
    return x, y


def test_the_reference_has_the_known_answers():
    """Of the authors' own tests, https://github.com/DEShawResearch/random123."""
    ones = 0xFFFFFFFF
    for key, counter, answer in (
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((ones, ones), (ones, ones), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ):
        found = threefry(key, *(np.full(1, number, np.uint32) for number in counter))
        assert tuple(int(word[0]) for word in found) == answer


def device(cores):
    return placement_on(devices.start(cores, "a test")).device


def mixed(x):
    """Wellons's lowbias32, in NumPy."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def bits(key, shape):
    """32 bits for each number of an array."""
    rows = np.arange(shape[0], dtype=np.uint32)
    added, flipped = (word[:, None] for word in threefry(key, rows, rows * np.uint32(0)))
    places = np.arange(np.prod(shape[1:], dtype=int), dtype=np.uint32)
    return mixed(mixed(places + added) ^ flipped).reshape(shape)


@pytest.mark.cores(1, 8)
@pytest.mark.parametrize("shape", [(16,), (8, 7), (8, 3, 16), (2, 3, 5, 4), (8, 1)], ids=str)
def test_the_bits_are_told_by_row_and_place(cores, shape):
    from tpufit.runtime.ops.dropout import left

    for key in ((1, 2), (-5, 1 << 30)):
        found = left(torch.tensor(key, dtype=torch.int32, device=device(cores)), shape, 1 << 30).cpu().numpy()
        assert (found == (bits(np.array(key).astype(np.uint32), shape) >= 1 << 30)).all()


@pytest.mark.cores(1, 8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.02, 0.005, 0.999])
def test_it_drops_the_share_that_was_asked_for_and_scales_the_rest(cores, rate, dtype):
    x = torch.full((512, 2048), 3.0, dtype=dtype, device=device(cores))
    with own_kernels():
        y = F.dropout(x, rate, True).cpu().double()
    left_out = y == 0
    assert abs(left_out.double().mean().item() - rate) < 5 * (rate * (1 - rate) / y.numel()) ** 0.5
    (value,) = y[~left_out].unique()
    assert value.item() == pytest.approx(3 / (1 - rate), rel=2**-8 if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.cores(1)
def test_gradients_go_where_values_went(cores):
    x = torch.randn(8, 16, device=device(cores), requires_grad=True)
    with own_kernels():
        y = F.dropout(x, 0.5, True)
        slopes = (y / x).detach()
        upstream = torch.randn_like(y, requires_grad=True)
        (gradient,) = torch.autograd.grad(y, x, upstream, create_graph=True)
        (again,) = torch.autograd.grad(gradient.sum(), upstream)
    assert set(slopes.cpu().round(decimals=5).unique().tolist()) == {0.0, 2.0}
    torch.testing.assert_close(gradient.cpu(), (upstream * slopes).cpu())
    torch.testing.assert_close(again.cpu(), slopes.cpu())


@pytest.mark.cores(1)
@pytest.mark.parametrize("layer", [nn.Dropout1d, nn.Dropout2d, nn.Dropout3d])
def test_whole_channels_are_dropped(cores, layer):
    dims = {nn.Dropout1d: 1, nn.Dropout2d: 2, nn.Dropout3d: 3}[layer]
    x = torch.ones(64, 32, *(3,) * dims, device=device(cores))
    with own_kernels():
        y = layer(0.25)(x).cpu().flatten(2)
    assert (y == y[..., :1]).all()
    assert 0.2 < (y[..., 0] == 0).double().mean() < 0.3 and y.max().item() == pytest.approx(1 / 0.75)


@pytest.mark.cores(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_stochastic_depth_has_the_rate_too(cores, dtype):
    before = torch.Tensor.bernoulli_
    x = torch.empty(1 << 20, 1, dtype=dtype, device=device(cores))
    with own_kernels():
        share = 1 - x.bernoulli_(0.995).cpu().double().mean().item()
    assert abs(share - 0.005) < 5 * (0.005 / (1 << 20)) ** 0.5 and torch.Tensor.bernoulli_ is before


@pytest.mark.cores(1)
def test_the_rest_is_pytorchs(cores):
    x = torch.arange(1.0, 9, device=device(cores))
    with own_kernels():
        for rate, training in ((0.0, True), (0.5, False)):
            assert (F.dropout(x, rate, training) == x).all()
        assert (F.dropout(x, 1.0, True) == 0).all() and F.dropout(x[:0], 0.5, True).shape == (0,)
        assert F.dropout(x[0], 0.5, True).shape == ()
        with pytest.raises(ValueError, match="between 0 and 1"):
            F.dropout(x, 1.5, True)
