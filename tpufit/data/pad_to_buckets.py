"""`PadToBuckets`: pads texts or other sequences to a few lengths, so that a few graphs run all batches."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.data import default_collate

from ..errors import ArgumentError, DataError, say_count
from .to_tensors import as_tensors


class PadToBuckets:
    """A `collate_fn` that pads the fields of samples to the smallest of a few lengths that fits the batch.

    A graph is compiled for each batch shape: here at most one per length, and another per length for a shorter last
    batch. Fields of different lengths, such as a sentence and its translation, are padded separately, which multiplies
    the shapes.

    Args:
        lengths: The lengths, in any order, e.g. `[32, 64, 128]`. A field's length is its first dimension.
        padding: The value to pad with (default 0), or a value for each field, as a nest like a sample. Fields with the
            value None, and single numbers, are not padded. Pad targets that the loss should ignore with its
            `ignore_index`, -100 for `"cross_entropy"`.

    Raises:
        ArgumentError: There are no lengths, or a length is below 1.
        DataError: When called: a sample is longer than all lengths.

    Example:
        >>> import torch
        >>> collate = PadToBuckets([4, 8], padding=(0, -100))
        >>> samples = [(torch.tensor([5, 6, 7]), torch.tensor([1, 1, 1])), (torch.tensor([5]), torch.tensor([2]))]
        >>> x, y = collate(samples)
        >>> x.tolist(), y.tolist()
        ([[5, 6, 7, 0], [5, 0, 0, 0]], [[1, 1, 1, -100], [2, -100, -100, -100]])
    """

    def __init__(self, lengths: Sequence[int], padding: Any = 0) -> None:
        self.lengths = sorted(lengths)
        if not self.lengths or self.lengths[0] < 1:
            raise ArgumentError(f"lengths must be one or more whole numbers of at least 1, got {lengths!r}")
        self.padding = padding

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Collate samples, each a nest of tensors, arrays and numbers, into a batch."""
        flat = [tree_flatten(as_tensors(sample)) for sample in samples]
        columns = list(zip(*(leaves for leaves, _ in flat), strict=True))
        values = tree_leaves(self.padding) * (1 if isinstance(self.padding, (tuple, list, dict)) else len(columns))
        if len(values) != len(columns):
            raise ArgumentError(
                f"padding has {say_count(len(values), 'value')}, but a sample has {say_count(len(columns), 'field')}"
            )
        joined = [self._join(column, value) for column, value in zip(columns, values, strict=True)]
        return tree_unflatten(joined, flat[0][1])

    def _join(self, column: Sequence[Any], value: float | None) -> Any:
        if value is None or not all(isinstance(leaf, Tensor) and leaf.dim() for leaf in column):
            return default_collate(list(column))
        longest = max(map(len, column))
        length = next((length for length in self.lengths if length >= longest), None)
        if length is None:
            cure = "cut the sample, or add a longer bucket to PadToBuckets"
            raise DataError(f"a sample has length {longest}, but the longest bucket is {self.lengths[-1]}: {cure}")
        return torch.stack([_pad(leaf, length, value) for leaf in column])


def _pad(tensor: Tensor, length: int, value: float) -> Tensor:
    out = tensor.new_full((length, *tensor.shape[1:]), value)
    out[: len(tensor)] = tensor
    return out
