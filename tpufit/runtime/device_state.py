"""`HeldState`: the tensors that training changes, and their values while graphs are replayed."""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..backend import DeviceState, Placement, Sharding, Slot
from ..backend.device_state import no_slots
from ..errors import StateLostError
from .aliases import Aliases, find_aliases, find_shared, identify_storage, link
from .driver import driver, on_device
from .pending_tensors import compute, find_pending, handles, has_value, link_now, others_are_pending, wait
from .state_aliases import StateAliases
from .transfer import copy_into, group_by_bytes, swap_value, to_host
from .weight_packing import Packing


class HeldState(DeviceState):
    """The tensors that training changes: weights, buffers, and the optimizers' state.

    While graphs are replayed, a flat list here holds their values. The user's tensors are then empty, on the meta
    device, so that a read at the wrong time is a Python error and doesn't abort the process.

    Args:
        tensors: The tensors.
        shardings: The shardings of split tensors, by `id` (default: none is split).
        packing: Which tensors the device keeps with their dimensions in another order (default: none).
        slots: Returns the slots in which the user keeps the tensors, where a step may put other tensors.

    Attributes:
        values: The held values.
        aliases: The tensors that shared memory when the values were taken out of them.
        state_aliases: The user's tensors outside of the state that share memory with it.
        may_be_donated: True if graphs may write over the values.
        packing: Which tensors the device keeps with their dimensions in another order.
        slots: Returns the slots in which the user keeps the tensors.
        packed: The indices of the tensors that show packed values in a trace; `TraceView.find_changes` pins these, in
            the device's order.
    """

    def __init__(
        self,
        tensors: Iterable[Tensor],
        shardings: Mapping[int, Sharding] | None = None,
        packing: Packing | None = None,
        slots: Callable[[], Sequence[Slot]] = no_slots,
    ) -> None:
        super().__init__(tensors, shardings)
        self.packing = packing or Packing()
        self.slots = slots
        self.packed: Collection[int] = ()
        self.values: list[Tensor] = []
        self.aliases: Aliases = ()
        self.state_aliases = StateAliases()
        self.may_be_donated = False
        self._copies = driver().count_copies()  # the count when the values were written back
        self._lost: list[int] = []
        # The graph being started, see `expect`.
        self._started: tuple[list[int], Sequence[int], Aliases, list[Any]] | None = None
        self._empty: list[Tensor] = []
        # The state of the user's tensors when their values were written back.
        self._versions: list[int] = []
        self._storages: list[int] = []

    @property
    def lost(self) -> list[int]:
        self.collect()  # whether the last graph failed is known only now
        return self._lost

    @property
    def axes(self) -> list[int | None]:
        """The dimension along which each tensor is split over the cores, or None."""
        return [self.shardings.get(id(tensor), Sharding.WHOLE).axis for tensor in self.tensors]

    def pin(self, tensors: Iterable[Tensor], placement: Placement) -> None:
        packed = {id(self.tensors[i]) for i in self.packed}
        for tensor in tensors:
            if id(tensor) not in packed:
                placement.pin(tensor, self.shardings.get(id(tensor), Sharding.WHOLE))

    def hold(self, values: list[Tensor] | None = None) -> list[Tensor]:
        """Take the values out of the user's tensors. After an interrupt in this method, `write_back` repairs the state.

        Args:
            values: After a trace, the values that the view has, see `TraceView.take_values` (default: the values of the
                user's tensors).

        Returns:
            The former contents of the user's tensors, for a trace, which may still have to compute them.
        """
        self.aliases = find_aliases(self.tensors)
        # Don't use empty_like: its results, like the device's tensors, would accumulate history at each swap.
        self.state_aliases.empty()
        empty = self._empty or [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in self.tensors]
        self.values = self._read_values() if values is None else values
        # Set before the first swap: from here on `values` is complete, and the user's tensors may not be.
        self.held = True
        self._empty = []
        return [swap_value(tensor, nothing) for tensor, nothing in zip(self.tensors, empty, strict=True)]

    def _read_values(self) -> list[Tensor]:
        """Return the values of the user's tensors in the device's order of dimensions."""
        values = [tensor.detach() for tensor in self.tensors]
        driver().note_exposed(values)
        values = self.separate(values)
        packed = self.pack(values)
        return [packed.get(i, value) for i, value in enumerate(values)]

    def separate(self, values: list[Tensor]) -> list[Tensor]:
        """Return the values of the user's tensors, in separate memory if graphs may write over them.

        A copy on the device shares its original's memory. Only a lazy driver shows which copies do; with it,
        `find_state_aliases` separates them. Here the user's tensors get the new values at once, so that only a part of
        the state is in memory twice.
        """
        if not self.may_be_donated or driver().is_lazy:
            return values
        shared = {i for i, _ in find_shared(self.aliases)}
        parts = list(group_by_bytes(values))
        for part in parts:
            own = [i for i in part if i not in shared]
            for i, value in zip(own, driver().copy_apart([values[i] for i in own]), strict=True):
                swap_value(self.tensors[i], value.detach())
                values[i] = value
            if len(parts) > 1:
                wait("changed weights")  # until the part's old memory is free
        return values

    def pack(self, tensors: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return the packed values of tensors that the device keeps in another order, by index."""
        indices = self.find_packable(tensors)
        return dict(zip(indices, self.packing.pack([tensors[i] for i in indices]), strict=True))

    def find_packable(self, tensors: Sequence[Tensor]) -> list[int]:
        """Return the indices of tensors that the device keeps in another order; split tensors aren't packed."""
        return [i for i in self.packing.find_packable(tensors) if id(self.tensors[i]) not in self.shardings]

    def list_present(self) -> list[Tensor]:
        """Return the state's tensors and all tensors now in its slots, each once."""
        there = {id(tensor): tensor for tensor in self.tensors}
        return list((there | {id(slot.tensor): slot.tensor for slot in self.slots()}).values())

    def unpack_values(self, indices: Sequence[int]) -> list[Tensor]:
        """Return the held values at these indices in the user's order of dimensions."""
        packs = set(self.find_packable(self.tensors)) if self.held else set()
        packed = [i for i in indices if i in packs]
        found = dict(zip(packed, self.packing.unpack([self.values[i] for i in packed]), strict=True))
        return [found.get(i, self.values[i]) for i in indices]

    def replace(self, tensors: Iterable[Tensor], shardings: Mapping[int, Sharding]) -> None:
        self.tensors = list(tensors)
        self.shardings = dict(shardings)
        self.state_aliases.replace([])
        self._empty = []

    def write_back(self) -> None:
        if self.lost:
            cure = "Load the last good weights with load_weights; the optimizer then starts over"
            raise StateLostError(f"the weights on the device are lost: a step that had consumed them failed. {cure}")
        if self.held:
            self.restore(self.unpack_values(range(len(self.values))), self.aliases)

    def restore(self, values: Sequence[Tensor], aliases: Aliases) -> None:
        """Put values, in the user's order of dimensions, into the user's tensors, and drop the held values."""
        empty = [swap_value(tensor, value) for tensor, value in zip(self.tensors, values, strict=True)]
        self.values = []
        self.held = False
        # The next `hold` reuses these empty tensors, unless an interrupt has left values in some of them.
        self._empty = empty if all(tensor.is_meta for tensor in empty) else []
        if aliases:
            compute(link(self.tensors, aliases))
        self.state_aliases.link(self.tensors)
        self._copies = driver().count_copies()
        self._versions = [tensor._version for tensor in self.tensors]
        self._storages = list(map(identify_storage, self.tensors))

    def compute_changes(self, placement: Placement) -> None:
        """Compute the changes that user code has made to the tensors, because a graph takes only computed values.

        **This waits** if there are any.
        """
        pending = find_pending(self.tensors)
        if pending:
            placement.launch("transfer")
        if (
            pending
            or self._versions != [tensor._version for tensor in self.tensors]
            or self._storages != list(map(identify_storage, self.tensors))
        ):
            wait("changed weights")  # pending tensors have no memory to compare
            self.unalias(placement)
        self.find_state_aliases(placement)

    def find_state_aliases(self, placement: Placement) -> None:
        """Find the state aliases again, and give the user's copies of the state separate memory.

        A copy on the device shares its original's memory, which a graph may write over. All tensors of the state must
        have been computed.
        """
        if not self.tensors:
            return
        copied = self.may_be_donated and self._copies != driver().count_copies()
        if self.may_be_donated and others_are_pending(()):
            placement.launch("transfer")  # the user's pending tensors may be computed from these values
            wait("changed weights")
        others = self.state_aliases.search(self.tensors, everywhere=copied)
        if copied:
            stored = set(handles(self.tensors))
            # On torch_xla the user's tensors are functional wrappers. Leave out wrapped tensors, which are found, too,
            # if a kernel in Python has received them.
            others = [t for t in others if torch._is_functional_tensor(t) or not driver().is_lazy]
            others = [t for t in others if has_value(t)]
            doubles = [t for t, handle in zip(others, handles(others), strict=True) if handle in stored]
            copy_into(doubles, to_host(doubles, "changed weights"), placement)

    def unalias(self, placement: Placement) -> None:
        """Give separate memory to tensors that aren't aliases, because a copy on the device shares its original's.

        A graph can write over memory only once. All tensors must have been computed.
        """
        found = handles(self.tensors)
        if len(set(found)) == len(found):
            return
        aliases = find_aliases(self.tensors)
        shares = {alias.index for alias in aliases}
        known = set[Hashable]()
        doubles = []
        for i, handle in enumerate(found):
            if i not in shares and handle in known:
                doubles.append(i)
            known.add(handle)
        if doubles:
            tensors = [self.tensors[i] for i in doubles]
            copy_into(tensors, to_host(tensors, "changed weights"), placement, self.shardings)
            link_now(self.tensors, tuple(alias for alias in aliases if alias.owner in doubles), "changed weights")

    def expect(self, changed: list[int], consumed: Sequence[int], aliases: Aliases) -> list[Any]:
        """Note that a graph is about to be started that replaces some tensors.

        Args:
            changed: The indices of these tensors.
            consumed: The indices of the tensors whose old values the graph writes over.
            aliases: The tensors that share memory afterwards.

        Returns:
            A list to which the caller appends None when the graph is started, and then the list of its outputs.
        """
        outputs: list[Any] = []
        self._started = changed, consumed, aliases, outputs
        return outputs

    def collect(self) -> None:
        """Take the new values from the graph that was started last; if it failed, note the values that it consumed."""
        if self._started is None:
            return
        changed, consumed, aliases, outputs = self._started
        if len(outputs) == 2:
            values = replace_at(self.values, changed, outputs[1][: len(changed)])
            if aliases:
                values = list(values)
                for i, owner in find_shared(aliases):
                    values[i] = values[owner]
            self.aliases = aliases
            # No call between these lines: an interrupt there would take the same outputs again.
            self.values = values
            self._started = None
        else:
            lost = list(consumed) if outputs else []
            self._lost = lost
            self._started = None

    def mark_lost(self, indices: list[int]) -> None:
        """Note that values are lost, by their indices."""
        self._lost = indices

    def find_lost(self) -> None:
        tensors = self.values if self.held else self.tensors
        known = self.lost
        there = [i for i, tensor in enumerate(tensors) if on_device(tensor) and i not in known]
        # After an error in a step's Python, tensors may still be traced, which isn't the device's fault.
        traced = {there[i] for i in find_pending([tensors[i] for i in there])}
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


def replace_at(values: list[Tensor], indices: Sequence[int], new: list[Tensor]) -> list[Tensor]:
    """Replace the values at some indices. If there are as many new values as values, return `new` itself."""
    if len(new) == len(values):
        return new
    values = list(values)
    for i, value in zip(indices, new, strict=True):
        values[i] = value
    return values
