"""`TracedGraph`: the graph of one trace, which the trace's tensors can still compile and run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.weak import TensorWeakRef

from .aliases import find_aliases, find_shared, link
from .driver import Trace, driver, on_device
from .graph import Graph
from .operation_count import count_operations
from .pending_tensors import compute
from .state_aliases import StateAlias
from .trace_target import Target
from .trace_view import TraceView
from .transfer import swap_value


@dataclass(frozen=True)
class TracedGraph:
    """The graph of one trace, with the trace's tensors at its ends."""

    target: Target
    view: TraceView
    graph: Graph
    values: list[Tensor]  # its inputs
    shown: list[Tensor]  # the batches and rates, as the trace showed them to the body
    roots: list[Tensor]  # its outputs
    computed: list[Tensor]  # returned by the body, and computed by the graph
    escaped: list[Tensor]  # stored elsewhere by the body, e.g. in an attribute
    state_aliases: list[StateAlias]  # tensors stored elsewhere that share memory with the state
    result: Any  # the value that the body has returned

    def compile(self, cause: str) -> None:
        """Compile the graph; `cause` is for the report."""
        target = self.target
        trace = Trace(self.graph, self.roots, self.values, target.state.axes, target.role, cause)
        target.placement.compile(trace)

    def count_operations(self) -> int:
        """Count the operations of the graph, see `count_operations`. It must not have run."""
        return count_operations(driver().text_of(self.roots), self.target.placement.count)

    def start(self, graph: Graph, first: bool) -> StartedGraph:
        """Start the graph, or an equal graph, with the inputs of this trace; `first` if it has never run."""
        target = self.target
        former = target.state.hold(self.view.take_values())
        changed = [*graph.changed, *(i for i, _ in find_shared(graph.aliases))]
        return StartedGraph(
            traced=self,
            graph=graph,
            changed=changed,
            former=[former[i] for i in changed],
            results=graph.run(
                target.state, target.sums, self.values, target.placement, first and target.placement.runs
            ),
        )


@dataclass(frozen=True)
class StartedGraph:
    """A graph that a trace has started, whose results the trace's tensors lack until `fill_tensors`."""

    traced: TracedGraph
    graph: Graph  # the graph of the trace, or an earlier graph that equals it
    changed: list[int]  # the tensors of the state that it replaces
    former: list[Tensor]  # the traced tensors in their places
    results: list[Tensor]  # the values of the tensors that the body has returned or stored elsewhere

    def fill_tensors(self) -> Any:
        """Give the trace's tensors their values, and return the body's result.

        No tensor of the trace stays pending, because it would be computed from memory that is gone.
        """
        traced = self.traced
        state = traced.target.state
        # The state's tensors keep their objects, because the autograd history of other tensors may refer to them. Other
        # tensors lose their own history, which would keep more of the trace alive.
        for tensor, value in zip(self.former, state.unpack_values(self.changed), strict=True):
            tensor.data = value
        escaped = traced.escaped
        together = find_aliases(escaped)  # noted while they share memory, because each gets a separate value below
        unfilled = [*traced.computed, *escaped]
        # A body may return the same tensor twice, which gets its value only once.
        for tensor, value in {id(t): (t, value) for t, value in zip(unfilled, self.results, strict=True)}.values():
            # PyTorch can't swap views without gradients, such as `h[:, 0]` of a prediction.
            if tensor._is_view() and not tensor.requires_grad:
                tensor.data = value
            else:
                swap_value(tensor, value, requires_grad=tensor.requires_grad and tensor.is_leaf)
        compute(link(escaped, together))
        resolve(traced.result, traced.target)
        shown = set(map(id, traced.shown))
        self.graph.escaped_tensors = [TensorWeakRef(t) for t in escaped if id(t) not in shown]
        state.state_aliases.replace(traced.state_aliases)
        state.state_aliases.empty()
        return traced.result


def resolve(result: Any, target: Target) -> None:
    """Replace the stand-ins in a trace's result and sums by the values that they show."""
    leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and on_device(leaf)]
    driver().resolve([*leaves, *target.sums.tensors])
