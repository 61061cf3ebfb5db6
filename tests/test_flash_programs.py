"""Flash attention compiled for TPUs: scores aren't stored in memory, and kernels are counted."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tpufit
from tpufit.preflight.hlo import parse_operations
from tpufit.preflight.tpu_slices import find_slice
from tpufit.runtime import KernelWork

TIME, WIDTH, WORDS = 2048, 256, 256
KERNELS = "splash_mha_fwd", "splash_mha_dq", "splash_mha_dkv"


class Attends(nn.Module):
    """An attention with 4 query heads and one key head."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, WIDTH + 128)

    def forward(self, x):
        parts = self.qkv(x).split([WIDTH, 64, 64], -1)
        q, k, v = (part.unflatten(-1, (-1, 64)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return y.transpose(1, 2).flatten(2)


def flown(tpu, attention, cores, remat=None):
    """Return the compiled step of an embedding, an attention, and the next words."""
    net = nn.Sequential(nn.Embedding(WORDS, WIDTH), Attends(), nn.Linear(WIDTH, WORDS), nn.Flatten(0, 1))
    model = tpufit.Model(net)
    loss = nn.CrossEntropyLoss()
    model.compile("sgd", lambda y, words: loss(y, words.flatten()), precision="bf16", attention=attention, remat=remat)
    words = torch.zeros(cores, TIME, dtype=torch.long)
    return model.preflight(words, words, tpu=tpu, batch_size=1, verbose=0)


def largest(report):
    """Return the number of elements of the largest array in a step."""
    return max(math.prod(array.shape) for one, _ in parse_operations(report.step.text) for array in one.arrays)


@pytest.mark.slow
@pytest.mark.parametrize(
    "tpu, cores",
    [("v5e-8", 8), *(pytest.param(*on, marks=pytest.mark.soak) for on in (("v6e-8", 8), ("v4-8", 4), ("v5p-8", 4)))],
)
def test_scores_arent_stored_and_kernels_are_counted(tpu, cores):
    flash = flown(tpu, "auto", cores)
    assert largest(flash) < TIME * TIME
    assert flash.step.attention == {"1": "flash"} and flash.step.collectives  # gradients only
    assert {one.kind for one in flash.step.collectives} == {"all-reduce"}
    cost = flash.step.cost
    assert cost.kernels == 3 and 0 < cost.of_kernels < cost.cycles
    # Forward, and backward: the scores that a query may use, and the rest of the last blocks.
    products, halves = 2 + 3 + 4, 4 * TIME * TIME / 2
    assert 1 < sum(_works(flash)) / (products * 2 * 64 * halves) < 1.3
    assert cost.flops > sum(_works(flash)) and cost.nbytes > 0
    assert "flash attention: 1" in str(flash)
    assert "the compiler has no estimate for 3 kernels" in str(flash)


@pytest.mark.soak
def test_a_kept_kernels_result_isnt_recomputed():
    kernels = {policy: flown("v5e-8", "auto", 8, {"1": policy}).step.cost.kernels for policy in ("dots", "nothing")}
    assert kernels == {"dots": 3, "nothing": 4}


def _works(report):
    kernels = [one.kernel for one, _ in parse_operations(report.step.text) if one.kernel is not None]
    assert sorted(kernel.name for kernel in kernels) == sorted(KERNELS)
    return [kernel.operations for kernel in kernels]


@pytest.mark.soak
def test_a_v3_has_plain_attention():
    plain = flown("v3-8", "auto", 8)
    assert plain.step.attention == {"1": "plain: there is no kernel for a TPU v3"} and not plain.step.cost.kernels
    assert largest(plain) >= TIME * TIME and "kernel for a TPU v3" in str(plain)


def test_a_kernels_time_is_of_its_products_or_its_bytes():
    def cycles(tpu, **work):
        kernel = {"operations": 2 * 10**12, "width": 128, "nbytes": 10**6} | work
        return find_slice(tpu).chip.estimate_cycles(KernelWork("a", **kernel))

    chip = find_slice("v5e-8").chip
    assert cycles("v5e-8") == round(2e12 / chip.peak * chip.clock)
    assert cycles("v5e-8", width=64) == pytest.approx(2 * cycles("v5e-8"))  # half of a matrix unit is idle
    assert cycles("v6e-8") == pytest.approx(2 * cycles("v6e-8", width=256))
    assert cycles("v5e-8", nbytes=10**12) == round(1e12 / chip.bandwidth * chip.clock)
    assert cycles("v4-8") == pytest.approx(2 * cycles("v4-8", shared=True))  # a device of two halves
