"""`CoreTensors`: the tensors that all cores have, with the numbers by which messages name them.

A program of several cores takes and returns dozens of tensors at each step, so this file notes tensors in batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ...runtime.aliases import identify_storage
from .tensor_identity import place_of

_EXTRA_BATCHES = 2  # batches that `forget_freed` checks in addition to one for each new batch


class CorePart(NamedTuple):
    """What programs take in place of a tensor: this core's part, or a copy that all processes have received."""

    tensors: Sequence[Tensor]
    position: int = 0  # among the tensors


@dataclass(eq=False)
class _Batch:
    """Tensors that were noted together. Each attribute has an item for each tensor."""

    numbers: Sequence[int]
    places: Sequence[Hashable]  # in their storages
    versions: Sequence[int]  # PyTorch's counts of changes
    axes: Sequence[int | None]  # the dimensions that are split over the cores
    parts: list[CorePart | None] | None  # None: programs take the tensors themselves
    storages: Sequence[int]
    # References to the storages: no other storage gets the address while one exists. None: the tensor was freed.
    memory: list[StorageWeakRef | None]


class TensorRecord(NamedTuple):
    """A tensor that all cores have: an item of a batch."""

    batch: _Batch
    i: int

    @property
    def number(self) -> int:
        """The tensor's number."""
        return self.batch.numbers[self.i]

    @property
    def axis(self) -> int | None:
        """The dimension that is split over the cores; None: each core has the whole tensor."""
        return self.batch.axes[self.i]

    def stand_in(self, tensor: Tensor) -> Tensor:
        """Return what programs take in place of the tensor, or the tensor itself."""
        part = self.batch.parts and self.batch.parts[self.i]
        return part.tensors[part.position] if part else tensor


class CoreTensors:
    """The tensors that all cores have.

    Attributes:
        forgotten: The numbers of tensors that this process has freed or replaced, which the other cores still have.
    """

    def __init__(self) -> None:
        self.forgotten: list[int] = []
        self._known: dict[int, list[TensorRecord]] = {}  # by storage
        self._batches: deque[_Batch] = deque()
        self._new_batches = 0  # since the last `forget_freed`

    def note(
        self,
        tensors: Sequence[Tensor],
        numbers: Sequence[int],
        axes: Sequence[int | None] | None = None,
        parts: list[CorePart | None] | None = None,
        places: Sequence[Hashable] | None = None,
    ) -> None:
        """Note tensors that all cores have under these numbers.

        Args:
            tensors: The tensors.
            numbers: A number for each tensor.
            axes: The dimensions along which the tensors are split over the cores (default: all are whole).
            parts: What programs take in place of each tensor (default: the tensor itself).
            places: The result of `place_of` for each tensor, if it is already known.
        """
        batch = _Batch(
            numbers,
            places or list(map(place_of, tensors)),
            [tensor._version for tensor in tensors],
            axes or [None] * len(tensors),
            parts,
            list(map(identify_storage, tensors)),
            [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors],
        )
        # Before the storages are looked up: an interrupt in between must not leave a storage that has no reference.
        self._batches.append(batch)
        self._new_batches += 1
        for i, storage in enumerate(batch.storages):
            known = self._known.get(storage)
            if known is None:
                self._known[storage] = [TensorRecord(batch, i)]
            else:
                self._replace(known, TensorRecord(batch, i))

    def _replace(self, known: list[TensorRecord], new: TensorRecord) -> None:
        """Note another tensor of a known storage, in place of an earlier tensor of the same place."""
        place = new.batch.places[new.i]
        old = [one for one in known if one.batch.places[one.i] == place]
        known[:] = [*(one for one in known if one not in old), new]
        self._forget(old)

    def find(self, tensor: Tensor) -> TensorRecord | None:
        """Return the record of a tensor; None if the other cores lack it, or the user has changed it."""
        known = self._known.get(identify_storage(tensor))
        if known is not None:
            place = place_of(tensor)
            for one in known:
                batch, i = one
                if batch.places[i] == place:
                    current = batch.axes[i] is not None or batch.versions[i] == tensor._version
                    return one if current else None
        return None

    def drop(self, tensor: Tensor) -> None:
        """Forget a tensor, and those with which it shares memory."""
        self._forget(self._known.pop(identify_storage(tensor), ()))

    def forget_freed(self) -> None:
        """Forget tensors that this process has freed. Each call checks some of the batches, the oldest first."""
        checked = min(self._new_batches + _EXTRA_BATCHES, len(self._batches))
        self._new_batches = 0
        for _ in range(checked):
            batch = self._batches.popleft()
            memory = batch.memory
            freed = [i for i, reference in enumerate(memory) if reference is not None and reference.expired()]
            for i in freed:
                known = self._known.get(batch.storages[i], [])
                known[:] = [one for one in known if one.batch is not batch or one.i != i]
                if not known:
                    self._known.pop(batch.storages[i], None)
            self._forget([TensorRecord(batch, i) for i in freed])
            for i in freed:  # last, because from now on other storages can get the addresses
                memory[i] = None
            if any(reference is not None for reference in memory):
                self._batches.append(batch)

    def _forget(self, known: Sequence[TensorRecord]) -> None:
        for batch, i in known:
            self.forgotten.append(batch.numbers[i])
            if batch.parts is not None:
                batch.parts[i] = None  # frees the part
