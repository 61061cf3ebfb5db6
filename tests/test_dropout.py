"""tpufit's dropout: bits by the index of each element, the requested rate, and only the rows of the own core."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tpufit
from tpufit.runtime import devices, make_placement
from tpufit.runtime.driver import driver
from tpufit.runtime.ops.dropout import compute_keep_mask
from tpufit.runtime.ops.kernels import replace_kernels
from tpufit.runtime.trace_context import tracing_with
from tpufit.runtime.trace_seeds import Draw
from tpufit.utils.random import step_seed


def placement(cores):
    return make_placement(devices.start(cores, "a test"))


def device(cores):
    return placement(cores).device


@contextmanager
def of_a_step(cores, seed=0):
    """Use the kernels and random numbers of a step, and run backward passes in this thread, as a trace does."""
    seeds = driver().trace_seeds(placement(cores), [seed])
    seeds(0)
    one_thread = torch.autograd.set_multithreading_enabled(False)
    with one_thread, replace_kernels(), tracing_with(draw=seeds.draw):
        yield


def mixed(x):
    """Wellons's lowbias32, in NumPy."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def bits(seed, number, shape):
    """Return 32 bits for each element of an array."""
    added, flipped = np.array([step_seed(0, number) ^ seed], "<u8").view("<u4")
    places = np.arange(np.prod(shape, dtype=int), dtype=np.uint32)
    return mixed(mixed(places + added) ^ flipped).reshape(shape)


def test_bits_are_independent():
    """For adjacent elements, for rows, and for consecutive draws: both bits of a pair are set in a quarter of cases."""
    seed, shape = step_seed(3, 0), (256, 4096)
    one = bits(seed, 0, shape)
    pairs = [
        (one, bits(seed, 1, shape)),
        (one, bits(step_seed(3, 1), 0, shape)),
        (one[1:], one[:-1]),
        (one[:, 1:], one[:, :-1]),
        (one[:, 64:], one[:, :-64]),
        (one, one[:, ::-1]),
    ]
    for first, second in pairs:
        for i in (0, 7, 15, 24, 31):
            for j in (0, 16, 31):
                both = (first >> np.uint32(i)) & (second >> np.uint32(j)) & np.uint32(1)
                assert abs(both.mean() - 0.25) < 5 * (3 / 16 / both.size) ** 0.5
    shares = (one < 1 << 30).mean(0), (one < 1 << 30).mean(1)
    for share, count in zip(shares, (256, 4096), strict=True):
        assert share.std() == pytest.approx((3 / 16 / count) ** 0.5, rel=0.2)


@pytest.mark.cores(1, 8)
@pytest.mark.parametrize("shape", [(16,), (8, 7), (8, 3, 16), (2, 3, 5, 4), (8, 1)], ids=str)
def test_bits_depend_on_seed_number_and_index(cores, shape):
    for seed, number in ((0, 0), (step_seed(0, 0), 1), (2**63 - 1, 70)):
        draw = Draw(torch.tensor(seed, device=device(cores)), number)
        assert (compute_keep_mask(draw, shape, 1 << 30).cpu().numpy() == (bits(seed, number, shape) >= 1 << 30)).all()


@pytest.mark.cores(1)
@pytest.mark.runtime("torch_xla")  # TorchTPU would store all 2^33 elements
def test_rows_of_more_than_2_32_elements_differ(cores):
    """With 2^31 elements in a row, the indices repeat in every second row."""
    draw = Draw(torch.tensor(5, device=device(cores)), 0)
    some = compute_keep_mask(draw, (6, 1 << 31), 1 << 31)[:, :: 1 << 24].cpu().double()
    assert some.corrcoef().fill_diagonal_(0).abs().max() < 5 * some.shape[1] ** -0.5


@pytest.mark.cores(1, 8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.02, 0.005, 0.999])
def test_dropout_drops_the_requested_share_and_scales_the_rest(cores, rate, dtype):
    x = torch.full((512, 2048), 3.0, dtype=dtype, device=device(cores))
    with of_a_step(cores):
        y = F.dropout(x, rate, True).cpu().double()
    left_out = y == 0
    assert abs(left_out.double().mean().item() - rate) < 5 * (rate * (1 - rate) / y.numel()) ** 0.5
    (value,) = y[~left_out].unique()
    assert value.item() == pytest.approx(3 / (1 - rate), rel=2**-8 if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.cores(1)
def test_gradients_are_dropped_where_values_are(cores):
    x = torch.randn(8, 16, device=device(cores), requires_grad=True)
    with of_a_step(cores):
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
    with of_a_step(cores):
        y = layer(0.25)(x).cpu().flatten(2)
    assert (y == y[..., :1]).all()
    assert 0.2 < (y[..., 0] == 0).double().mean() < 0.3 and y.max().item() == pytest.approx(1 / 0.75)


@pytest.mark.cores(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_stochastic_depth_has_the_requested_rate(cores, dtype):
    before = torch.Tensor.bernoulli_
    x = torch.empty(1 << 20, 1, dtype=dtype, device=device(cores))
    with of_a_step(cores):
        share = 1 - x.bernoulli_(0.995).cpu().double().mean().item()
    assert abs(share - 0.005) < 5 * (0.005 / (1 << 20)) ** 0.5 and torch.Tensor.bernoulli_ is before


@pytest.mark.cores(1)
def test_other_calls_use_pytorchs_dropout(cores):
    x = torch.arange(1.0, 9, device=device(cores))
    with of_a_step(cores):
        for rate, training in ((0.0, True), (0.5, False)):
            assert (F.dropout(x, rate, training) == x).all()
        assert (F.dropout(x, 1.0, True) == 0).all() and F.dropout(x[:0], 0.5, True).shape == (0,)
        assert F.dropout(x[0], 0.5, True).shape == ()
        with pytest.raises(ValueError, match="between 0 and 1"):
            F.dropout(x, 1.5, True)
        q = torch.ones(1, 2, 4, 8, device=x.device)
        assert (F.scaled_dot_product_attention(q, q, q, dropout_p=1.0) == 0).all()
        assert (F.scaled_dot_product_attention(q, q, q, dropout_p=-0.5) == 1).all()
        for wrong in (
            lambda: F.scaled_dot_product_attention(q, q, q, dropout_p=1.5),
            lambda: torch.dropout(x, -0.5, True),
            lambda: torch.feature_dropout(q, 1.5, True),
        ):
            with pytest.raises(RuntimeError, match="between 0 and 1"):
                wrong()


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.3 if self.training else 0.0)
        return y.transpose(1, 2).flatten(2)


@pytest.mark.cores(1, 8)
def test_narrow_attention_drops_the_same_weights(cores):
    x, y = np.random.default_rng(0).normal(size=(2, 16, 256, 16)).astype("float32")

    def moved(kind, seed):
        """Return a weight after a training that is traced for a kind of core."""
        torch.manual_seed(0)
        model = tpufit.Model(Attending())
        before = model.get_weights()[0]
        model.compile(torch.optim.SGD(model.module.parameters(), 0.3), "mse", precision="bf16", scale_lr=None)
        torch.manual_seed(seed)
        with tracing_with(kind=kind):
            model.fit(x, y, 8 // cores, 3, shuffle=False, verbose=0, cores=cores)
        return model.get_weights()[0] - before

    mask, signs, other = moved("cpu", 1), moved("TPU v5 lite", 1), moved("TPU v5 lite", 2)
    off, apart = (np.linalg.norm(mask - one) / np.linalg.norm(mask) for one in (signs, other))
    assert off < 0.01 < 0.1 < apart
