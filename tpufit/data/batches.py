"""Batches: nests (tuples, lists, dicts) of host tensors, made of tensors, arrays and numbers."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

from ..errors import BatchError, DataError, say_count
from ..utils.text import dtype_name
from .tables import is_foreign, table_to_array

_NUMBERS = "biufc"  # the kinds of NumPy's number dtypes
_PACKED = (
    "{} holds a PackedSequence, whose rows can't be separated: pass the padded rows and their lengths, ((x, lengths), "
    "y), see torch.nn.utils.rnn.pad_sequence and tpufit.data.PadToBuckets"
)


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
    if not is_row_of_parts(batch):
        return batch, None, None
    if not 1 <= len(batch) <= 3:
        raise DataError(
            f"a batch must be (x,), (x, y) or (x, y, sample_weight), got {say_count(len(batch), 'item')}. Several "
            "inputs make one x: ((a, b), y)"
        )
    x, y, sample_weight = (*batch, None, None)[:3]
    return x, y, sample_weight


def is_row_of_parts(batch: Any) -> bool:
    """True for a tuple, a named tuple or a list, whose items are x, y and sample_weight."""
    return isinstance(batch, tuple) or type(batch) is list


def count_rows(leaves: Iterable[Any]) -> int:
    """Return a batch's number of rows: the length of the first leaf that is a tensor with dimensions, or 1."""
    return next((leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), 1)


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


def holds_numbers(values: Any, rows: Any = (list, tuple)) -> bool:
    """True for a list that begins with a number, or with a row of numbers whose type is one of `rows`."""
    while isinstance(values, (list, tuple)) and values:
        values = values[0]
        if isinstance(values, (list, tuple)) and not isinstance(values, rows):
            return False
    if isinstance(values, (np.ndarray, np.generic)):
        return values.ndim == 0 and values.dtype.kind in _NUMBERS
    return isinstance(values, (bool, int, float)) or (isinstance(values, Tensor) and values.dim() == 0)


def is_flat(batch: Any) -> bool:
    """True for a tuple or list of tensors, as most batches are: walking a nest would take as long as sending it."""
    if type(batch) is not tuple and type(batch) is not list:
        return False
    for leaf in batch:  # noqa: SIM110 - `all` would take longer, for each batch
        if type(leaf) is not Tensor:
            return False
    return True


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


def host_array(leaf: Any, name: str = "an array") -> Any:
    """Convert an array, a table or a list of numbers to a tensor with rows, which shares memory where possible.

    Raises:
        DataError: It contains no numbers, or has no rows. The error says its `name`.
    """
    if leaf is None:
        return None
    if isinstance(leaf, Mapping):
        return tree_map(partial(host_array, name=name), dict(leaf), is_leaf=is_leaf)
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


def _describe_non_numbers(leaf: Any) -> str:
    """Describe an array's values that aren't numbers, and the cure."""
    array = leaf if isinstance(leaf, np.ndarray) else None
    first = array.flat[0] if array is not None and array.size else leaf
    if isinstance(first, (str, bytes)):
        return f"{describe_value(first)}: encode text as numbers, e.g. one per word or per class"
    if isinstance(leaf, list) or (array is not None and isinstance(first, (list, tuple, np.ndarray, Tensor))):
        return "rows of different lengths: pad them to one, see tpufit.data.PadToBuckets"
    if array is not None and array.dtype.kind == "O":
        return f"{describe_value(leaf)}, whose first item is {first!r:.40}: convert it, e.g. by .astype('float32')"
    if array is not None and array.dtype.kind in _NUMBERS:  # another byte order, or a wider type
        kind = {"f": "float32", "c": "complex64"}.get(array.dtype.kind, "int64")
        return f"{describe_value(leaf)}, a dtype that PyTorch lacks: convert it by .astype({kind!r})"
    return f"{describe_value(leaf)}{': convert it to numbers' if array is not None else ''}"


# Integer dtypes by size in bytes. NumPy lacks some of PyTorch's dtypes, but a copy needs only the bits.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def select_rows(tensor: Tensor, rows: slice | np.ndarray[Any, Any]) -> Tensor:
    """Select rows of a host tensor: a slice shares its memory; row numbers, all in range, are gathered in order."""
    if isinstance(rows, slice):
        return tensor[rows]
    # NumPy copies in this thread. PyTorch would split the work among threads and wait for the slowest, which takes a
    # thousand times as long if another process keeps a core busy.
    bits = tensor.view(_BITS.get(tensor.itemsize, tensor.dtype)).numpy()
    return torch.from_numpy(bits.take(rows, 0, mode="clip")).view(tensor.dtype)


def _from_numpy(array: np.ndarray[Any, Any]) -> Tensor:
    """Make a tensor over the array's memory. PyTorch would warn about read-only memory, but nothing here writes."""
    return torch.from_numpy(array if array.flags.writeable else np.asarray(_Writable(array)))


class _Writable:
    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array  # kept alive
        self.__array_interface__ = {**array.__array_interface__, "data": (array.ctypes.data, False)}


def fields(batch: Any) -> dict[str, Any]:
    """Return a batch's parts by name: x, y and sample_weight if the batch is a tuple of them, else the batch."""
    parts = ("x", "y", "sample_weight")
    usual = is_row_of_parts(batch) and 1 <= len(batch) <= len(parts)
    return dict(zip(parts, batch, strict=False)) if usual else {"batch": batch}


def list_tensors(parts: Mapping[str, Any]) -> str:
    """List the tensors of named parts with their dtypes and shapes, for errors.

    Example:
        >>> import torch
        >>> list_tensors({"x": (torch.ones(4, 3), torch.ones(4)), "y": torch.tensor([1, 0])})
        'x[0]: float32 (4, 3), x[1]: float32 (4,), y: int64 (2,)'
    """
    return ", ".join(
        f"{name}: {dtype_name(tensor.dtype)} {tuple(tensor.shape)}" for name, tensor in tensors_of(parts).items()
    )


def tensors_of(parts: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of named parts by their paths, e.g. `"x[0]"`."""
    return {
        name + keystr(path): leaf
        for name, part in parts.items()
        for path, leaf in tree_flatten_with_path(part)[0]
        if isinstance(leaf, Tensor)
    }
