"""A slice takes a tensor before its dimensions are merged, with the same results (`rewrite_slices.py`)."""

import re

import pytest
import torch
from torchtpu_texts import compare

from tpufit.drivers.torchtpu.rewrite_slices import slice_before_merging

pytestmark = pytest.mark.runtime("torch_tpu")

# Selections from a tensor with the shape (4, 6, 8). TorchTPU merges dimensions for all but the last two.
SELECTIONS = {
    "the first token": lambda x: x[:, 0],
    "a step": lambda x: x[2],
    "a part of a step": lambda x: x[2, :, 2:4],
    "one number per row": lambda x: x[:, 3, 5],
    "the last numbers": lambda x: x[..., 6:],
    "heads": lambda x: x.unflatten(-1, (2, 4))[:, :, 1],
}


@pytest.mark.cores(1)
@pytest.mark.parametrize("name", SELECTIONS)
def test_a_selection_takes_the_tensor_itself(cores, name):
    torch.manual_seed(0)
    select = SELECTIONS[name]
    x = torch.randn(4, 6, 8)
    before, after, text = compare(slice_before_merging, lambda x: select(x * 2) + 1, x)
    torch.testing.assert_close(after, select(x * 2) + 1)
    assert torch.equal(before, after)
    assert re.findall(r"stablehlo\.slice .* : \(tensor<(.*)>\)", text) == ["4x6x8xf32"]


def test_a_range_that_is_no_box_is_sliced_after_merging():
    """Numbers 2 to 9 of 4 x 8 are parts of two rows."""
    text = """
    %0 = stablehlo.reshape %a : (tensor<4x8xf32>) -> tensor<32xf32>
    %1 = stablehlo.slice %0 [2:10] : (tensor<32xf32>) -> tensor<8xf32>"""
    assert slice_before_merging(text) == text


def test_equal_names_in_two_regions_are_different_tensors():
    text = """
      %0 = stablehlo.reshape %a : (tensor<4x8xf32>) -> tensor<32xf32>
    }
    %0 = stablehlo.add %b, %b : tensor<32xf32>
    %1 = stablehlo.slice %0 [0:8] : (tensor<32xf32>) -> tensor<8xf32>"""
    assert slice_before_merging(text) == text
