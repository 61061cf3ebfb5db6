"""`TraceView`: the state as one trace sees it, and what the trace changes in it.

A trace works on the user's tensors, which must show the values that its graph takes. `showing` makes the view of a
trace whose graph is to run; `HeldState.hold` then takes the values out of the tensors. `lending` makes the view of a
trace that is only compared, while the values are held.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor

from ..backend import Placement, Sharding, Slot
from .aliases import Aliases, find_aliases, find_shared, identify_storage, link
from .device_state import HeldState
from .driver import driver
from .pending_tensors import alias_memory, find_pending, graph_hash, handles, identity, link_now, put_behind_barrier
from .thread_guard import guarding
from .transfer import swap_value
from .weight_packing import reorder_for_device, reorder_for_user


class _Packed(NamedTuple):
    """A packed value, which a tensor of the user shows in the user's order of dimensions."""

    value: Tensor
    # Of the user's tensor, when it began to show the value.
    version: int
    storage: int


class TraceView:
    """The state as one trace sees it.

    Args:
        state: The state, whose tensors show the values already.
        slots_before: The slots at the beginning of the trace.
        inputs: The values, which are the inputs of the graph and must have been computed.
        packed: The packed values among them, by index.
        hidden_values: The values, if the user's tensors show stand-ins for them (default: the tensors have the values).

    Attributes:
        memory: The identity of the memory of each value. The view doesn't keep the inputs, because some are the user's
            tensors, which the trace may replace.
    """

    def __init__(
        self,
        state: HeldState,
        slots_before: Sequence[Slot],
        inputs: Sequence[Tensor],
        packed: Mapping[int, Tensor],
        hidden_values: list[Tensor] | None = None,
    ) -> None:
        self.memory = handles(inputs)
        self._state = state
        self._slots_before = slots_before
        tensors = state.tensors
        self._packed = {i: _Packed(v, tensors[i]._version, identify_storage(tensors[i])) for i, v in packed.items()}
        self._hidden_values = hidden_values
        state.packed = frozenset(packed)

    @contextmanager
    def adopting_replacements(self) -> Iterator[None]:
        """A context for the Python of the step, which may put other tensors into the slots of the state's tensors.

        At its end the state adopts these tensors. If the Python fails, the slots get the former tensors back.
        """
        slots_before = self._slots_before
        self._slots_before = []  # so that afterwards a replaced tensor stays alive only if the user keeps it
        try:
            yield
        except BaseException:
            _put_back(slots_before, self._state.slots())
            raise
        self._adopt(_find_replaced(self._state.tensors, slots_before, self._state.slots()))

    def _adopt(self, replaced: Mapping[int, Tensor]) -> None:
        """Replace tensors of the state, by index."""
        if not replaced:
            return
        state = self._state
        before = state.tensors
        state.tensors = [replaced.get(i, tensor) for i, tensor in enumerate(before)]
        state.shardings = {
            id(after): state.shardings[id(tensor)]
            for tensor, after in zip(before, state.tensors, strict=True)
            if id(tensor) in state.shardings
        }

    def find_changes(self, placement: Placement) -> tuple[list[int], list[Tensor], Aliases]:
        """Find the changes of the tensors in the trace.

        Returns:
            The indices of the changed tensors, their new values in the device's order of dimensions, and the tensors
            that share memory from now on.
        """
        state = self._state
        tensors = state.tensors
        aliases = find_aliases(tensors)
        shares = {i for i, _ in find_shared(aliases)}
        pending = set(find_pending(tensors))
        there = [i for i in range(len(tensors)) if i not in pending]
        now = dict(zip(there, handles([tensors[i] for i in there]), strict=True))
        changed = []
        roots = []
        seen = set[int]()
        for i, tensor in enumerate(tensors):
            packed = self._packed.get(i)
            if i in shares:
                continue
            if now[i] == self.memory[i] if i in now else packed is not None and _still_shows(tensor, packed):
                continue
            root = tensor
            # A graph has no output for a tensor with a value, and a single output for all tensors of one identity.
            if i in now or identity(tensor) in seen:
                (root,) = put_behind_barrier([tensor])
                placement.pin(root, state.shardings.get(id(tensor), Sharding.WHOLE))
            seen.add(identity(root))
            changed.append(i)
            roots.append(root if packed is None else state.packing.pin(_record_order(reorder_for_device, root)))
        return changed, roots, aliases

    def take_values(self) -> list[Tensor]:
        """Return the state's values in the device's order of dimensions, for `HeldState.hold`, and forget them."""
        values = self._hidden_values
        if values is None:
            values = [tensor.detach() for tensor in self._state.tensors]
        values = [self._packed[i].value if i in self._packed else value for i, value in enumerate(values)]
        self.forget()
        return values

    def end(self) -> None:
        """End a trace whose graph won't run: the user's tensors get their values back."""
        state = self._state
        if self._hidden_values is not None:
            for tensor, value in zip(state.tensors, self._hidden_values, strict=True):
                tensor.data = value
            if self._packed or state.may_be_donated:
                link(state.tensors, state.aliases)
                state.state_aliases.link(state.tensors)
        self.forget()

    def forget(self) -> None:
        """Release the values."""
        self._hidden_values = None
        self._packed = {}
        self._state.packed = ()


