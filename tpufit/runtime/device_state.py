"""`HeldState`: the tensors that training changes, and their values while graphs are replayed."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..backend import DeviceState, Placement, Sharding
from ..errors import StateLostError
from .lazy import graph_hash, handles, pending, same_memory, wait
from .own_thread import for_this_thread
from .packing import Packing, kept, shown
from .transfer import copy_into, swap_value, to_host


class HeldState(DeviceState):
    """The tensors that training changes: weights, buffers, and the optimizers' state.

    While graphs are replayed, a flat list here holds their values. The user's tensors are then empty, on the meta
    device: a read at the wrong moment is an error in Python, and not the end of the process. `packing` says which of
    them the device keeps with their dimensions in another order.
    """

    def __init__(
        self,
        tensors: Iterable[Tensor],
        shardings: Mapping[int, Sharding] | None = None,
        packing: Packing | None = None,
    ) -> None:
        super().__init__(tensors, shardings)
        self._packing = packing or Packing()
        self._packed: dict[int, tuple[Tensor, int]] = {}  # of the trace under way: the inputs, and what shows them
        self.values: list[Tensor] = []
        self._lost: list[int] = []
        self._under_way: tuple[list[int], bool, list[Any]] | None = None  # the graph being started, see `expect`
        self._empty: list[Tensor] = []
        self._versions: list[int] = []  # of the user's tensors, when their values were written back

    @property
    def lost(self) -> list[int]:
        self.collect()
        return self._lost

    @property
    def axes(self) -> list[int | None]:
        """The dimension of each tensor that is split over the cores, or None."""
        return [self.shardings.get(id(tensor), Sharding.WHOLE).axis for tensor in self.tensors]

    def pin(self, tensors: Iterable[Tensor], placement: Placement) -> None:
        packed = {id(self.tensors[i]) for i in self._packed}  # which `traced` pins as the device keeps them
        for tensor in tensors:
            if id(tensor) not in packed:
                placement.pin(tensor, self.shardings.get(id(tensor), Sharding.WHOLE))

    def hold(self) -> list[Tensor]:
        """Take the values out of the user's tensors. After an interrupt in here, `write_back` restores the order.

        Returns:
            The former contents of the user's tensors. Only a trace needs them, which may still have to compute them.
        """
        # Not empty_like: like the device's own tensors, its results would drag a longer history along at each exchange.
        empty = self._empty or [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in self.tensors]
        self.values = self._stored()
        # The flag before the first exchange: from here on `values` is complete, and the user's tensors may not be.
        self.held = True
        self._empty = []
        return [swap_value(tensor, nothing) for tensor, nothing in zip(self.tensors, empty, strict=True)]

    def _stored(self) -> list[Tensor]:
        """The values as the device keeps them."""
        values = [tensor.detach() for tensor in self.tensors]
        stored = {i: value for i, (value, _) in self._packed.items()} if self._packed else self._pack(values)
        self._packed = {}
        return [stored.get(i, value) for i, value in enumerate(values)]

    def _pack(self, tensors: Sequence[Tensor]) -> dict[int, Tensor]:
        """The values of those tensors that the device keeps in another order, in that order, by their indices."""
        indices = self._packs(tensors)
        return dict(zip(indices, self._packing.packed([tensors[i] for i in indices]), strict=True))

    def _packs(self, tensors: Sequence[Tensor]) -> list[int]:
        """The indices of tensors that the device keeps in another order. One that is split over the cores isn't."""
        return [i for i in self._packing.packs(tensors) if id(self.tensors[i]) not in self.shardings]

    def begin_trace(self) -> list[Tensor]:
        """Let the user's tensors show values in the order in which the device keeps them, and return these.

        They are the inputs of the graph about to be traced, and must have been computed.
        """
        inputs = list(self.tensors)
        for i, value in self._pack(self.tensors).items():
            tensor = self.tensors[i]
            inputs[i] = value
            tensor.data = shown(value)
            self._packed[i] = value, tensor._version
        return inputs

    @contextmanager
    def lent(self) -> Iterator[list[Tensor]]:
        """A context in which the user's tensors show the held values to this thread, for a trace that isn't run.

        It gives the values, the inputs of that trace's graph. Whatever is done to them changes nothing here, and is
        forgotten.
        """
        packs = self._packs(self.tensors)
        shows = same_memory(self.values)
        for i in packs:
            shows[i] = shown(self.values[i])
        with for_this_thread(self.tensors):
            empty = [swap_value(tensor, value) for tensor, value in zip(self.tensors, shows, strict=True)]
            self._packed = {i: (self.values[i], self.tensors[i]._version) for i in packs}
            try:
                yield self.values
            finally:
                self._packed = {}
                for tensor, nothing in zip(self.tensors, empty, strict=True):
                    swap_value(tensor, nothing)

    def traced(self) -> tuple[list[int], list[Tensor]]:
        """The indices of the tensors that the trace has changed, and their new values as the device is to keep them."""
        changed = [i for i in pending(self.tensors) if i not in self._packed or self._differs(i)]
        roots = [self.tensors[i] for i in changed]
        for at, i in enumerate(changed):
            if i in self._packed:
                roots[at] = self._packing.pinned(kept(roots[at]))
        return changed, roots

    def end_trace(self) -> None:
        """Go on with what the user's tensors show, as no graph of the trace will replace it."""
        self._packed = {}

    def _differs(self, i: int) -> bool:
        """True if a packed tensor no longer shows the value that the trace began with."""
        value, version = self._packed[i]
        tensor = self.tensors[i]
        # What `tensor.data` is given leaves no trace in the version, but makes another graph.
        return tensor._version != version or graph_hash(tensor) != graph_hash(shown(value))

    def shown(self, indices: Sequence[int]) -> list[Tensor]:
        """The held values of these indices as the user sees them."""
        packs = set(self._packs(self.tensors)) if self.held else set()
        packed = [i for i in indices if i in packs]
        found = dict(zip(packed, self._packing.unpacked([self.values[i] for i in packed]), strict=True))
        return [found.get(i, self.values[i]) for i in indices]

    def replace(self, tensors: Iterable[Tensor], shardings: Mapping[int, Sharding]) -> None:
        self.tensors = list(tensors)
        self.shardings = dict(shardings)
        self._empty = []

    def write_back(self) -> None:
        if self.lost:
            cure = "Load the last good ones with load_weights; the optimizer then starts over"
            raise StateLostError(f"the weights on the device are lost: a step failed that had consumed them. {cure}")
        if self.held:
            self.restore(self.shown(range(len(self.values))))

    def restore(self, values: Sequence[Tensor]) -> None:
        """Put values, with dimensions in the user's order, into the user's tensors, in place of those that are held."""
        empty = [swap_value(tensor, value) for tensor, value in zip(self.tensors, values, strict=True)]
        self.values = []
        self.held = False
        # After an interrupt some of them were not empty, and can't serve the next `hold`.
        self._empty = empty if all(tensor.is_meta for tensor in empty) else []
        self._versions = [tensor._version for tensor in self.tensors]

    def settle(self, placement: Placement) -> None:
        """Finish the changes that user code has made to the tensors: a graph takes only computed values.

        **This waits** where there are any.
        """
        begun = pending(self.tensors)
        if begun:
            placement.launch("transfer")
        if begun or self._versions != [tensor._version for tensor in self.tensors]:
            wait("changed weights")  # a tensor that is still to be computed has no memory to compare
            self.unalias(placement)

    def unalias(self, placement: Placement) -> None:
        """Give memory of their own to tensors that share some, as a copy on the device does with its original.

        A graph can write over memory once only. All tensors must have been computed.
        """
        found = handles(self.tensors)
        if len(set(found)) < len(found):
            first = dict(zip(reversed(found), reversed(self.tensors), strict=True))
            doubles = [t for t, handle in zip(self.tensors, found, strict=True) if t is not first[handle]]
            copy_into(doubles, to_host(doubles, "changed weights"), placement, self.shardings)

    def expect(self, changed: list[int], donates: bool) -> list[Any]:
        """Note that a graph is about to be started, which replaces some tensors, and may write over the old ones.

        Returns:
            A list for the caller to fill: None as the graph is started, and then the list of its outputs.
        """
        outputs: list[Any] = []
        self._under_way = changed, donates, outputs
        return outputs

    def collect(self) -> None:
        """Take the new values from the graph that was started last, once; if it failed, note the values it consumed."""
        if self._under_way is None:
            return
        changed, donates, outputs = self._under_way
        if len(outputs) == 2:
            values = replaced(self.values, changed, outputs[1][: len(changed)])
            # No call between the two: an interrupt there would take the same outputs once more.
            self.values = values
            self._under_way = None
        else:
            lost = changed if donates and outputs else []
            self._lost = lost
            self._under_way = None

    def mark_lost(self, indices: list[int]) -> None:
        """Note that values are lost, by their indices."""
        self._lost = indices

    def find_lost(self) -> None:
        tensors = self.values if self.held else self.tensors
        known = self.lost
        there = [i for i, tensor in enumerate(tensors) if tensor.device.type == "xla" and i not in known]
        # An error in a step's Python may have left tensors half traced; the device has no part in that.
        traced = {there[i] for i in pending([tensors[i] for i in there])}
        for i in there:
            if i not in traced:
                try:
                    to_host([tensors[i]], "after an error")
                except RuntimeError:
                    self._lost = [*self._lost, i]

    def clear_lost(self) -> None:
        self.collect()
        self._lost = []
        self.write_back()


def replaced(values: list[Tensor], indices: Sequence[int], new: list[Tensor]) -> list[Tensor]:
    """A list with new values at some indices; usually at all of them."""
    if len(new) == len(values):
        return new
    values = list(values)
    for i, value in zip(indices, new, strict=True):
        values[i] = value
    return values
