"""`recognize`: decides once what form the user's data have, as `UserData`. All that follows asks its `form`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

import numpy as np
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from ..errors import ArgumentError, DataError, say_count
from .batches import count_rows, describe_value
from .cache import CachedDataset
from .forms import is_arrays, is_keras_dataset, is_map_style, is_sparse_matrix, to_host_tensors
from .texts import RowsOfTokens
from .to_tensors import to_host_tensor


class Form(Enum):
    """The forms of data. The first three are rows, of which batches of any size can be made."""

    ARRAYS = auto()  # tensors with equally many rows
    CACHED = auto()  # a data set that reads whole batches, or a subset of one
    SAMPLES = auto()  # any other rows that are read by index
    ROW_ITERABLE = auto()  # an `IterableDataset`, which by PyTorch's convention yields rows
    LOADER = auto()  # a `DataLoader`
    BATCHES = auto()  # any other iterable of batches


@dataclass(frozen=True)
class UserData:
    """The user's data and their form."""

    form: Form
    x: Any  # as the user passed them; arrays as a nest of host tensors
    y: Any = None  # targets, only with arrays
    sample_weight: Any = None  # a weight for each row, only with arrays
    name: str = "x"  # in errors
    in_memory: bool = False  # False for memory-mapped files, and all that aren't arrays

    @property
    def has_rows(self) -> bool:
        """True for rows, of which batches of any size can be made."""
        return self.form in (Form.ARRAYS, Form.CACHED, Form.SAMPLES)

    @property
    def has_batches(self) -> bool:
        """True for data that make their own batches."""
        return self.form in (Form.LOADER, Form.BATCHES)

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The batch of all rows of arrays."""
        if isinstance(self.x, TensorDataset):
            return tuple(map(to_host_tensor, self.x.tensors))
        parts = (self.x, self.y, self.sample_weight)
        return parts if self.sample_weight is not None else parts[:1] if self.y is None else parts[:2]

    def split(self, share: float) -> tuple[UserData, UserData]:
        """Split off a share of the rows, the last ones, for validation.

        Raises:
            ArgumentError: The data have no rows that can be counted.
            DataError: A part would be empty.
        """
        if not self.has_rows:
            raise ArgumentError(
                f"validation_split needs arrays or a map-style dataset, got {type(self.x).__name__}; use "
                "validation_data"
            )
        rows = count_rows(tree_leaves(self.arrays)) if self.form is Form.ARRAYS else len(self.x)
        first = int(rows * (1 - share))
        if not 0 < first < rows:
            raise DataError(
                f"validation_split={share} of {say_count(rows, 'row')} leaves none to train on, or none to validate "
                "on: choose another share, or pass validation_data"
            )
        held_out = replace(self._select(first, rows), name="validation_data")
        return self._select(0, first), held_out

    def _select(self, start: int, end: int) -> UserData:
        if self.form is not Form.ARRAYS:
            x = Subset(self.x, range(start, end))
            return replace(self, form=_find_form(x, self.name), x=x)
        if isinstance(self.x, TensorDataset):
            return replace(self, x=TensorDataset(*(part[start:end] for part in self.arrays)))
        parts = (self.x, self.y, self.sample_weight)
        x, y, weight = tree_map(lambda leaf: None if leaf is None else leaf[start:end], parts)
        return replace(self, x=x, y=y, sample_weight=weight)


def recognize(x: Any, y: Any = None, sample_weight: Any = None, name: str = "x") -> UserData:
    """Decide which form data have.

    Args:
        x: Arrays, tensors or tables (or a nest of them), a map-style or iterable `Dataset`, another object with
            `__len__` and `__getitem__`, a list of rows, a `DataLoader`, or any iterable of batches.
        y: Targets, with arrays only.
        sample_weight: One weight per row, with arrays only.
        name: The data's name in errors.

    Raises:
        ArgumentError: Targets or weights are given, although the data yield them.
        DataError: The numbers of rows differ, or the data have no known form.

    Example:
        >>> recognize(np.zeros(3)).form, recognize(iter([])).form
        (<Form.ARRAYS: 1>, <Form.BATCHES: 6>)
    """
    # Collating the single rows of a `TensorDataset` would be slower, with the same result.
    alone = y is None and sample_weight is None
    if alone and isinstance(x, TensorDataset) and type(x).__getitem__ is TensorDataset.__getitem__:
        return UserData(Form.ARRAYS, x, name=name, in_memory=True)
    if is_arrays(x, y):
        in_memory = not any(isinstance(leaf, np.memmap) for leaf in tree_leaves((x, y, sample_weight)))
        x, y, sample_weight = to_host_tensors((x, y, sample_weight), name)
        return UserData(Form.ARRAYS, x, y, sample_weight, name, in_memory)
    if is_keras_dataset(x):
        raise DataError(
            f"{name} is a Keras {type(x).__name__}, whose items are batches: pass a generator of the batches, or a "
            "Dataset or a DataLoader of the rows"
        )
    if is_sparse_matrix(x):
        raise DataError(f"{name} is a sparse matrix ({type(x).__name__}): pass {name}.toarray()")
    if y is not None or sample_weight is not None:
        raise ArgumentError(
            f"y and sample_weight go with arrays; {name} is a {type(x).__name__}, which must yield them itself, "
            "as (x, y) or (x, y, sample_weight)"
        )
    return UserData(_find_form(x, name), x, name=name)


def _find_form(x: Any, name: str) -> Form:
    """Return the form of data that aren't arrays."""
    whole = x.dataset if isinstance(x, Subset) else x
    if isinstance(whole, (CachedDataset, RowsOfTokens)):
        return Form.CACHED
    if is_map_style(x):
        return Form.SAMPLES
    if isinstance(x, DataLoader):
        return Form.LOADER
    if isinstance(x, IterableDataset):
        return Form.ROW_ITERABLE
    if isinstance(x, Iterable) and not isinstance(x, (str, bytes)):
        return Form.BATCHES
    raise DataError(
        f"{name} must be arrays, tensors, a Dataset, a DataLoader or an iterable of batches, got {describe_value(x)}"
    )


def recognize_held_out(data: Any, name: str, train: UserData | None = None) -> UserData:
    """Decide which form data to evaluate on have: a tuple `(x, y)` or `(x, y, sample_weight)`, or anything alone.

    Raises:
        ArgumentError: They are a list of arrays, which would be several inputs without targets, but `train` doesn't
            have several inputs.
        DataError: See `recognize`.
    """
    if isinstance(data, tuple) and 2 <= len(data) <= 3:
        x, y, sample_weight = (*data, None)[:3]
        return recognize(x, y, sample_weight, name)
    as_list = train is not None and isinstance(data, list) and 2 <= len(data) <= 3 and not isinstance(train.x, list)
    if as_list and all(is_arrays(part) for part in data) and not isinstance(data[-1], (tuple, Mapping)):
        parts = "(x, y)" if len(data) == 2 else "(x, y, sample_weight)"
        raise ArgumentError(
            f"{name} is a list of {say_count(len(data), 'array')}, which means {len(data)} inputs without targets: "
            f"pass a tuple, {parts}"
        )
    return recognize(data, name=name)
