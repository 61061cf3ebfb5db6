"""Products in a graph's text keep their dimensions, with the same results: `drivers/torchtpu/rewrite_products.py`."""

import re

import pytest
import torch
from torchtpu_texts import compare

from tpufit.drivers.torchtpu.rewrite_products import unflatten_products

pytestmark = pytest.mark.runtime("torch_tpu")

A, B, C, D, E = 2, 3, 4, 5, 6
# For each case: the shapes of the factors, and the dimensions of XLA's product.
PRODUCTS = {
    "abxz,abyz->abxy": ((A, B, C, D), (A, B, E, D), (4, 4)),
    "abxy,abyz->abxz": ((A, B, C, D), (A, B, D, E), (4, 4)),
    "abxy,abxz->abyz": ((A, B, C, D), (A, B, C, E), (4, 4)),
    "abx,yx->aby": ((A, B, C), (D, C), (3, 2)),
    "abcx,xy->abcy": ((A, B, C, D), (D, E), (4, 2)),
    "abx,aby->xy": ((A, B, C), (A, B, D), (3, 3)),
    "abqxz,abyz->abqxy": ((A, B, C, D, E), (A, B, 7, E), (5, 4)),
    "axy,ayz->axz": ((A, B, C), (A, C, D), (3, 3)),  # nothing is flattened
    "abxz,abyz->abxy one row": ((A, 1, C, D), (A, 1, E, D), (3, 3)),
    "abx,yx->aby one of each": ((1, 1, C), (1, C), (3, 3)),  # nothing is flattened
}


@pytest.mark.cores(1)
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_keeps_its_dimensions(cores, name):
    torch.manual_seed(0)
    first, second, ranks = PRODUCTS[name]
    values = torch.randn(first), torch.randn(second)
    equation = name.partition(" ")[0]
    before, after, text = compare(unflatten_products, lambda a, b: torch.einsum(equation, a, b), *values)
    torch.testing.assert_close(after, torch.einsum(equation, *values))
    assert torch.equal(before, after)
    (line,) = re.findall(r"stablehlo\.dot_general .* : \((.*)\) -> ", text)
    assert tuple(kind.count("x") for kind in re.findall(r"tensor<([\dx]+)f32>", line)) == ranks


@pytest.mark.cores(1)
def test_transposed_and_divided_factors_are_the_same_numbers(cores):
    """As in attention: heads are a part of the last dimension, and come before the words."""
    torch.manual_seed(0)
    x, w = torch.randn(A, C, 2 * D), torch.randn(2 * D, 2 * D)

    def heads(x):
        return x.unflatten(-1, (2, D)).transpose(1, 2)

    def attend(x, w):
        shares = (heads(x) @ heads(x @ w).mT).softmax(-1)
        return (shares @ heads(x)).transpose(1, 2).flatten(2) @ w

    before, after, text = compare(unflatten_products, attend, x, w)
    torch.testing.assert_close(after, attend(x, w))
    torch.testing.assert_close(after, before)
    assert text.count("%flat_") > 0


@pytest.mark.cores(1)
@pytest.mark.parametrize("shape", [(A, B, C), (B, B, C)])
def test_transposed_rows_keep_their_order(cores, shape):
    """As in the steps of an RNN. With equal sizes the shape doesn't determine the order."""
    torch.manual_seed(0)
    x, w = torch.randn(shape), torch.randn(C, D)
    before, after, _ = compare(unflatten_products, lambda x, w: x.transpose(0, 1).flatten(0, 1) @ w, x, w)
    torch.testing.assert_close(after, x.transpose(0, 1).flatten(0, 1) @ w)
    assert torch.equal(before, after)


def test_a_text_without_products_is_unchanged():
    text = "  func.func @main(%arg0: tensor<2xf32>) -> tensor<2xf32> {\n    return %arg0 : tensor<2xf32>\n  }\n"
    assert unflatten_products(text) == text
