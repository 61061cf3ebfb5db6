"""The kind of core for which a step is traced, whether torch_xla reports it or not."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tpufit
from tpufit.runtime import core_kind
from tpufit.runtime.driver import driver
from tpufit.utils import hardware
from tpufit.utils.hardware import CHIPS


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, rows):
        q, k, v = self.qkv(rows).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).sum((1, 2, 3))[:, None]


@pytest.mark.cores(1, 8, quick=True)
def test_attention_in_bfloat16_trains_on_any_number_of_cores(cores):
    torch.manual_seed(0)
    model = tpufit.Model(Attending())
    model.compile("sgd", "mse", precision="bf16", scale_lr=None)
    x = np.random.default_rng(0).normal(size=(16, 4, 16)).astype("float32")
    losses = model.fit(x, x[:, 0, :1], 16 // cores, 3, shuffle=False, verbose=0, cores=cores).history["loss"]
    assert losses[-1] < losses[0]
    assert core_kind.find_kind(torch.device(driver().device_type)) == "cpu"


@pytest.mark.cores(8, quick=True)
@pytest.mark.parametrize(
    ("number", "keeps"), [("0x0063", True), ("0x006f", True), ("0x0027", False), ("0x0062", False)]
)
def test_several_cores_are_recognized_by_the_chips(cores, monkeypatch, number, keeps):
    import torch_xla.runtime

    tpufit.runtime.start(cores, "the test")
    monkeypatch.setattr(torch_xla.runtime, "device_type", lambda: "TPU")
    monkeypatch.setattr(hardware, "find_chips", lambda: [CHIPS[number]] * 4)
    assert core_kind.keeps_bfloat16(core_kind.find_kind(torch.device(driver().device_type))) is keeps
