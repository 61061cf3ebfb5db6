"""Converts the user's arrays, tables and numbers to tensors, and their dtypes: float64 becomes float32."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map

from ..errors import BatchError, DataError
from .batches import describe_value, is_flat, require_dense
from .tables import is_foreign, table_to_array

_NUMBERS = "biufc"  # the kinds of NumPy's number dtypes
_PACKED = (
    "{} holds a PackedSequence, whose rows can't be separated: pass the padded rows and their lengths, ((x, lengths), "
    "y), see torch.nn.utils.rnn.pad_sequence and tpufit.data.PadToBuckets"
)


def as_tensors(batch: Any) -> Any:
    """Convert a batch's arrays, tables, numbers and lists of numbers to tensors, and leave the rest unchanged."""
    if is_flat(batch):
        return type(batch)([leaf.float() if leaf.dtype is torch.float64 else leaf for leaf in batch])
    if type(batch) is list:  # (x, y), or a module's arguments
        return [tree_map(_as_tensor, part, is_leaf=is_leaf) for part in batch]
    # Pass no closure over the batch: PyTorch's tree functions keep it alive until the garbage collector runs.
    return tree_map(_as_tensor, batch, is_leaf=is_leaf)


def is_leaf(value: Any) -> bool:
    """True for a list of numbers, or of such lists, which becomes one tensor although PyTorch takes it for a nest."""
    return (type(value) is list and holds_numbers(value)) or isinstance(value, PackedSequence)


def holds_numbers(values: Any, row_types: Any = (list, tuple)) -> bool:
    """True for a list that begins with a number, or with a row of numbers, of one of these types."""
    while isinstance(values, (list, tuple)) and values:
        values = values[0]
        if isinstance(values, (list, tuple)) and not isinstance(values, row_types):
            return False
    if isinstance(values, (np.ndarray, np.generic)):
        return values.ndim == 0 and values.dtype.kind in _NUMBERS
    return isinstance(values, (bool, int, float)) or (isinstance(values, Tensor) and values.dim() == 0)


def _as_tensor(leaf: Any) -> Any:
    if isinstance(leaf, Mapping):  # a tokenizer's, which PyTorch doesn't treat as a nest
        return as_tensors(dict(leaf))
    if isinstance(leaf, PackedSequence):
        raise BatchError(_PACKED.format("a batch"))
    if isinstance(leaf, list):
        return _list_to_tensor(leaf)
    if is_foreign(leaf):
        leaf = table_to_array(leaf)
    if isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind in _NUMBERS:
        leaf = _from_numpy(np.ascontiguousarray(leaf)) if isinstance(leaf, np.ndarray) else torch.tensor(leaf)
    elif isinstance(leaf, (bool, int, float)):
        leaf = torch.tensor(leaf, dtype=torch.float32 if isinstance(leaf, float) else None)
    if isinstance(leaf, Tensor) and leaf.dtype is torch.float64:
        return leaf.float()  # NumPy's default, and a TPU has no float64
    if isinstance(leaf, Tensor) and leaf.dtype is torch.complex128:
        return leaf.to(torch.complex64)
    return leaf


def _list_to_tensor(values: list[Any]) -> Any:
    """Convert a list of numbers to a tensor; rows of different lengths stay lists."""
    try:
        tensor = _stack(values)
    except ValueError:
        return tree_map(_as_tensor, values)
    return _as_tensor(tensor)


def _stack(values: list[Any]) -> Any:
    """Stack a list of numbers, or of such lists. Raises `ValueError` if the rows have different lengths."""
    if isinstance(values[0], Tensor):
        return torch.stack(values)
    return np.array(values)


def to_host_tensor(leaf: Any, name: str = "an array") -> Any:
    """Convert an array, a table or a list of numbers to a tensor with rows, which shares memory where possible.

    Raises:
        DataError: It contains no numbers, or has no rows. The error says its `name`.
    """
    if leaf is None:
        return None
    if isinstance(leaf, Mapping):
        return tree_map(partial(to_host_tensor, name=name), dict(leaf), is_leaf=is_leaf)
    if isinstance(leaf, PackedSequence):
        raise DataError(_PACKED.format(name))
    try:
        if is_foreign(leaf):
            leaf = table_to_array(leaf)
        if isinstance(leaf, list):
            leaf = _stack(leaf)
        tensor = leaf if isinstance(leaf, Tensor) else _from_numpy(np.array(leaf, copy=None, order="C"))
    except (TypeError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{name} must be an array of numbers, got {_describe_non_numbers(leaf)}") from error
    require_dense([tensor], name)
    if not tensor.dim():
        raise DataError(f"{name} must be an array with rows, got a single number ({leaf!r})")
    return tensor.detach().cpu()


def _describe_non_numbers(leaf: Any) -> str:
    """Describe an array's values that aren't numbers, and the cure."""
    array = leaf if isinstance(leaf, np.ndarray) else None
    first = array.flat[0] if array is not None and array.size else leaf
    if isinstance(first, (str, bytes)):
        return f"{describe_value(first)}: encode text as numbers, e.g. one per word or per class"
    if isinstance(leaf, list) or (array is not None and isinstance(first, (list, tuple, np.ndarray, Tensor))):
        return "rows of different lengths: pad them to one, see tpufit.data.PadToBuckets"
    if array is not None and array.dtype.kind == "O":
        return f"{describe_value(leaf)}, whose first item is {first!r:.40}: convert it, e.g. with .astype('float32')"
    if array is not None and array.dtype.kind in _NUMBERS:  # another byte order, or a wider type
        kind = {"f": "float32", "c": "complex64"}.get(array.dtype.kind, "int64")
        return f"{describe_value(leaf)}, a dtype that PyTorch lacks: convert it with .astype({kind!r})"
    return f"{describe_value(leaf)}{': convert it to numbers' if array is not None else ''}"


def _from_numpy(array: np.ndarray[Any, Any]) -> Tensor:
    """Make a tensor over the array's memory. PyTorch would warn about read-only memory, but nothing here writes."""
    return torch.from_numpy(array if array.flags.writeable else np.asarray(_Writable(array)))


class _Writable:
    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array  # kept alive
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}
