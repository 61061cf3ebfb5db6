"""Batches: nests (tuples, lists, dicts) of host tensors. Their parts, rows and descriptions."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from ..errors import BatchError, DataError, say_count
from ..utils.text import dtype_name


def unpack(batch: Any) -> tuple[Any, Any, Any]:
    """Split a batch into x, y and sample_weight, as Keras does.

    Args:
        batch: `(x,)`, `(x, y)` or `(x, y, sample_weight)` as a tuple, a named tuple or a list; anything else is an x
            alone.

    Returns:
        `(x, y, sample_weight)`, with None for each missing part.

    Raises:
        DataError: A tuple or list has more than three items.

    Example:
        >>> unpack((1, 2)), unpack({"tokens": 1})
        ((1, 2, None), ({'tokens': 1}, None, None))

    Source: `keras.utils.unpack_x_y_sample_weight`.
    """
    if not has_parts(batch):
        return batch, None, None
    if not 1 <= len(batch) <= 3:
        raise DataError(
            f"a batch must be (x,), (x, y) or (x, y, sample_weight), got {say_count(len(batch), 'item')}. Several "
            "inputs make one x: ((a, b), y)"
        )
    x, y, sample_weight = (*batch, None, None)[:3]
    return x, y, sample_weight


def has_parts(batch: Any) -> bool:
    """True for a batch with parts, x, y and sample_weight: a tuple, a named tuple or a list."""
    return isinstance(batch, tuple) or type(batch) is list


def count_rows(leaves: Iterable[Any]) -> int:
    """Return a batch's number of rows: the length of the first leaf that is a tensor with dimensions, or 1."""
    return next((leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), 1)


def is_flat(batch: Any) -> bool:
    """True for a tuple or list of tensors, as most batches are: walking a nest would take as long as sending it."""
    if type(batch) is not tuple and type(batch) is not list:
        return False
    for leaf in batch:  # noqa: SIM110 - `all` would take longer, for each batch
        if type(leaf) is not Tensor:
            return False
    return True


def require_dense(tensors: Iterable[Tensor], name: str = "a batch") -> None:
    """Check that tensors can be split by rows and sent to a device.

    Raises:
        BatchError: A tensor is sparse, nested, quantized or on the device `meta`. The error says the `name`.
    """
    for tensor in tensors:
        if tensor.is_nested:
            kind, cure = "nested", "pad it, torch.nested.to_padded_tensor(x, 0)"
        elif tensor.layout is not torch.strided:
            kind, cure = f"sparse ({tensor.layout})", "pass x.to_dense()"
        elif tensor.is_quantized:
            kind, cure = f"quantized ({dtype_name(tensor.dtype)})", "pass x.dequantize()"
        elif tensor.is_meta:
            kind, cure = "meta, which has no values", "load its values first"
        else:
            continue
        raise BatchError(f"{name} must be dense tensors, got a tensor that is {kind}: {cure}")


def describe_value(value: Any) -> str:
    """Describe a value that isn't a tensor, for an error.

    Example:
        >>> describe_value(None), describe_value("abc"), describe_value(["a", "b"]), describe_value(object)
        ('None', "text ('abc')", "a list of 2, the first of which is text ('a')", 'a type')
    """
    if value is None:
        return "None"
    if isinstance(value, (str, bytes)):
        return f"text ({value[:20]!r})"
    if isinstance(value, (tuple, list)):
        first = f", the first of which is {describe_value(value[0])}" if value else ""
        return f"a {type(value).__name__} of {len(value)}{first}"
    if isinstance(value, np.ndarray):
        return f"an array of dtype {value.dtype} and shape {value.shape}"
    if isinstance(value, (int, float)):
        return f"the number {value}"
    name = type(value).__name__
    return f"{'an' if name[:1] in 'aeiouAEIOU' else 'a'} {name}"


# Integer dtypes by size in bytes. NumPy lacks some of PyTorch's dtypes, but a copy needs only the bits.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def select_rows(tensor: Tensor, rows: slice | np.ndarray[Any, Any]) -> Tensor:
    """Select rows of a host tensor: a slice shares its memory; row numbers, all in range, are gathered in order."""
    if isinstance(rows, slice):
        return tensor[rows]
    # NumPy copies in this thread. PyTorch would split the work among threads and wait for the slowest, which takes a
    # thousand times as long if another process keeps a core busy.
    return torch.from_numpy(view_bits(tensor).take(rows, 0, mode="clip")).view(tensor.dtype)


def view_bits(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Return a host tensor's bits as an array of whole numbers, which shares its memory."""
    return tensor.view(_BITS.get(tensor.itemsize, tensor.dtype)).numpy()


def name_parts(batch: Any) -> dict[str, Any]:
    """Return a batch's parts by name: x, y and sample_weight if the batch is a tuple of them, else the batch."""
    parts = ("x", "y", "sample_weight")
    usual = has_parts(batch) and 1 <= len(batch) <= len(parts)
    return dict(zip(parts, batch, strict=False)) if usual else {"batch": batch}


def list_tensors(parts: Mapping[str, Any]) -> str:
    """List the tensors of named parts with their dtypes and shapes, for errors.

    Example:
        >>> import torch
        >>> list_tensors({"x": (torch.ones(4, 3), torch.ones(4)), "y": torch.tensor([1, 0])})
        'x[0]: float32 (4, 3), x[1]: float32 (4,), y: int64 (2,)'
    """
    return ", ".join(
        f"{name}: {dtype_name(tensor.dtype)} {tuple(tensor.shape)}" for name, tensor in collect_tensors(parts).items()
    )


def collect_tensors(parts: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of named parts by their paths, e.g. `"x[0]"`."""
    return {
        name + keystr(path): leaf
        for name, part in parts.items()
        for path, leaf in tree_flatten_with_path(part)[0]
        if isinstance(leaf, Tensor)
    }
