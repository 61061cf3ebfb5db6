"""`Graph`: a compiled step, with the sources of its inputs and the destinations of its outputs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_unflatten
from torch.utils.weak import TensorWeakRef

from ..backend import Sums
from .aliases import Aliases
from .device_state import HeldState, replace_at
from .driver import driver, on_device
from .pending_tensors import find_pending, handles
from .placement import CorePlacement
from .trace_seeds import Place, TraceSeeds
from .transfer import wait_for

_COMPUTED = object()  # in a template: a tensor that the graph computes


@dataclass(frozen=True)
class _Input:
    """In a template: an input that the body returned unchanged. A graph has no output for it."""

    index: int


@dataclass
class Graph:
    """A compiled graph.

    Attributes:
        hash: The result of `Driver.hash_of`; None if only its outline is known.
        outline: The result of `Driver.outline_of`.
        sources: The list that each input is in, `"state"`, `"sum"`, `"input"`, `"seed"` or `"constant"`, and its index.
        constants: The inputs that are equal at every call.
        names: The names of tensors in the user's Python when it was traced, by the identity of their memory.
        places: The places of the seeds that are inputs, see `TraceSeeds`.
        changed: The state tensors that its first outputs replace.
        summed: The sums that its next outputs replace.
        result: The leaves of the body's result (a mark for a computed tensor or an input, else the value itself) and
            their nest.
        escaped: The number of tensors that the body stored outside of its result.
        output_indices: The output for each tensor of the result and for each tensor stored elsewhere, counted after the
            sums. A body may return the same tensor twice.
        aliases: The state tensors that share memory afterwards.
        consumed: The state tensors whose old values the graph writes over.
        facts: The values in the user's Python before it was traced, see `python_state.list_values`.
        operations: The number of operations that it computes; 0 if unknown.
        proven: True once a second trace has given the same graph.
        differed: The number of consecutive traces whose graph differed from the previous one.
        sample: The graph of one of its steps, if it has several; audits compare this graph.
        escaped_tensors: The tensors that the body of the last trace has stored elsewhere, without changed inputs; a
            replay gives them new values.
        pick: Picks its inputs from one list, in C.
    """

    hash: Any
    outline: Hashable
    sources: list[tuple[str, int]]
    constants: list[Tensor]
    places: list[Place]
    changed: list[int]
    summed: list[int]
    result: tuple[list[Any], TreeSpec]
    escaped: int
    output_indices: list[int]
    aliases: Aliases
    consumed: list[int]
    facts: Mapping[str, Any]
    names: Mapping[Hashable, str]
    operations: int = 0
    proven: bool = False
    differed: int = 0
    sample: Graph | None = None
    escaped_tensors: list[TensorWeakRef] = field(default_factory=list)
    pick: Callable[[list[Any]], Sequence[Tensor]] = field(init=False)

    def arrange(self, sizes: Mapping[str, int]) -> None:
        """Set `pick`: the inputs' indices in one list that joins lists of these sizes, in their order."""
        first = {}
        total = 0
        for name, size in sizes.items():
            first[name] = total
            total += size
        at = [first[name] + i for name, i in self.sources]
        self.pick = itemgetter(*at) if len(at) > 1 else lambda pool: [pool[i] for i in at]

    def find_difference(self, later: Graph) -> str:
        """Describe the difference from the next trace of the same step, or return ""."""
        if self.outline != later.outline or (later.hash is not None and self.hash != later.hash):
            return "two traces of it gave different graphs, as its Python depends on something that changes"
        parts = ("sources", "changed", "summed", "escaped", "output_indices", "aliases", "places")
        if any(getattr(self, part) != getattr(later, part) for part in parts):
            return "two traces of it used different tensors"
        for before, after in zip(self.constants, later.constants, strict=True):
            if not torch.equal(_bits(before), _bits(after)):
                name = self.names.get(handles([before])[0])
                if name is not None and name == later.names.get(handles([after])[0]):
                    return f"{name}, a tensor that isn't a buffer, changed between two traces"
                changed = f"from {_describe(before)} to {_describe(after)}"
                return f"a number that its Python computes changed between two traces ({changed})"
        return ""

    def run(
        self,
        state: HeldState,
        sums: Sums,
        inputs: list[Tensor],
        placement: CorePlacement,
        first: bool = False,
    ) -> list[Tensor]:
        """Start the graph, and store its results in the state and the sums.

        Args:
            state: The state.
            sums: The sums.
            inputs: The graph's inputs, in its order.
            placement: The cores that it was compiled for.
            first: True if it has never run. Then **this waits** as long as the state can be restored, because a step
                that needs too much memory usually fails the first time.

        Returns:
            The tensors that the body returned or stored elsewhere.
        """
        starting = placement.prepare_start(self.hash, inputs)
        outputs = state.expect(self.changed, self.consumed, self.aliases)
        # One call in C, as in `utils/uninterrupted.py`: an interrupt between the start of the graph and the arrival of
        # its outputs in the list would lose them after the state that they replace has been consumed.
        try:
            outputs.extend(chain([None], starting))
        finally:
            placement.note_start(self.hash, outputs[1:])
        # Don't wait if the graph has consumed the old state, which can't be restored then.
        if first and outputs[1] and not self.consumed:
            try:
                wait_for(min(outputs[1], key=torch.numel), "capture")
            except RuntimeError:
                del outputs[1]  # before `collect`, so that the state doesn't change
                raise
        state.collect()
        out: list[Tensor] = outputs[1]
        middle = len(self.changed)
        end = middle + len(self.summed)
        sums.tensors = replace_at(sums.tensors, self.summed, out[middle:end])
        return [out[end + i] for i in self.output_indices]

    @property
    def superseded(self) -> bool:
        """True if a tensor that its trace stored elsewhere is gone: another trace or the user has replaced it."""
        return any(tensor() is None for tensor in self.escaped_tensors)

    def rebuild_result(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
        """Return the value that the body would have returned, and update the tensors that it stored elsewhere."""
        for kept, value in zip(self.escaped_tensors, outputs[len(outputs) - len(self.escaped_tensors) :], strict=True):
            tensor = kept()
            if tensor is not None:
                tensor.data = value
        tensors = iter(outputs)
        template, spec = self.result
        if not template and spec.type is list:  # a shortcut for an empty result, as most steps have
            return []
        leaves = [
            next(tensors) if leaf is _COMPUTED else inputs[leaf.index] if isinstance(leaf, _Input) else leaf
            for leaf in template
        ]
        return tree_unflatten(leaves, spec)


def make_template(leaves: Sequence[Any], memory: Mapping[Hashable, tuple[str, int]]) -> tuple[list[Any], list[Tensor]]:
    """Classify the leaves of a body's result: computed by the graph, an input, or constant.

    Inputs are recognized by their memory, see `index_by_memory`.

    Returns:
        The leaves of `Graph.result`, and the tensors that the graph computes, or takes from the state or the sums.
    """
    template: list[Any] = []
    computed: list[Tensor] = []
    for leaf in leaves:
        kind = leaf
        if isinstance(leaf, Tensor) and on_device(leaf):
            if find_pending([leaf]):
                kind = _COMPUTED
                computed.append(leaf)
            else:
                name, index = memory.get(handles([leaf])[0], ("", 0))
                if name == "input":
                    kind = _Input(index)
                elif name:  # a current value of the state or the sums, which may change before the next call
                    kind = _COMPUTED
                    computed.append(leaf)
        template.append(kind)
    return template, computed


def find_sources(
    values: Sequence[Tensor], memory: Mapping[Hashable, tuple[str, int]], seeds: TraceSeeds
) -> tuple[list[tuple[str, int]], list[Tensor], list[Place]]:
    """Find the source of each input of a graph: the list with its memory, a seed known to the driver, else a constant.

    Returns:
        The sources, the constants, and the places of the seeds.
    """
    sources: list[tuple[str, int]] = []
    constants: list[Tensor] = []
    places: list[Place] = []
    for value, handle in zip(values, handles(values), strict=True):
        source = memory.get(handle)
        if source is None:
            place = seeds.place_of(value, handle)
            if place is not None:
                source = ("seed", len(places))
                places.append(place)
        if source is None:
            source = ("constant", len(constants))
            constants.append(value)
        sources.append(source)
    return sources, constants, places


def _bits(constant: Tensor) -> Tensor:
    """Return a constant's memory as bytes, in which a NaN equals itself."""
    return _read_constant(constant).reshape(-1).view(torch.uint8)


def _describe(constant: Tensor) -> str:
    return (
        f"{_read_constant(constant).item():.6g}"
        if constant.numel() == 1
        else f"a tensor of shape {tuple(constant.shape)}"
    )


def _read_constant(constant: Tensor) -> Tensor:
    """Return a constant of a graph on the host. It was computed long ago, so this waits for no step."""
    return driver().read_one(constant)