@contextmanager
def showing(state: HeldState) -> Iterator[TraceView]:
    """A context in which the user's tensors show their values to a trace whose graph is to run.

    It yields the view, which lasts until `HeldState.hold` or `TraceView.end`. After an error `undoing` restores the
    values.
    """
    view = _begin(state)
    try:
        yield view
    except BaseException:
        view.forget()  # else the error's traceback would keep the state's memory
        raise


def _begin(state: HeldState) -> TraceView:
    """Let the user's tensors show the state's values; packed values show in the user's order of dimensions."""
    tensors = state.tensors
    slots_before = state.slots()
    values = list(tensors)
    state.aliases = find_aliases(values)
    driver().note_exposed(values)
    if not driver().is_lazy:
        values = state.separate([tensor.detach() for tensor in tensors])
    packed = state.pack(values)
    inputs = [packed.get(i, value) for i, value in enumerate(values)]
    if driver().is_lazy:
        for i, value in packed.items():
            tensors[i].data = reorder_for_user(value)
        if packed:
            link_now(tensors, state.aliases, "capture")
    else:
        for i, (tensor, stand_in) in enumerate(zip(tensors, driver().lend_values(inputs), strict=True)):
            tensor.data = _record_order(reorder_for_user, stand_in) if i in packed else stand_in
        link(tensors, state.aliases)
    if packed:
        state.state_aliases.link(tensors)
    return TraceView(state, slots_before, inputs, packed, None if driver().is_lazy else values)


@contextmanager
def lending(state: HeldState) -> Iterator[TraceView]:
    """A context in which the user's tensors show the held values to this thread, for a trace that isn't run.

    It yields the view. All changes of the tensors are undone at its end.
    """
    packed = {i: state.values[i] for i in state.find_packable(state.tensors)}
    shows = driver().lend_values(state.values)
    for i, value in packed.items():
        shows[i] = reorder_for_user(value) if driver().is_lazy else _record_order(reorder_for_user, shows[i])
    before = state.tensors
    shardings = state.shardings
    slots_before = state.slots()
    with guarding(before):
        empty = [swap_value(tensor, value) for tensor, value in zip(before, shows, strict=True)]
        del shows  # else these tensors would follow the changes of the trace
        view = None
        try:
            inputs = state.values
            if state.aliases and not driver().is_lazy:
                link(before, state.aliases)
            elif state.aliases:
                views = link_now(before, state.aliases, "audit")
                # Not `view.detach()`, which would follow the changes of the trace.
                shown_by = dict(zip(map(id, views), alias_memory(views), strict=True))
                inputs = [shown_by.get(id(t), value) for t, value in zip(before, inputs, strict=True)]
            state.state_aliases.link(before)
            view = TraceView(state, slots_before, inputs, packed)
            yield view
        finally:
            if view is not None:
                view.forget()
            state.state_aliases.empty()
            state.tensors = before
            state.shardings = shardings
            _put_back(slots_before, state.slots())
            for tensor, nothing in zip(before, empty, strict=True):
                swap_value(tensor, nothing)


def _still_shows(tensor: Tensor, packed: _Packed) -> bool:
    """True if the trace hasn't changed a tensor that shows a packed value."""
    # Setting `tensor.data` doesn't change the version, but changes the graph, and the memory.
    if tensor._version != packed.version:
        return False
    if not driver().is_lazy:
        return identify_storage(tensor) == packed.storage
    return graph_hash(tensor) == graph_hash(reorder_for_user(packed.value))


def _record_order(order: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Record a change of the order of dimensions in the current trace."""
    with driver().body():
        return order(tensor)


def _find_replaced(tensors: Sequence[Tensor], before: Sequence[Slot], now: Sequence[Slot]) -> dict[int, Tensor]:
    """Return the tensors that replace tensors of the state in their slots, by index.

    There are none if the new tensors can't take the places of the former tensors, because they are of other kinds, in
    new slots, or in only some slots of a former tensor.
    """
    if [slot.name for slot in before] != [slot.name for slot in now]:
        return {}  # there is new state, for which this trace's graph isn't valid
    old_tensors = [slot.tensor for slot in before]
    new_tensors = [slot.tensor for slot in now]
    if all(map(operator.is_, old_tensors, new_tensors)):
        return {}
    indices = {id(tensor): i for i, tensor in enumerate(tensors)}
    replaced = dict[int, Tensor]()
    for old, new in zip(old_tensors, new_tensors, strict=True):
        i = indices.get(id(old))
        alike = new.shape == old.shape and new.dtype is old.dtype and new.device == old.device
        if i is None or not alike or replaced.setdefault(i, new) is not new:
            return {}
    if len({id(tensor) for tensor in replaced.values()}) < len(replaced):
        return {}
    return replaced


def _put_back(before: Sequence[Slot], now: Sequence[Slot]) -> None:
    """Put tensors back into their slots, and empty new slots."""
    there = {slot.name: slot.tensor for slot in now}
    known = {slot.name for slot in before}
    for slot in before:
        if there.get(slot.name) is not slot.tensor:
            slot.put(slot.tensor)
    for slot in now:
        if slot.name not in known:
            slot.put(None)
