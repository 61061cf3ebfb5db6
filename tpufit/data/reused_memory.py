"""`group_batches`: groups batches that wait for later ones, although the data may overwrite their memory.

A plain loop uses each batch before it reads the next one, so an iterable or a `collate_fn` may fill the same arrays
again and again. A batch that waits must then be copied when it is read. Most data create new memory for each batch, and
a copy would only cost time. So the first group is copied, and the memory of its batches is compared: later batches are
copied only if these overlap.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..errors import BatchError
from .batches import is_flat, view_bits

# The number of values by which changes are noticed where PyTorch doesn't count them, as in a NumPy array.
_SAMPLED = 64


def group_batches(batches: Iterable[Any], get_size: Callable[[], int], may_overwrite: bool) -> Iterator[list[Any]]:
    """Yield groups of `get_size()` batches, each as it was when it was read; the last group has the remaining batches.

    Args:
        batches: Nests of tensors, see `as_tensors`.
        get_size: Called after each batch is read.
        may_overwrite: False if reading a batch never overwrites an earlier one, so that nothing is copied or compared.

    Raises:
        BatchError: The data have overwritten a batch, and it wasn't copied because earlier batches had new memory.

    Example:
        >>> list(group_batches([1, 2, 3], lambda: 2, False))
        [[1, 2], [3]]
    """
    watch = _Watch() if may_overwrite else None
    group: list[Any] = []
    for batch in batches:
        size = get_size()
        group.append(batch if watch is None else watch.hold(batch, len(group) + 1, size))
        if len(group) >= size:
            if watch is not None:
                watch.check()
            yield group
            group = []
    if group:
        if watch is not None:
            watch.check()
        yield group


def copy_batch(batch: Any) -> Any:
    """Copy a nest's tensors and arrays."""
    return tree_map(_copy_leaf, batch)


class _Held(NamedTuple):
    """A batch of the current group, as the data yielded it."""

    tensors: list[Tensor]  # those with values in memory
    versions: list[int]  # PyTorch's counts of their changes, when the batch was read
    copied: bool  # the group has a copy of the batch


class _Sample(NamedTuple):
    """Some values of memory whose changes PyTorch doesn't count, copied when the batch was read."""

    memory: Any  # the flat iterator of an array
    values: bytes


class _Watch:
    """Decides which batches of a pass are copied."""

    def __init__(self) -> None:
        self._reuses = False  # the data have used memory again
        self._checked = 1  # the most batches in a row that were found to have memory of their own
        self._held: list[_Held] = []  # kept alive: memory that was freed may belong to the next batch
        # Of the group's first batch, which waits longest: data that refill a large array overwrite it, too.
        self._samples: list[_Sample] = []

    def hold(self, batch: Any, number: int, size: int) -> Any:
        """Return the batch, or a copy if it must be one. It is the group's `number`-th of `size`."""
        if size == 1:
            return batch
        waits = number < size
        if self._reuses:
            return copy_batch(batch) if waits else batch
        copies = waits and size > self._checked
        tensors = [leaf for leaf in (batch if is_flat(batch) else tree_leaves(batch)) if _has_memory(leaf)]
        if not self._held:
            self._samples = [_take_sample(tensor) for tensor in tensors if _is_foreign(tensor)]
        self._held.append(_Held(tensors, [_read_version(tensor) for tensor in tensors], copies))
        return copy_batch(batch) if copies else batch

    def check(self) -> None:
        """Compare the memory of a complete group."""
        held, self._held = self._held, []
        changed = [one for one in held if [_read_version(tensor) for tensor in one.tensors] != one.versions]
        if any(_sample(memory) != values for memory, values in self._samples):
            changed.append(held[0])
        self._samples = []
        if not all(one.copied for one in changed):
            raise BatchError(
                "the data have overwritten the memory of a batch that waits for later batches: let them yield a copy "
                "of each batch, x.clone() or x.copy()"
            )
        if changed or _overlap(held):
            self._reuses = True
        self._checked = max(self._checked, len(held))


def _overlap(held: list[_Held]) -> bool:
    """True if tensors of two batches begin at the same address."""
    seen: set[int] = set()
    for one in held:
        own = {tensor.data_ptr() for tensor in one.tensors}
        if not seen.isdisjoint(own):
            return True
        seen |= own
    return False


def _has_memory(leaf: Any) -> bool:
    """True for a dense host tensor that isn't empty."""
    if not isinstance(leaf, Tensor) or not leaf.is_cpu:
        return False
    return leaf.layout is torch.strided and not leaf.is_nested and leaf.numel() > 0


def _read_version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _is_foreign(tensor: Tensor) -> bool:
    """True for memory whose changes PyTorch doesn't count, such as a NumPy array's."""
    return tensor.is_inference() or not tensor.untyped_storage().resizable()


def _take_sample(tensor: Tensor) -> _Sample:
    memory = view_bits(tensor.detach().resolve_conj().resolve_neg()).flat
    return _Sample(memory, _sample(memory))


def _sample(memory: Any) -> bytes:
    values: bytes = memory[:: len(memory) // _SAMPLED | 1].tobytes()  # an odd step: not the same column of each row
    return values


def _copy_leaf(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.clone()
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf
