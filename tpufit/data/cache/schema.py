"""The form of samples in a cache: nests of tuples, lists and dicts with leaves of fixed shape and dtype."""

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

# Rows are checked and copied as integers of the same size, because NumPy lacks bfloat16.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Field:
    """One leaf of every sample."""

    name: str  # the expression for it: sample[0]['image']
    dtype: torch.dtype
    shape: tuple[int, ...]  # in one sample

    @property
    def row_bytes(self) -> int:
        """The field's size in one sample, in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def empty(self, rows: int) -> NDArray[Any]:
        """Allocate memory for the bits of some rows, of shape `(rows, numbers in a row)`."""
        return np.empty((rows, prod(self.shape)), dtype=f"i{self.dtype.itemsize}")

    def bits(self, column: Tensor) -> NDArray[Any]:
        """View a column's bits as integers of shape `(rows, numbers in a row)`, in the same memory."""
        array: NDArray[Any] = column.view(_BITS[self.dtype.itemsize]).numpy()
        return array.reshape(len(column), prod(self.shape))

    def tensor(self, bits: NDArray[Any]) -> Tensor:
        """View bits as a column of shape `(rows, *shape)`, in the same memory."""
        return torch.from_numpy(bits).view(self.dtype).view(len(bits), *self.shape)


def flatten(sample: Any, index: int) -> tuple[Any, dict[str, Tensor]]:
    """Split a sample into its structure and its leaves by name.

    The structure is the nest of tuples, lists and dicts, with names for leaves, in a form for JSON: a sequence begins
    with its type. Leaves are tensors and arrays; numbers become bool, int64 and float32. Errors name the sample by its
    index.

    Raises:
        DataError: A cache can't store a leaf.

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
        leaves[name] = _to_tensor(node, f"{name} of sample {index}")
        return name

    return walk(sample, "sample"), leaves


def unflatten(structure: Any, leaves: Mapping[str, Any]) -> Any:
    """Rebuild a nest from the structure that `flatten` returned and a leaf for each name.

    Example:
        >>> unflatten(["tuple", "sample[0]", {"y": "sample[1]['y']"}], {"sample[0]": 1, "sample[1]['y']": 2})
        (1, {'y': 2})
    """
    if isinstance(structure, str):
        return leaves[structure]
    if isinstance(structure, dict):
        return {key: unflatten(item, leaves) for key, item in structure.items()}
    kind, *items = structure
    parts = [unflatten(item, leaves) for item in items]
    return tuple(parts) if kind == "tuple" else parts


def check_same_structure(
    structure: Any, fields: Sequence[Field], other: Any, leaves: Mapping[str, Tensor], index: int
) -> None:
    """Check that a sample with this index has the structure, shapes and dtypes of the first sample.

    Raises:
        DataError: They differ; the message names the sample, the field and both.
    """
    if other != structure:
        names = {name: name for name in (*leaves, *(field.name for field in fields))}
        both = [unflatten(nest, names) for nest in (other, structure)]
        raise DataError(
            f"sample {index} has the structure {both[0]}, but sample 0 has {both[1]}: give all samples one structure"
        )
    for field in fields:
        leaf = leaves[field.name]
        if leaf.shape != field.shape or leaf.dtype != field.dtype:
            got = f"{_describe(leaf.dtype, leaf.shape)}, but of sample 0 {_describe(field.dtype, field.shape)}"
            cure = "All need one shape and dtype: resize, crop or pad in `transform`"
            raise DataError(f"{field.name} of sample {index} is {got}. {cure}")


def _describe(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{dtype_name(dtype)} {tuple(shape)}"


def _to_tensor(leaf: Any, name: str) -> Tensor:
    if isinstance(leaf, (bool, int, float)):
        leaf = np.float32(leaf) if isinstance(leaf, float) else np.array(leaf)
    if isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind in "biuf" and leaf.dtype.itemsize in _BITS:
        # Copied, because torch warns about sharing read-only memory, such as a PIL image's.
        return torch.from_numpy(np.array(leaf, dtype=leaf.dtype.newbyteorder("="), order="C"))
    if isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.dtype.itemsize in _BITS:
        return leaf.detach().cpu()
    kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
    if hasattr(leaf, "dtype"):
        kind += f" of {leaf.dtype}"
    cure = "return a tensor, an array or a number, or a tuple, list or dict of them with strings for keys"
    if kind.startswith("PIL."):
        cure = "convert it to an array in `transform`, e.g. with numpy.asarray"
    raise DataError(f"{name} is a {kind}, which a cache can't store: {cure}")
