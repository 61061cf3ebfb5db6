"""The form of samples in a cache: nests of tuples, lists and dicts, whose leaves have a fixed shape and dtype."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import DataError
from ...utils.text import dtype_name

# Rows are checked and copied as whole numbers of their size, because NumPy lacks bfloat16.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Field:
    """One leaf of every sample."""

    name: str  # the expression that reaches it: sample[0]['image']
    dtype: torch.dtype
    shape: tuple[int, ...]  # in one sample

    @property
    def row_bytes(self) -> int:
        """Its size in one sample."""
        return prod(self.shape) * self.dtype.itemsize

    def empty(self, rows: int) -> NDArray[Any]:
        """Room for the bits of some rows, shape `(rows, numbers in a row)`."""
        return np.empty((rows, prod(self.shape)), dtype=f"i{self.dtype.itemsize}")

    def bits(self, column: Tensor) -> NDArray[Any]:
        """A column's bits as whole numbers, shape `(rows, numbers in a row)`, in the same memory."""
        array: NDArray[Any] = column.view(_BITS[self.dtype.itemsize]).numpy()
        return array.reshape(len(column), prod(self.shape))

    def tensor(self, bits: NDArray[Any]) -> Tensor:
        """The column of these bits, shape `(rows, *shape)`, in the same memory."""
        return torch.from_numpy(bits).view(self.dtype).view(len(bits), *self.shape)


def flatten(sample: Any, index: int) -> tuple[Any, dict[str, Tensor]]:
    """Take a sample apart into its structure and its leaves by name.

    The structure is the nest of tuples, lists and dicts with names for leaves, as JSON can hold it: a sequence begins
    with its kind. Leaves are tensors and arrays; numbers become bool, int64 and float32. Errors tell the sample's
    index.

    Raises:
        DataError: A cache can't keep one of its leaves.

    Example:
        >>> structure, leaves = flatten(({"image": np.zeros(3, np.uint8)}, 7), index=0)
        >>> structure
        ['tuple', {'image': "sample[0]['image']"}, 'sample[1]']
        >>> leaves["sample[1]"]
        tensor(7)
    """
    leaves: dict[str, Tensor] = {}

    def walk(node: Any, name: str) -> Any:
        if type(node) in (tuple, list):
            return [type(node).__name__, *(walk(item, f"{name}[{i}]") for i, item in enumerate(node))]
        if type(node) is dict and all(isinstance(key, str) for key in node):
            return {key: walk(item, f"{name}[{key!r}]") for key, item in node.items()}
        leaves[name] = _leaf(node, f"{name} of sample {index}")
        return name

    return walk(sample, "sample"), leaves


def nest(structure: Any, leaves: Mapping[str, Any]) -> Any:
    """Put a nest together again, of the structure that `flatten` gave and a leaf for each name.

    Example:
        >>> nest(["tuple", "sample[0]", {"y": "sample[1]['y']"}], {"sample[0]": 1, "sample[1]['y']": 2})
        (1, {'y': 2})
    """
    if isinstance(structure, str):
        return leaves[structure]
    if isinstance(structure, dict):
        return {key: nest(item, leaves) for key, item in structure.items()}
    kind, *items = structure
    parts = [nest(item, leaves) for item in items]
    return tuple(parts) if kind == "tuple" else parts


def check_same_form(
    structure: Any, fields: Sequence[Field], other: Any, leaves: Mapping[str, Tensor], index: int
) -> None:
    """Make sure that a sample of this index has the structure, the shapes and the dtypes of the first one.

    Raises:
        DataError: It is not; the message names the sample, the field and both forms.
    """
    if other != structure:
        names = {name: name for name in (*leaves, *(field.name for field in fields))}
        forms = [nest(form, names) for form in (other, structure)]
        raise DataError(f"sample {index} is built as {forms[0]}, but sample 0 as {forms[1]}: all must be alike")
    for field in fields:
        leaf = leaves[field.name]
        if leaf.shape != field.shape or leaf.dtype != field.dtype:
            both = f"{_form(leaf.dtype, leaf.shape)}, but of sample 0 {_form(field.dtype, field.shape)}"
            cure = "All need one shape and dtype: resize, crop or pad in `transform`"
            raise DataError(f"{field.name} of sample {index} is {both}. {cure}")


def _form(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{dtype_name(dtype)} {tuple(shape)}"


def _leaf(leaf: Any, name: str) -> Tensor:
    if isinstance(leaf, (bool, int, float)):
        leaf = np.float32(leaf) if isinstance(leaf, float) else np.array(leaf)
    if isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind in "biuf" and leaf.dtype.itemsize in _BITS:
        # Of a copy: torch warns of sharing memory that can't be written, such as a PIL image's.
        return torch.from_numpy(np.array(leaf, dtype=leaf.dtype.newbyteorder("="), order="C"))
    if isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.dtype.itemsize in _BITS:
        return leaf.detach().cpu()
    kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
    if hasattr(leaf, "dtype"):
        kind += f" of {leaf.dtype}"
    cure = "return a tensor, an array or a number, or a tuple, list or dict of them with strings for keys"
    if kind.startswith("PIL."):
        cure = "turn it into an array in `transform`, e.g. with numpy.asarray"
    raise DataError(f"{name} is a {kind}, which a cache can't keep: {cure}")
