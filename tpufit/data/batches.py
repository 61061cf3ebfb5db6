"""One batch: a nest (tuples, lists, dicts) of host tensors, made of tensors, arrays and numbers."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

from ..errors import BatchError, DataError, counted
from ..utils.text import dtype_name
from .tables import is_foreign, numbers_of

_NUMBERS = "biufc"  # the kinds of NumPy's dtypes of numbers
_PACKED = (
    "{} holds a PackedSequence, whose rows can't be told apart: pass the padded rows and their lengths, ((x, lengths), "
    "y), see torch.nn.utils.rnn.pad_sequence and tpufit.data.PadToBuckets"
)


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
    """The batch with its arrays, tables, numbers and lists of numbers as tensors. All else stays as it is."""
    if is_flat(batch):
        return type(batch)([leaf.float() if leaf.dtype is torch.float64 else leaf for leaf in batch])
    if type(batch) is list:  # (x, y), or a module's arguments
        return [tree_map(_as_tensor, part, is_leaf=is_leaf) for part in batch]
    # No function of the batch's own may enter PyTorch's walk, which keeps it until the garbage collector comes.
    return tree_map(_as_tensor, batch, is_leaf=is_leaf)


def is_leaf(value: Any) -> bool:
    """True for what is one tensor, although PyTorch takes it for a nest: a list of numbers, or of such lists."""
    return (type(value) is list and holds_numbers(value)) or isinstance(value, PackedSequence)


def holds_numbers(values: Any, rows: Any = (list, tuple)) -> bool:
    """True for a list that begins with a number, or with a row of numbers, which is one of these types."""
    while isinstance(values, (list, tuple)) and values:
        values = values[0]
        if isinstance(values, (list, tuple)) and not isinstance(values, rows):
            return False
    if isinstance(values, (np.ndarray, np.generic)):
        return values.ndim == 0 and values.dtype.kind in _NUMBERS
    return isinstance(values, (bool, int, float)) or (isinstance(values, Tensor) and values.dim() == 0)


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
    if isinstance(leaf, PackedSequence):
        raise BatchError(_PACKED.format("a batch"))
    if isinstance(leaf, list):
        return _of_list(leaf)
    if is_foreign(leaf):
        leaf = numbers_of(leaf)
    if isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind in _NUMBERS:
        leaf = _from_numpy(np.ascontiguousarray(leaf)) if isinstance(leaf, np.ndarray) else torch.tensor(leaf)
    elif isinstance(leaf, (bool, int, float)):
        leaf = torch.tensor(leaf)
    if isinstance(leaf, Tensor) and leaf.dtype is torch.float64:
        return leaf.float()  # NumPy's default, and a TPU has no float64
    return leaf


def _of_list(values: list[Any]) -> Any:
    """A tensor of a list of numbers; rows of different lengths stay in lists."""
    try:
        tensor = _array_of(values)
    except ValueError:
        return tree_map(_as_tensor, values)
    return _as_tensor(tensor)


def _array_of(values: list[Any]) -> Any:
    """A list of numbers, or of such lists, as an array or a tensor. `ValueError`: the rows have different lengths."""
    if isinstance(values[0], Tensor):
        return torch.stack(values)
    return np.array(values)


def host_array(leaf: Any, name: str = "an array") -> Any:
    """Make an array, a table or a list of numbers a tensor with rows. It shares the array's memory where it can.

    Raises:
        DataError: It holds no numbers, or has no rows. The error calls it by `name`.
    """
    if leaf is None:
        return None
    if isinstance(leaf, Mapping):
        return tree_map(partial(host_array, name=name), dict(leaf), is_leaf=is_leaf)
    if isinstance(leaf, PackedSequence):
        raise DataError(_PACKED.format(name))
    try:
        if is_foreign(leaf):
            leaf = numbers_of(leaf)
        if isinstance(leaf, list):
            leaf = _array_of(leaf)
        tensor = leaf if isinstance(leaf, Tensor) else _from_numpy(np.array(leaf, copy=None, order="C"))
    except (TypeError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{name} must be an array of numbers, got {_kind(leaf)}") from error
    require_dense([tensor], name)
    if not tensor.dim():
        raise DataError(f"{name} must be an array with rows, got a single number ({leaf!r})")
    return tensor.detach().cpu()


def require_dense(tensors: Iterable[Tensor], name: str = "a batch") -> None:
    """Check that tensors are of the one form that can be split by rows and sent to a device.

    Raises:
        BatchError: One is sparse, nested, quantized or on the device `meta`. The error calls it by `name`.
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
        raise BatchError(f"{name} must be dense tensors, got one that is {kind}: {cure}")


def kind_of(value: Any) -> str:
    """What a value is that is no tensor, for an error.

    Example:
        >>> kind_of(None), kind_of("abc"), kind_of(["a", "b"]), kind_of(object)
        ('None', "text ('abc')", "a list of 2, the first of which is text ('a')", 'a type')
    """
    if value is None:
        return "None"
    if isinstance(value, (str, bytes)):
        return f"text ({value[:20]!r})"
    if isinstance(value, (tuple, list)):
        first = f", the first of which is {kind_of(value[0])}" if value else ""
        return f"a {type(value).__name__} of {len(value)}{first}"
    if isinstance(value, np.ndarray):
        return f"an array of dtype {value.dtype} and shape {value.shape}"
    if isinstance(value, (int, float)):
        return f"the number {value}"
    name = type(value).__name__
    return f"{'an' if name[:1] in 'aeiouAEIOU' else 'a'} {name}"


def _kind(leaf: Any) -> str:
    """What an array holds that isn't numbers, and the cure."""
    array = leaf if isinstance(leaf, np.ndarray) else None
    first = array.flat[0] if array is not None and array.size else leaf
    if isinstance(first, (str, bytes)):
        return f"{kind_of(first)}: give text as numbers, e.g. each word's or each class's"
    if isinstance(leaf, list) or (array is not None and isinstance(first, (list, tuple, np.ndarray, Tensor))):
        return "rows of different lengths: pad them to one, see tpufit.data.PadToBuckets"
    if array is not None and array.dtype.kind == "O":
        return f"{kind_of(leaf)}, whose first item is {first!r:.40}: convert it, e.g. by .astype('float32')"
    return f"{kind_of(leaf)}{': convert it to numbers' if array is not None else ''}"


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
