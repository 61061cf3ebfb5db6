"""`Graph`: a compiled step, with the sources of its inputs and the destinations of its outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_unflatten

from ..backend import Sums
from .aliases import Aliases
from .bindings import xla
from .device_state import HeldState, replaced
from .lazy import handles, pending
from .trace_seeds import Place
from .transfer import reach

_COMPUTED = object()  # in a template: a tensor that the graph computes


@dataclass(frozen=True)
class _Input:
    """In a template: an input that the body returned as it was. A graph has no output for it."""

    index: int


@dataclass
class Graph:
    """A compiled graph.

    Attributes:
        hash: Its name in torch_xla's cache.
        sources: The list that each input is in, `"state"`, `"sum"`, `"input"`, `"seed"` or `"constant"`, and its index.
        constants: The inputs that are the same at every call.
        places: The places of the seeds that are inputs, see `TraceSeeds`.
        changed: The state tensors that its first outputs replace.
        summed: The sums that its next outputs replace.
        result: The leaves of the body's result, a mark for a computed tensor or an input, or else the value itself;
            and the nest that they make.
        escaped: The number of tensors that the body left elsewhere than in its result.
        left: The output that each tensor of the result is, and each that was left elsewhere, counted after the sums. A
            body may return the same one twice.
        aliases: The state tensors that share memory afterwards.
        consumed: The state tensors whose old values it writes over.
        facts: The values in the user's Python before it was traced, see `python_state.facts`.
        operations: What it computes, in operations; 0 if nobody has counted.
        proven: True once a second trace has given the same graph.
        differed: The number of traces in a row that gave another graph than the one before.
        sample: The graph of one of its steps alone, if it has several: an audit compares this one.
        escaped_tensors: Those that the body of its last trace has left elsewhere: a replay gives them their new values.
        pick: Picks its inputs out of one list, in C.
    """

    hash: Any
    sources: list[tuple[str, int]]
    constants: list[Tensor]
    places: list[Place]
    changed: list[int]
    summed: list[int]
    result: tuple[list[Any], TreeSpec]
    escaped: int
    left: list[int]
    aliases: Aliases
    consumed: list[int]
    facts: Mapping[str, Any]
    operations: int = 0
    proven: bool = False
    differed: int = 0
    sample: Graph | None = None
    escaped_tensors: list[ref[Tensor]] = field(default_factory=list)
    pick: Callable[[list[Any]], Sequence[Tensor]] = field(init=False)

    def arrange(self, sizes: Mapping[str, int]) -> None:
        """Turn the sources into indices of one list, whose parts have these sizes, in their order."""
        first = {}
        total = 0
        for name, size in sizes.items():
            first[name] = total
            total += size
        at = [first[name] + i for name, i in self.sources]
        self.pick = itemgetter(*at) if len(at) > 1 else lambda pool: [pool[i] for i in at]

    def difference(self, later: Graph) -> str:
        """The difference to the next trace of the same step, in words, or nothing."""
        if self.hash != later.hash:
            return "two traces of it gave different graphs, as its Python depends on something that changes"
        parts = ("sources", "changed", "summed", "escaped", "left", "aliases", "places")
        if any(getattr(self, part) != getattr(later, part) for part in parts):
            return "two traces of it used different tensors"
        for one, other in zip(self.constants, later.constants, strict=True):
            if not torch.equal(_bits(one), _bits(other)):
                changed = f"from {_shown(one)} to {_shown(other)}"
                return f"a number that its Python computes changed between two traces ({changed})"
        return ""

    def run(
        self,
        state: HeldState,
        sums: Sums,
        inputs: list[Tensor],
        start: Callable[[Any, list[Tensor]], list[Tensor]],
        first: bool = False,
    ) -> list[Tensor]:
        """Start the graph, and put its results where they belong.

        Args:
            inputs: Its inputs, in its order.
            start: Starts a graph by its hash with its inputs, see `CorePlacement.starter`.
            first: True if it has never run. **This waits** then, where the state can still be restored: a step that
                needs too much memory usually fails the first time.

        Returns:
            The tensors that the body returned or left elsewhere.
        """
        outputs = state.expect(self.changed, self.consumed, self.aliases)
        # One call in C. No handler of a signal runs between the graph's start and the arrival of its outputs in the
        # list: an interrupt there would lose them after the state that they replace has been consumed.
        outputs.extend(chain([None], map(start, [self.hash], [inputs])))
        # A graph that writes over the old state has consumed it, and no wait could bring it back.
        if first and outputs[1] and not self.consumed:
            try:
                reach(min(outputs[1], key=torch.numel), "capture")
            except RuntimeError:
                del outputs[1]  # before anybody collects them: the state stays as it is
                raise
        state.collect()
        out: list[Tensor] = outputs[1]
        middle = len(self.changed)
        end = middle + len(self.summed)
        sums.tensors = replaced(sums.tensors, self.summed, out[middle:end])
        return [out[end + i] for i in self.left]

    @property
    def superseded(self) -> bool:
        """True if a tensor that its trace left elsewhere is gone: another trace, or the user, has replaced it."""
        return any(tensor() is None for tensor in self.escaped_tensors)

    def returned(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
        """Give the value that the body would have returned, and renew what it would have left elsewhere."""
        for kept, value in zip(self.escaped_tensors, outputs[len(outputs) - self.escaped :], strict=True):
            tensor = kept()
            if tensor is not None:
                tensor.data = value
        tensors = iter(outputs)
        template, spec = self.result
        if not template and spec.type is list:  # nothing, as of most steps
            return []
        leaves = [
            next(tensors) if leaf is _COMPUTED else inputs[leaf.index] if isinstance(leaf, _Input) else leaf
            for leaf in template
        ]
        return tree_unflatten(leaves, spec)


def template_of(leaves: Sequence[Any], memory: Mapping[int, tuple[str, int]]) -> tuple[list[Any], list[Tensor]]:
    """Classify the leaves of a body's result: computed by the graph, an input, or the same at every call.

    Inputs are known by their memory, see `by_memory`.

    Returns:
        The leaves of `Graph.result`, and the tensors that the graph computes, or takes from the state or the sums.
    """
    template: list[Any] = []
    computed: list[Tensor] = []
    for leaf in leaves:
        kind = leaf
        if isinstance(leaf, Tensor) and leaf.device.type == "xla":
            if pending([leaf]):
                kind = _COMPUTED
                computed.append(leaf)
            else:
                name, index = memory.get(handles([leaf])[0], ("", 0))
                if name == "input":
                    kind = _Input(index)
                elif name:  # what the state is now, which it isn't at the next call
                    kind = _COMPUTED
                    computed.append(leaf)
        template.append(kind)
    return template, computed


def recognise(
    values: Sequence[Tensor], memory: Mapping[int, tuple[str, int]], seeds: Mapping[int, Place]
) -> tuple[list[tuple[str, int]], list[Tensor], list[Place]]:
    """Find the source of each input of a graph: known by its memory, a seed by its value, or else a constant.

    Returns:
        The sources, the constants, and the places of the seeds.
    """
    sources: list[tuple[str, int]] = []
    constants: list[Tensor] = []
    places: list[Place] = []
    for value, handle in zip(values, handles(values), strict=True):
        source = memory.get(handle)
        if source is None and value.dtype is torch.int64 and value.dim() == 0:
            place = seeds.get(int(_peek(value)))
            if place is not None:
                source = ("seed", len(places))
                places.append(place)
        if source is None:
            source = ("constant", len(constants))
            constants.append(value)
        sources.append(source)
    return sources, constants, places


def _bits(constant: Tensor) -> Tensor:
    """A constant's memory. Unlike the number, a NaN's bits are equal to themselves."""
    return _peek(constant).reshape(-1).view(torch.uint8)


def _shown(constant: Tensor) -> str:
    return f"{_peek(constant).item():.6g}" if constant.numel() == 1 else f"a tensor of shape {tuple(constant.shape)}"


def _peek(constant: Tensor) -> Tensor:
    """A constant of a graph on the host. It was computed long ago, so this waits for no step."""
    value: Tensor = xla()._xla_get_cpu_tensors([constant])[0]
    return value
