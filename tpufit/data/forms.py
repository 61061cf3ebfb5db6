"""Tests for the form of data: arrays, a map-style data set, batches, or single rows passed as batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten, tree_leaves, tree_map_with_path
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ..errors import DataError, join_few, say_count
from ..utils.random import RNGState
from .batches import has_parts, list_tensors, name_parts
from .to_tensors import as_tensors, holds_numbers, is_leaf, to_host_tensor

# The keys of the targets in a data set's dicts.
_TARGETS = ("labels", "label", "targets", "target", "y")


def is_arrays(x: Any, y: Any = None) -> bool:
    """True for arrays, tables, lists of numbers and nests of them; False for an object that yields rows or batches."""
    if isinstance(x, (Tensor, Mapping, tuple)) or hasattr(type(x), "__array__"):
        return True
    if not isinstance(x, list):
        return False
    return y is not None or holds_numbers(x, row_types=list) or (bool(x) and all(_is_array(item) for item in x))


def is_map_style(data: Any) -> bool:
    """True for data whose rows are read by index, as PyTorch's `DataLoader` reads them.

    That is a `Dataset`, another object with `__len__` and `__getitem__`, or a list of rows, but not a sequence of
    batches.
    """
    if isinstance(data, Dataset):
        return not isinstance(data, IterableDataset)
    if isinstance(data, Sequence):
        return isinstance(data, list) and bool(data) and not is_arrays(data) and is_sample(data[0])
    kind = type(data)
    if isinstance(data, DataLoader) or is_arrays(data) or is_sparse_matrix(data) or is_keras_dataset(data):
        return False
    if not hasattr(kind, "__getitem__") or not hasattr(kind, "__len__"):
        return False
    # An object that is also iterable, such as another library's loader, may hold batches.
    return hasattr(kind, "__getitems__") or not hasattr(kind, "__iter__") or _holds_rows(data)


def is_sparse_matrix(data: Any) -> bool:
    """True for a scipy.sparse matrix."""
    return hasattr(type(data), "toarray") and hasattr(data, "nnz")


def is_keras_dataset(data: Any) -> bool:
    """True for Keras's `PyDataset` (formerly `Sequence`), whose items are batches."""
    return any(
        kind.__name__ in ("PyDataset", "Sequence") and kind.__module__.split(".")[0] in ("keras", "tensorflow")
        for kind in type(data).__mro__
    )


def to_host_tensors(parts: tuple[Any, ...], name: str) -> Any:
    """Convert `(x,)`, `(x, y)` or `(x, y, sample_weight)` to a nest of host tensors with equally many rows.

    Raises:
        DataError: A part, named in the error, has no numbers, no rows, or not as many rows as the others.
    """
    names = (name, "y", "sample_weight")

    def one(path: Any, leaf: Any) -> Any:
        return to_host_tensor(leaf, names[path[0].idx] + keystr(path[1:]))

    nest = tree_map_with_path(one, parts, is_leaf=is_leaf)
    shapes = [tuple(leaf.shape) for leaf in tree_leaves(nest) if leaf is not None]
    if not shapes:
        raise DataError(f"{name} contains no array, so it has no rows")
    lengths = [shape[0] for shape in shapes]
    if len(set(lengths)) > 1:
        got = f"[{join_few([*map(str, lengths)])}]; their shapes are [{join_few([*map(str, shapes)])}]"
        raise DataError(
            f"{name}, y and sample_weight must have equally many rows, got {got}{_advise_stacking(parts, names)}"
        )
    return nest


def is_sample(item: Any) -> bool:
    """True for a single row of data, such as `(image, 3)`, instead of a batch of rows.

    Decided by shapes: targets without dimensions, only single numbers, or a vector whose target has another length.
    """
    item = as_tensors(item)
    parts = name_parts(item)
    x: Any = parts.get("x", item)
    y: Any = parts.get("y")
    if y is None and isinstance(x, Mapping):
        y = [x[key] for key in _TARGETS if key in x]
    targets = _tensors(y)
    leaves = _tensors(item)
    if leaves and not any(leaf.dim() for leaf in leaves):
        return True
    if targets and not any(target.dim() for target in targets):
        unstacked = has_parts(x) and has_parts(y) and len(x) == len(y) > 1
        return not unstacked
    if isinstance(x, Mapping) and isinstance(x.get("input_ids"), Tensor):
        return bool(x["input_ids"].dim() == 1)
    vectors = isinstance(x, Tensor) and isinstance(y, Tensor) and x.is_floating_point() and x.dim() == y.dim() == 1
    return vectors and len(x) != len(y)


def require_batch(item: Any, data: Any, name: str) -> None:
    """Check that an iterable's first item is a batch.

    Raises:
        DataError: It is a single row.
    """
    if not is_sample(item):
        return
    item = as_tensors(item)
    shapes = list_tensors(name_parts(item) if has_parts(item) else {"x": item})
    if isinstance(data, DataLoader):
        cure = "The DataLoader has batch_size=None: give it a batch_size"
    else:
        cure = "Pass list(rows) or a Dataset, which fit batches, or yield batches, e.g. x of shape (rows, ...)"
    raise DataError(f"{name} yields single rows, not batches: the first has {shapes}. {cure}")


def _is_array(item: Any) -> bool:
    return isinstance(item, (Tensor, np.ndarray))


def _holds_rows(data: Any) -> bool:
    """True if the first item of data is a row. Restores the random state after reading it."""
    before = RNGState.now()
    try:
        return len(data) > 0 and is_sample(data[0])
    except (TypeError, LookupError, ValueError):  # there is no item 0
        return False
    finally:
        before.restore()


def _tensors(nest: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(nest)[0] if isinstance(leaf, Tensor)]


def _advise_stacking(parts: Iterable[Any], names: Sequence[str]) -> str:
    """Return a hint if a part is a list of rows, which counts as a list of inputs."""
    for name, part in zip(names, parts, strict=False):
        if isinstance(part, list) and all(_is_array(item) for item in part):
            make = "torch" if isinstance(part[0], Tensor) else "np"
            return (
                f". {name} is a list of {say_count(len(part), 'array')}, which count as separate inputs: if each is a "
                f"row, pass {make}.stack({name})"
            )
    return ""
