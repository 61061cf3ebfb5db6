"""`HeldState`: the tensors that training changes, and their values while graphs are replayed."""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..backend import DeviceState, Placement, Sharding, Slot
from ..backend.state import no_slots
from ..errors import StateLostError
from .aliases import Aliases, Follower, aliases_of, link, shared, storage_of
from .lazy import behind_barrier, compute, graph_hash, handles, identity, pending, same_memory, wait
from .own_thread import for_this_thread
from .packing import Packing, kept, shown
from .transfer import copy_into, swap_value, to_host


class HeldState(DeviceState):
    """The tensors that training changes: weights, buffers, and the optimizers' state.

    While graphs are replayed, a flat list here holds their values. The user's tensors are then empty, on the meta
    device: a read at the wrong moment is an error in Python, and not the end of the process. `packing` says which of
    them the device keeps with their dimensions in another order, and `slots` where the user has them: a step may put
    other tensors there.

    Attributes:
        values: The held values.
        aliases: The tensors that share memory, as they were when the values were taken out of them.
        followers: Tensors of the user's, elsewhere than in the state, that share memory with some of it.
    """

    def __init__(
        self,
        tensors: Iterable[Tensor],
        shardings: Mapping[int, Sharding] | None = None,
        packing: Packing | None = None,
        slots: Callable[[], Sequence[Slot]] = no_slots,
    ) -> None:
        super().__init__(tensors, shardings)
        self._packing = packing or Packing()
        self._slots = slots
        self._packed: dict[int, tuple[Tensor, int]] = {}  # of the trace under way: the inputs, and what shows them
        self.values: list[Tensor] = []
        self.aliases: Aliases = ()
        self.followers: list[Follower] = []
        self._begun: Sequence[Slot] | None = None  # the slots when the trace under way began
        self._lost: list[int] = []
        # The graph being started, see `expect`.
        self._under_way: tuple[list[int], Sequence[int], Aliases, list[Any]] | None = None
        self._empty: list[Tensor] = []
        # Of the user's tensors, when their values were written back.
        self._versions: list[int] = []
        self._storages: list[int] = []

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
        self.aliases = aliases_of(self.tensors)
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
        self.aliases = aliases_of(inputs)
        self._begun = self._slots()
        for i, value in self._pack(self.tensors).items():
            tensor = self.tensors[i]
            inputs[i] = value
            tensor.data = shown(value)
            self._packed[i] = value, tensor._version
        if self._packed:
            _link_now(self.tensors, self.aliases, "capture")
        return inputs

    def follow(self) -> None:
        """Go on with the tensors that the trace has put into the slots of the state's, if it has replaced some."""
        begun = self._begun
        self._begun = None
        if begun is None:
            return
        now = self._slots()
        if [slot.name for slot in begun] != [slot.name for slot in now]:
            return  # there is new state: the graph of this trace is not for it
        before = [slot.tensor for slot in begun]
        after = [slot.tensor for slot in now]
        if all(map(operator.is_, before, after)):
            return
        indices = {id(tensor): i for i, tensor in enumerate(self.tensors)}
        tensors = dict[int, Tensor]()
        for old, new in zip(before, after, strict=True):
            i = indices.get(id(old))
            alike = new.shape == old.shape and new.dtype is old.dtype and new.device == old.device
            if i is None or not alike or tensors.setdefault(i, new) is not new:
                return
        if len({id(tensor) for tensor in tensors.values()}) < len(tensors):
            return
        shardings = {
            id(tensors.get(i, tensor)): self.shardings[id(tensor)]
            for i, tensor in enumerate(self.tensors)
            if id(tensor) in self.shardings
        }
        self.tensors = [tensors.get(i, tensor) for i, tensor in enumerate(self.tensors)]
        self.shardings = shardings

    def present(self) -> list[Tensor]:
        """The tensors, and those that a step has put into new slots."""
        there = {id(tensor): tensor for tensor in self.tensors}
        return list((there | {id(slot.tensor): slot.tensor for slot in self._slots()}).values())

    def unfollow(self) -> None:
        """Put the tensors that a trace began with back into their slots, if it has failed in its middle."""
        if self._begun is not None:
            _put_back(self._begun, self._slots())
        self._begun = None

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
        before = self.tensors
        shardings = self.shardings
        begun = self._slots()
        with for_this_thread(before):
            empty = [swap_value(tensor, value) for tensor, value in zip(before, shows, strict=True)]
            del shows  # they would follow the changes of the trace
            stored = self.values
            if self.aliases:
                views = _link_now(before, self.aliases, "audit")
                # Not `view.detach()`, which would follow the changes of the trace too.
                shown_by = dict(zip(map(id, views), same_memory(views), strict=True))
                stored = [shown_by.get(id(t), value) for t, value in zip(before, stored, strict=True)]
            self._packed = {i: (self.values[i], before[i]._version) for i in packs}
            self._begun = begun
            try:
                yield stored
            finally:
                self._packed = {}
                self._begun = None
                self.tensors = before
                self.shardings = shardings
                _put_back(begun, self._slots())
                for tensor, nothing in zip(before, empty, strict=True):
                    swap_value(tensor, nothing)

    def traced(self, before: Sequence[int], placement: Placement) -> tuple[list[int], list[Tensor], Aliases]:
        """Find out what the trace has made of the tensors.

        Args:
            before: The identity of the memory of each value that the trace began with.
            placement: The cores.

        Returns:
            The indices of the tensors that it has changed, their new values as the device is to keep them, and the
            tensors that share memory from now on.
        """
        aliases = aliases_of(self.tensors)
        shares = {i for i, _ in shared(aliases)}
        waiting = set(pending(self.tensors))
        there = [i for i in range(len(self.tensors)) if i not in waiting]
        memory = dict(zip(there, handles([self.tensors[i] for i in there]), strict=True))
        changed = []
        roots = []
        seen = set[int]()
        for i, tensor in enumerate(self.tensors):
            if i in shares or (memory[i] == before[i] if i in memory else i in self._packed and not self._differs(i)):
                continue
            root = tensor
            # A graph has no output for a tensor with a value, and one for all tensors of one identity.
            if i in memory or identity(tensor) in seen:
                (root,) = behind_barrier([tensor])
                placement.pin(root, self.shardings.get(id(tensor), Sharding.WHOLE))
            seen.add(identity(root))
            changed.append(i)
            roots.append(self._packing.pinned(kept(root)) if i in self._packed else root)
        return changed, roots, aliases

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
            self.restore(self.shown(range(len(self.values))), self.aliases)

    def restore(self, values: Sequence[Tensor], aliases: Aliases) -> None:
        """Put values, with dimensions in the user's order, into the user's tensors, in place of those that are held."""
        empty = [swap_value(tensor, value) for tensor, value in zip(self.tensors, values, strict=True)]
        self.values = []
        self.held = False
        # After an interrupt some of them were not empty, and can't serve the next `hold`.
        self._empty = empty if all(tensor.is_meta for tensor in empty) else []
        if aliases:
            compute(link(self.tensors, aliases))
        for follower in self.followers:
            follower.link(self.tensors)
        self._versions = [tensor._version for tensor in self.tensors]
        self._storages = list(map(storage_of, self.tensors))

    def settle(self, placement: Placement) -> None:
        """Finish the changes that user code has made to the tensors: a graph takes only computed values.

        **This waits** where there are any.
        """
        begun = pending(self.tensors)
        if begun:
            placement.launch("transfer")
        if (
            begun
            or self._versions != [tensor._version for tensor in self.tensors]
            or self._storages != list(map(storage_of, self.tensors))
        ):
            wait("changed weights")  # a tensor that is still to be computed has no memory to compare
            self.unalias(placement)

    def unalias(self, placement: Placement) -> None:
        """Give memory of their own to tensors that are no aliases, as a copy on the device shares its original's.

        A graph can write over memory once only. All tensors must have been computed.
        """
        found = handles(self.tensors)
        if len(set(found)) == len(found):
            return
        aliases = aliases_of(self.tensors)
        shares = {alias.index for alias in aliases}
        known = set[int]()
        doubles = []
        for i, handle in enumerate(found):
            if i not in shares and handle in known:
                doubles.append(i)
            known.add(handle)
        if doubles:
            tensors = [self.tensors[i] for i in doubles]
            copy_into(tensors, to_host(tensors, "changed weights"), placement, self.shardings)
            _link_now(self.tensors, tuple(alias for alias in aliases if alias.owner in doubles), "changed weights")

    def expect(self, changed: list[int], consumed: Sequence[int], aliases: Aliases) -> list[Any]:
        """Note that a graph is about to be started, which replaces some tensors.

        Args:
            changed: Their indices.
            consumed: The indices of the tensors whose old values it writes over.
            aliases: The tensors that share memory afterwards.

        Returns:
            A list for the caller to fill: None as the graph is started, and then the list of its outputs.
        """
        outputs: list[Any] = []
        self._under_way = changed, consumed, aliases, outputs
        return outputs

    def collect(self) -> None:
        """Take the new values from the graph that was started last, once; if it failed, note the values it consumed."""
        if self._under_way is None:
            return
        changed, consumed, aliases, outputs = self._under_way
        if len(outputs) == 2:
            values = replaced(self.values, changed, outputs[1][: len(changed)])
            if aliases:
                values = list(values)
                for i, owner in shared(aliases):
                    values[i] = values[owner]
            self.aliases = aliases
            # No call between the two: an interrupt there would take the same outputs once more.
            self.values = values
            self._under_way = None
        else:
            lost = list(consumed) if outputs else []
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


def _link_now(tensors: Sequence[Tensor], aliases: Aliases, reason: str) -> list[Tensor]:
    """Let tensors share memory as noted, and return the views. **This waits** for them: a trace looks at their memory.

    On several cores, to ask for memory that is still to be ends the process.
    """
    views = link(tensors, aliases)
    if views:
        compute(views)
        wait(reason)
    return views


def _put_back(before: Sequence[Slot], now: Sequence[Slot]) -> None:
    """Put tensors back into their slots, and take new ones out."""
    there = {slot.name: slot.tensor for slot in now}
    known = {slot.name for slot in before}
    for slot in before:
        if there.get(slot.name) is not slot.tensor:
            slot.put(slot.tensor)
    for slot in now:
        if slot.name not in known:
            slot.put(None)


def replaced(values: list[Tensor], indices: Sequence[int], new: list[Tensor]) -> list[Tensor]:
    """A list with new values at some indices; usually at all of them."""
    if len(new) == len(values):
        return new
    values = list(values)
    for i, value in zip(indices, new, strict=True):
        values[i] = value
    return values
