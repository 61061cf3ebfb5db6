"""`operations_in`: counts what a program computes, in the text that torch_xla gives of it before it is compiled.

Its matrix products and convolutions are counted, a product and a sum as two operations. Of a network they are nearly
all of the work, and the peak that vendors state is one of matrix products. Shapes are those of all cores together.
"""

import math
import re

from .kernel_work import work_in

_TYPE = r"\w+\[([\d,]*)\]\S*"
_PRODUCT = re.compile(rf"= {_TYPE} (dot|convolution)\({_TYPE} [^,]+, {_TYPE} [^)]+\)(.*)")
_WINDOW = re.compile(r"window={([^}]*)}")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")  # a letter or number for each dimension: "bf01_oi01->bf01"
_CONTRACTED = re.compile(r"lhs_contracting_dims={([\d,]*)}")
_GROUPS = re.compile(r"batch_group_count=(\d+)")

Shape = list[int]


def operations_in(text: str, cores: int = 1) -> int:
    """Count the operations of a program's matrix products and convolutions, and of the kernels that say theirs.

    The text of the program has the types of operands. A kernel runs on so many cores.

    Example:
        >>> dot = "%dot.3 = f32[4,5]{1,0} dot(f32[4,576]{1,0} %a, f32[576,5]{0,1} %b), lhs_contracting_dims={1}"
        >>> operations_in(dot) == 2 * 4 * 5 * 576
        True
    """
    total = 0
    for result, kind, left, right, attributes in _PRODUCT.findall(text):
        count = _of_product if kind == "dot" else _of_convolution
        total += 2 * count(_numbers(result), _numbers(left), _numbers(right), attributes)
    kernels = filter(None, map(work_in, text.splitlines()))
    return total + cores * sum(kernel.operations for kernel in kernels)


def _of_product(result: Shape, left: Shape, right: Shape, attributes: str) -> int:
    contracted = _CONTRACTED.search(attributes)
    over = _numbers(contracted[1]) if contracted else []
    return math.prod(result) * math.prod(left[i] for i in over)


def _of_convolution(result: Shape, images: Shape, kernel: Shape, attributes: str) -> int:
    """The terms that it adds up, without those of padding and of holes."""
    labels = _LABELS.search(attributes)
    window = _WINDOW.search(attributes)
    groups = _GROUPS.search(attributes)
    assert labels is not None
    of_images = dict(zip(labels[1], images, strict=True))
    of_kernel = dict(zip(labels[2], kernel, strict=True))
    of_result = dict(zip(labels[3], result, strict=True))
    given: dict[str, str] = dict(pair.split("=") for pair in window[1].split()) if window else {}
    # Groups of features are in the kernel's shape already.
    terms: int = of_kernel["i"] * of_kernel["o"] * of_images["b"] // (int(groups[1]) if groups else 1)
    for name in filter(str.isdigit, labels[1]):
        layout = {key: value.split("x")[int(name)] for key, value in given.items()}
        terms *= _overlaps(of_images[name], of_kernel[name], of_result[name], layout)
    return terms


def _overlaps(images: int, kernel: int, result: int, layout: dict[str, str]) -> int:
    """The pairs of places, in the result and in the kernel, that meet one of the images, in one dimension."""
    stride = int(layout.get("stride", 1))
    apart = int(layout.get("rhs_dilate", 1))
    holes = int(layout.get("lhs_dilate", 1))
    before = int(layout.get("pad", "0_0").partition("_")[0])
    places = (out * stride + k * apart - before for out in range(result) for k in range(kernel))
    return sum(place % holes == 0 and 0 <= place // holes < images for place in places)


def _numbers(text: str) -> Shape:
    return [int(number) for number in text.split(",") if number]
