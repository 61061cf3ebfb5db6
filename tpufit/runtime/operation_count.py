"""`count_operations`: counts the operations of a program in its text, before it is compiled.

Matrix products and convolutions are counted; a product and a sum are two operations. They are nearly all of a network's
work, and the peak that vendors state is for matrix products. Shapes are over all cores.

The text is HLO from torch_xla, and StableHLO from TorchTPU.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from .kernel_work import find_kernel_work

_TYPE = r"\w+\[([\d,]*)\]\S*"
_PRODUCT = re.compile(rf"= {_TYPE} (dot|convolution)\({_TYPE} [^,]+, {_TYPE} [^)]+\)(.*)")
_WINDOW = re.compile(r"window={([^}]*)}")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")  # a letter or number for each dimension: "bf01_oi01->bf01"
_CONTRACTED = re.compile(r"lhs_contracting_dims={([\d,]*)}")
_GROUPS = re.compile(r"batch_group_count ?= ?(\d+)")

_TENSOR = r"tensor<((?:\d+x)*)(?:[^<>]|<[^<>]*>)+>"  # also of complex numbers: tensor<3xcomplex<f32>>
_STABLE = re.compile(rf"= stablehlo\.(dot|dot_general|convolution)\b(.*) : \({_TENSOR}, {_TENSOR}\) -> {_TENSOR}")
_STABLE_LABELS = re.compile(r"dim_numbers = \[(.+?)\]x\[(.+?)\]->\[(.+?)\]")
_STABLE_CONTRACTED = re.compile(r"contracting_dims = \[([\d, ]*)\] x")

Shape = list[int]


@dataclass(frozen=True)
class _Window:
    """The window of a convolution in one dimension."""

    stride: int
    dilation: int  # of the kernel
    image_dilation: int
    before: int  # the padding before the images


def count_operations(text: str, cores: int = 1) -> int:
    """Count the operations of a program's matrix products, convolutions and marked kernels.

    The text must include the types of operands. A kernel runs on `cores` cores.

    Example:
        >>> dot = "%dot.3 = f32[4,5]{1,0} dot(f32[4,576]{1,0} %a, f32[576,5]{0,1} %b), lhs_contracting_dims={1}"
        >>> count_operations(dot) == 2 * 4 * 5 * 576
        True
        >>> dot = "%3 = stablehlo.dot %1, %2 : (tensor<4x576xf32>, tensor<576x5xf32>) -> tensor<4x5xf32>"
        >>> count_operations(dot) == 2 * 4 * 5 * 576
        True
    """
    terms = 0
    for result, kind, left, right, attributes in _PRODUCT.findall(text):
        count = _count_in_product if kind == "dot" else _count_in_convolution
        terms += count(_parse_numbers(result), _parse_numbers(left), _parse_numbers(right), attributes)
    for kind, attributes, left, right, result in _STABLE.findall(text):
        count = _of_stable_convolution if kind == "convolution" else _of_stable_product
        terms += count(_parse_numbers(result), _parse_numbers(left), _parse_numbers(right), attributes)
    kernels = filter(None, map(find_kernel_work, text.splitlines()))
    return 2 * terms + cores * sum(kernel.operations for kernel in kernels)


def _count_in_product(result: Shape, left: Shape, right: Shape, attributes: str) -> int:
    contracted = _CONTRACTED.search(attributes)
    over = _parse_numbers(contracted[1]) if contracted else []
    return math.prod(result) * math.prod(left[i] for i in over)


def _of_stable_product(result: Shape, left: Shape, right: Shape, attributes: str) -> int:
    contracted = _STABLE_CONTRACTED.search(attributes)
    over = _parse_numbers(contracted[1]) if contracted else [len(left) - 1]
    return math.prod(result) * math.prod(left[i] for i in over)


def _count_in_convolution(result: Shape, images: Shape, kernel: Shape, attributes: str) -> int:
    labels, window = _LABELS.search(attributes), _WINDOW.search(attributes)
    assert labels is not None
    given: dict[str, str] = dict(pair.split("=") for pair in window[1].split()) if window else {}
    windows = []
    for i in range(len(result) - 2):
        at = {key: value.split("x")[i] for key, value in given.items()}
        before = int(at.get("pad", "0_0").partition("_")[0])
        stride, dilation, image_dilation = (int(at.get(key, 1)) for key in ("stride", "rhs_dilate", "lhs_dilate"))
        windows.append(_Window(stride, dilation, image_dilation, before))
    named = _name_sizes(labels[1], images), _name_sizes(labels[2], kernel), _name_sizes(labels[3], result)
    return _count_terms(*named, windows, _parse_groups(attributes))


def _of_stable_convolution(result: Shape, images: Shape, kernel: Shape, attributes: str) -> int:
    labels = _STABLE_LABELS.search(attributes)
    assert labels is not None

    def parse(name: str) -> list[int]:
        found = re.search(rf"{name} = \[([\d, ]*)\]", attributes)
        return _parse_numbers(found[1]) if found else [1] * (len(result) - 2)

    pads = re.search(r"pad = \[(.*?)\]\]", attributes)  # before and after, for each dimension
    before = _parse_numbers(pads[1])[::2] if pads else [0] * (len(result) - 2)
    windows = list(map(_Window, parse("stride"), parse("rhs_dilate"), parse("lhs_dilate"), before))
    of_images, of_kernel, of_result = (labels[i].split(", ") for i in (1, 2, 3))
    named = _name_sizes(of_images, images), _name_sizes(of_kernel, kernel), _name_sizes(of_result, result)
    return _count_terms(*named, windows, _parse_groups(attributes))


def _name_sizes(names: Sequence[str], shape: Shape) -> dict[str, int]:
    return dict(zip(names, shape, strict=True))


def _count_terms(
    images: dict[str, int], kernel: dict[str, int], result: dict[str, int], windows: list[_Window], groups: int
) -> int:
    """Count a convolution's products, except with padding or the gaps of dilation."""
    # The kernel's shape already accounts for groups of features.
    terms = kernel["i"] * kernel["o"] * images["b"] // groups
    for i, window in enumerate(windows):
        terms *= _count_overlaps(images[str(i)], kernel[str(i)], result[str(i)], window)
    return terms


def _count_overlaps(images: int, kernel: int, result: int, window: _Window) -> int:
    """Count the pairs of positions in result and kernel that meet a position of the images, in one dimension."""
    places = (out * window.stride + k * window.dilation - window.before for out in range(result) for k in range(kernel))
    return sum(place % window.image_dilation == 0 and 0 <= place // window.image_dilation < images for place in places)


def _parse_groups(attributes: str) -> int:
    found = _GROUPS.search(attributes)
    return int(found[1]) if found else 1


def _parse_numbers(text: str) -> Shape:
    return [int(number) for number in re.findall(r"-?\d+", text)]
