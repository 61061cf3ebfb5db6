"""One batch: a nest (tuples, lists, dicts) of host tensors, made of tensors, arrays and numbers."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map

from ..errors import DataError, counted
from ..utils.text import dtype_name
from .tables import is_foreign, numbers_of


def unpack(batch: Any) -> tuple[Any, Any, Any]:
    """Split a batch into x, y and sample_weight, as Keras does.

    Args:
        batch: `(x,)`, `(x, y)` or `(x, y, sample_weight)` as a tuple, named or not, or a list; anything else is an x by
            itself.

    Returns:
        `(x, y, sample_weight)`, with None for each that the batch doesn't have.

    Raises:
        DataError: A tuple or list of more than three.

    Example:
        >>> unpack((1, 2)), unpack({"tokens": 1})
        ((1, 2, None), ({'tokens': 1}, None, None))

    Source: `keras.utils.unpack_x_y_sample_weight`.
    """
    if not is_row_of_parts(batch):
        return batch, None, None
    if not 1 <= len(batch) <= 3:
        raise DataError(
            f"a batch must be (x,), (x, y) or (x, y, sample_weight), got {counted(len(batch), 'item')}. Several inputs "
            "go together as one x: ((a, b), y)"
        )
    x, y, sample_weight = (*batch, None, None)[:3]
    return x, y, sample_weight


def is_row_of_parts(batch: Any) -> bool:
    """True for a tuple, named or not, or a list: x, y and sample_weight in this order."""
    return isinstance(batch, tuple) or type(batch) is list


def count_rows(leaves: Iterable[Any]) -> int:
    """The number of rows in a batch of these leaves: the length of its first tensor that has dimensions, or 1."""
    return next((leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), 1)


def as_tensors(batch: Any) -> Any:
    """The batch with its arrays, tables and numbers as tensors. Strings and other objects stay as they are."""
    if is_flat(batch):
        return type(batch)([leaf.float() if leaf.dtype is torch.float64 else leaf for leaf in batch])
    return tree_map(_as_tensor, batch)


def is_flat(batch: Any) -> bool:
    """True for a tuple or list of tensors, as most batches are: walking any nest takes as long as sending a batch."""
    if type(batch) is not tuple and type(batch) is not list:
        return False
    for leaf in batch:  # noqa: SIM110 - `all` would take longer, for each batch
        if type(leaf) is not Tensor:
            return False
    return True


def _as_tensor(leaf: Any) -> Any:
    if isinstance(leaf, Mapping):  # a tokenizer's, which PyTorch doesn't know as a nest
        return as_tensors(dict(leaf))
    if is_foreign(leaf):
        leaf = numbers_of(leaf)
    if isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind in "biufc":
        leaf = _from_numpy(np.ascontiguousarray(leaf)) if isinstance(leaf, np.ndarray) else torch.tensor(leaf)
    elif isinstance(leaf, (bool, int, float)):
        leaf = torch.tensor(leaf)
    if isinstance(leaf, Tensor) and leaf.dtype is torch.float64:
        return leaf.float()  # NumPy's default, and a TPU has no float64
    return leaf


def host_array(leaf: Any) -> Any:
    """Make an array or table a tensor with rows. It shares the array's memory where it can."""
    if leaf is None:
        return None
    if isinstance(leaf, Mapping):
        return tree_map(host_array, dict(leaf))
    if is_foreign(leaf):
        leaf = numbers_of(leaf)
    try:
        tensor = leaf if isinstance(leaf, Tensor) else _from_numpy(np.array(leaf, copy=None, order="C"))
    except (TypeError, ValueError) as error:
        raise DataError(f"arrays of numbers are needed, got {type(leaf).__name__}: {error}") from error
    if not tensor.dim():
        raise DataError(f"arrays must have rows, got a single number ({leaf!r})")
    return tensor.detach().cpu()


# Integers of each size, in bytes. NumPy lacks some of PyTorch's dtypes, but a copy needs only the bits.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def rows_in(tensor: Tensor, rows: slice | np.ndarray[Any, Any]) -> Tensor:
    """Rows of a host tensor: a slice shares its memory, numbers, all in range, are looked up in their order."""
    if isinstance(rows, slice):
        return tensor[rows]
    # NumPy copies in this very thread. PyTorch would share the work among threads and wait for the last of them, which
    # takes a thousand times as long where another process keeps a core busy.
    bits = tensor.view(_BITS.get(tensor.itemsize, tensor.dtype)).numpy()
    return torch.from_numpy(bits.take(rows, 0, mode="clip")).view(tensor.dtype)


def _from_numpy(array: np.ndarray[Any, Any]) -> Tensor:
    """A tensor over the array's memory. PyTorch warns of memory that can't be written to; nothing here writes."""
    return torch.from_numpy(array if array.flags.writeable else np.asarray(_Writable(array)))


class _Writable:
    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array  # kept alive
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def join(parts: Sequence[Any]) -> Any:
    """Join batches to one. They must be alike but for their rows."""
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        raise DataError(
            f"batches must all be of one structure, got {[type(part).__name__ for part in parts]} in one place"
        )
    if isinstance(first, Tensor):
        rows = [part if part.dim() else part[None] for part in parts]
        if any(part.shape[1:] != rows[0].shape[1:] for part in rows):
            raise DataError(
                "the batches that make one step must have rows of one shape, got batches of shapes "
                f"{[tuple(part.shape) for part in rows]}. Pad them to a few lengths, see tpufit.data.PadToBuckets"
            )
        return torch.cat(rows)
    if isinstance(first, dict):
        return type(first)((key, join([part[key] for part in parts])) for key in first)
    if isinstance(first, list) and not any(isinstance(leaf, Tensor) for leaf in tree_leaves(first)):
        return [item for part in parts for item in part]  # a list of strings or objects, one a row
    if isinstance(first, (tuple, list)):
        columns = [join(column) for column in zip(*parts, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    return first


def fields(batch: Any) -> dict[str, Any]:
    """The parts of a batch by their names: x, y and sample_weight if it is a tuple of these."""
    parts = ("x", "y", "sample_weight")
    usual = is_row_of_parts(batch) and 1 <= len(batch) <= len(parts)
    return dict(zip(parts, batch, strict=False)) if usual else {"batch": batch}


def listed(parts: Mapping[str, Any]) -> str:
    """The tensors of named parts with their dtypes and shapes, for errors.

    Example:
        >>> import torch
        >>> listed({"x": (torch.ones(4, 3), torch.ones(4)), "y": torch.tensor([1, 0])})
        'x[0]: float32 (4, 3), x[1]: float32 (4,), y: int64 (2,)'
    """
    return ", ".join(
        f"{name}: {dtype_name(tensor.dtype)} {tuple(tensor.shape)}" for name, tensor in tensors_of(parts).items()
    )


def tensors_of(parts: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of named parts, by the path to each, e.g. `"x[0]"`."""
    return {
        name + keystr(path): leaf
        for name, part in parts.items()
        for path, leaf in tree_flatten_with_path(part)[0]
        if isinstance(leaf, Tensor)
    }
