"""`Capture`: one trace of a step, its checks, and its graph. `undoing` undoes a failed trace.

The body of a step runs here over lazy tensors: operations are only recorded. Each object makes the next:

    note_before(...)             -> Before        what must be known before the trace
    Before.trace(body)           -> Capture       runs the body
    Capture.build()              -> TracedGraph   finds the graph's inputs and outputs; `compile` compiles a new graph
    TracedGraph.start(graph)     -> StartedGraph  takes the values out of the user's tensors, and starts the graph
    StartedGraph.fill_tensors()  -> the result    gives the trace's tensors their values

Where the order of statements matters, a comment says why.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves
from torch.utils.weak import TensorWeakRef

from ..backend import Body
from .aliases import find_aliases
from .device_state import HeldState
from .donation import find_donated
from .driver import driver
from .graph import Graph, find_sources, make_template
from .pending_tensors import (
    alias_memory,
    compute,
    drop,
    find_pending,
    find_pending_elsewhere,
    find_young,
    handles,
    has_value,
    identity,
    index_by_memory,
    noting_new,
    others_are_pending,
    put_behind_barrier,
)
from .state_aliases import list_state_aliases
from .thread_guard import unguarding
from .trace_seeds import TraceSeeds
from .trace_target import Target
from .trace_view import TraceView
from .trace_watch import Glance, Watch
from .traced_graph import TracedGraph, resolve

_LISTS = ("state", "sum", "input", "seed", "constant")


@contextmanager
def undoing(state: HeldState) -> Iterator[None]:
    """A context that undoes a step if it can't be traced, compiled or run. The state must have been computed."""
    before = alias_memory(state.tensors)
    aliases = find_aliases(state.tensors)
    try:
        yield
    except BaseException:
        # `drop` detaches pending tensors from the device, so the user's tensors must give up the trace's values first.
        if not state.lost:
            # No graph has consumed these values: revoke their donation, so that a later graph doesn't either.
            driver().revoke_donation(before)
            state.restore(before, aliases)
        elif not state.held:
            state.hold()
        # The error's traceback may keep pending tensors alive, which the next graph would try to compute again.
        drop(find_pending_elsewhere(()))
        before.clear()  # else the traceback would keep the state's memory
        raise


@dataclass(frozen=True)
class Before:
    """What to note before a trace, because a trace replaces the sums and the memory of the state's tensors."""

    target: Target
    view: TraceView  # the state as the trace sees it
    inputs: list[Tensor]  # the batches and rates, as the trace shows them to the body, which may add inputs
    seeds: TraceSeeds
    watch: Watch | Glance  # observes what the body reads and draws
    python_state: Callable[[], dict[str, Any]]  # returns the Python state that the body might change
    # Maps the identity of a value's memory to the list with the value, `"state"`, `"sum"` or `"input"`, and its index.
    memory: dict[Hashable, tuple[str, int]]
    input_count: int  # without the inputs that the body adds
    facts: dict[str, Any]  # the Python state before the trace
    names: Mapping[Hashable, str]  # of the tensors that the user's Python keeps, by the identity of their memory

    def trace(self, body: Body, new: list[Tensor]) -> Capture:
        """Run the body. The living tensors that it has made are added to the list `new`, also if it fails."""
        state = self.target.state
        sums = self.target.sums
        # Strong references, because `torch.utils.swap_tensors` refuses tensors with weak references in the trace.
        former = list(state.tensors)
        young = find_young()
        sums.begin()
        sums.tensors = driver().show_values(sums.tensors)
        with noting_new(new):
            outputs = self.target.trace(body, self.inputs, self.seeds, self.watch, self.view)
        # Release the former tensors of the state, so that a replaced tensor stays alive only if the user keeps it.
        replaced = set(map(id, former)) - set(map(id, state.tensors))
        own = set(map(id, driver().list_own())) - set(map(id, self.inputs))
        left_out = own | replaced
        new[:] = [tensor for tensor in new if id(tensor) not in left_out]
        young = [tensor for tensor in young if id(tensor) not in replaced]
        released = list(map(TensorWeakRef, former))
        former.clear()
        obstacle = self.watch.describe_read() or _describe_leftover(self.target)
        if obstacle and driver().is_lazy:
            self.view.end()
        return Capture(self, outputs, obstacle, new, young, released)

    def compute_stored(self, new: Sequence[Tensor], outputs: Any = None) -> None:
        """For a trace that won't run: compute the tensors of `new` that its body has stored, e.g. in a cache.

        Its outputs aren't stored.
        """
        known = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
        state = self.target.state
        _compute_stored(state, find_pending_elsewhere([*known, *state.tensors, *self.target.sums.tensors], new))


@dataclass
class Capture:
    """One trace of a step, which has ended."""

    before: Before
    outputs: Any  # the value that the body has returned
    obstacle: str  # the reason why no trace of the body can be replayed, or ""
    new: list[Tensor]  # the living tensors that the trace has made
    # Tensors that are older than the trace, but among Python's youngest objects, where `new` was searched.
    young: list[Tensor]
    former: list[TensorWeakRef]  # the state's tensors before the trace
    escaped: list[Tensor] | None = None  # what the body has stored elsewhere, once `build_for_comparison` has searched

    def explain_variation(self) -> str:
        """Return the reason why the next trace may differ, even if the graphs are equal, or "".

        At the first trace the reason may be harmless: a cache is built, a layer takes its first batch's statistics.
        """
        before = self.before.facts
        after = self.before.python_state()
        changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
        if changed:
            return f"its Python changes {changed[0]} (from {before.get(changed[0])!r} to {after.get(changed[0])!r})"
        drew = self.before.watch.drew_at
        return drew and f"its Python draws random numbers at {drew}"

    def find_difference(self, earlier: Graph, thorough: bool) -> str:
        """Compare this trace, which won't run, with a graph or its outline; return the difference, or ""."""
        graph = self.build_for_comparison(thorough)
        if graph is None:
            return "it computes nothing now"
        return self.explain_variation() or self.compare(earlier, graph)

    def compare(self, earlier: Graph, graph: Graph) -> str:
        """Describe the difference of this trace's graph from an earlier graph, or return ""."""
        difference = earlier.find_difference(graph)
        if difference and self.before.watch.drew_unseen:
            return f"{difference}, and NumPy's global generator drew numbers meanwhile, as scipy's functions do"
        return difference

    def build_for_comparison(self, thorough: bool = True) -> Graph | None:
        """Return the graph of a trace that won't run, or its outline, to compare it; None if it is empty."""
        state = set(map(identity, self.before.target.state.tensors))
        former = {id(tensor()) for tensor in self.former}  # the slots will get these tensors back
        # Leave out weights that another thread has just read, e.g. by `state_dict`: the body hasn't stored them.
        new = [t for t in self.new if identity(t) not in state and id(t) not in former]
        # Other pending tensors aren't the body's, either.
        traced = replace(self, new=new, former=[]).build(hashes=thorough, searches=False)
        if traced is None:
            self.escaped = []
            return None
        self.escaped = traced.escaped
        driver().revoke_donation(traced.values)  # no graph has consumed them
        return traced.graph

    def compute_escaped(self) -> None:
        """Compute only what the body of a trace that isn't run has stored elsewhere, as in a cache."""
        if self.escaped is None:
            self.before.compute_stored(self.new, self.outputs)
        else:
            _compute_stored(self.before.target.state, self.escaped)

    def build(self, hashes: bool = True, searches: bool = True) -> TracedGraph | None:
        """Build the graph of the trace, without compiling it. None if there is nothing to run.

        Args:
            hashes: True to include its hash, False for only its outline.
            searches: True to search for tensors that are older than the trace and that the trace has changed.
        """
        before = self.before
        target = before.target
        state = target.state
        sums = target.sums
        memory = self._index_memory()
        leaves, spec = tree_flatten(self.outputs)
        template, computed = make_template(leaves, memory)
        changed, replaced, aliases = before.view.find_changes(target.placement)
        summed = find_pending(sums.tensors)
        own = [*replaced, *(sums.tensors[i] for i in summed)]
        # A tensor that the body stored elsewhere becomes an output too. If it stayed pending, it would be computed from
        # memory that the graph has written over.
        escaped = self._find_stored_elsewhere([*own, *computed, *state.tensors], searches)
        state_aliases = list_state_aliases(state.tensors, escaped) if escaped else []
        aliasing = {id(state_alias.tensor()) for state_alias in state_aliases}
        escaped = [t for t in escaped if id(t) not in aliasing]
        others, output_indices = _find_outputs(own, [*computed, *escaped])
        roots = [*own, *others]
        if not roots:
            before.view.end()
            resolve(self.outputs, target)
            return None
        values = driver().inputs_of(roots)
        sources, constants, places = find_sources(values, memory, before.seeds)
        if not driver().is_lazy:
            # The trace lists its inputs in any order; a graph takes them in the order of the lists.
            order = sorted(range(len(sources)), key=lambda i: (_LISTS.index(sources[i][0]), sources[i][1]))
            values = [values[i] for i in order]
            sources = [sources[i] for i in order]
        donated: list[int] = []
        consumed: list[int] = []
        if target.donates:
            donated, consumed = find_donated(sources, before.view.memory, changed, aliases)
        outline = driver().outline_of(roots, values, donated)
        graph = Graph(
            hash=driver().hash_of(roots, values, donated) if hashes or outline is None else None,
            outline=outline,
            sources=sources,
            constants=constants,
            places=places,
            changed=changed,
            summed=summed,
            result=(template, spec),
            escaped=len(escaped),
            output_indices=output_indices,
            aliases=aliases,
            consumed=consumed,
            facts=before.facts,
            names=before.names,
        )
        sizes = {"state": len(state.tensors), "sum": len(sums.before), "input": len(before.inputs), "seed": len(places)}
        graph.arrange(sizes | {"constant": len(constants)})
        return TracedGraph(
            target=target,
            view=before.view,
            graph=graph,
            values=values,
            shown=before.inputs,
            roots=roots,
            computed=computed,
            escaped=escaped,
            state_aliases=state_aliases,
            result=self.outputs,
        )

    def _index_memory(self) -> dict[Hashable, tuple[str, int]]:
        """Return the list and the index of each input that the graph may take, by the identity of its memory."""
        # Sums that the step has created are known only now. Entries from before the trace take precedence over them.
        before = self.before
        added = index_by_memory({"input": before.inputs[before.input_count :]})
        memory = index_by_memory({"sum": before.target.sums.before}) | before.memory
        return memory | {handle: (name, before.input_count + i) for handle, (name, i) in added.items()}

    def _find_stored_elsewhere(self, known: Sequence[Tensor], searches: bool) -> list[Tensor]:
        """Return the tensors that the body has stored outside of its result: in an attribute, a list, a closure.

        There are two kinds: pending tensors, and copies of the state from before the step, which record no operation.
        Pending inputs, which the body has changed, come first, because nothing refers to them after the step.

        Args:
            known: The tensors of the state, and those that the graph computes anyway.
            searches: As in `build`.
        """
        # The user's tensors that the body may have stored or changed.
        before = self.before
        state = set(map(id, before.target.state.tensors))
        replaced = [t for former in self.former if (t := former()) is not None and id(t) not in state]
        state_aliases = before.target.state.state_aliases.list_alive()
        every = (*self.new, *replaced, *state_aliases, *driver().find_written())
        among = list({id(t): t for t in every}.values())  # a state alias may also be in `new`

        pending = find_pending_elsewhere(known, among)
        if searches and others_are_pending([*known, *pending]):
            # Among all tensors, e.g. the user's state that is older than the trace.
            pending = find_pending_elsewhere(known)
        pending = _leave_out_inner(pending)
        inputs = set(map(id, before.inputs))
        pending.sort(key=lambda tensor: id(tensor) not in inputs)

        # A copy that is older than the trace isn't the body's, unless it was a tensor of the state or a state_alias.
        older = set(map(id, self.young)) - set(map(id, [*replaced, *state_aliases]))
        left_out = {*map(id, known), *map(id, pending), *older}
        others = _leave_out_inner([t for t in among if id(t) not in left_out])
        memory = set(before.view.memory)
        return pending + [t for t in others if has_value(t) and handles([t])[0] in memory]

    def launch(self, cause: str) -> Any:
        """Run this trace, which can't be replayed for this reason, and return the body's result."""
        target = self.before.target
        if driver().is_lazy:
            return target.launch(self.outputs, self.new, cause)
        traced = self.build()
        if traced is None:
            return self.outputs
        traced.compile(f"it can't be replayed, because {cause}")
        state = target.state
        gradients = [tensor.grad for tensor in state.tensors]
        outputs = traced.start(traced.graph, first=True).fill_tensors()
        state.write_back()
        for tensor, gradient in zip(state.tensors, gradients, strict=True):  # taken by `start`
            tensor.grad = gradient
        return outputs


def note_before(
    target: Target,
    view: TraceView,
    inputs: list[Tensor],
    seeds: list[int],
    watch: Watch | Glance,
    python_state: Callable[[], dict[str, Any]],
) -> Before:
    """Note what is known before a trace. Everything must have been computed.

    Args:
        target: The cores, the state and the sums.
        view: The state as the trace sees it.
        inputs: The batches and rates.
        seeds: The seed of each step.
        watch: Observes what the body reads and draws.
        python_state: Returns the Python state that the body might change.
    """
    memory = {handle: ("state", i) for i, handle in enumerate(view.memory)}
    return Before(
        target=target,
        view=view,
        inputs=driver().show_values(inputs),
        seeds=target.trace_seeds(seeds),
        watch=watch,
        python_state=python_state,
        memory=memory | index_by_memory({"sum": target.sums.tensors, "input": inputs}),
        input_count=len(inputs),
        facts=python_state(),
        # Only needed by a capture, which tells the user what has changed.
        names=_names_by_memory(target.kept()) if isinstance(watch, Watch) else {},
    )


def _describe_leftover(target: Target) -> str:
    """Return why no graph can replace the trace, if it leaves gradients, other sums or shared memory; else ""."""
    state = target.state
    sums = target.sums
    # `hold` would lose gradients, because a tensor's gradient goes with its value.
    with unguarding():
        leaves_gradients = any(t.grad is not None for t in state.tensors if t.is_leaf)
    if target.role == "train" and leaves_gradients:
        return "it leaves gradients to the next step"
    if [(t.shape, t.dtype) for t in sums.before] != [(t.shape, t.dtype) for t in sums.tensors]:
        return "its running sums change their shape or dtype"
    if any(alias.overlaps for alias in find_aliases(state.list_present())):
        return "two tensors of its state share a part of their memory"
    return ""


def _compute_stored(state: HeldState, stored: Sequence[Tensor]) -> None:
    taken = set(map(identity, state.tensors))  # read by another thread, not stored by the body
    compute([t for t in stored if identity(t) not in taken], "a trace that isn't run has stored tensors elsewhere")


def _leave_out_inner(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Leave out the inner tensors of functional tensors: kernels in Python have seen them, but the outer ones count."""
    return [tensor for tensor in tensors if torch._is_functional_tensor(tensor) == driver().is_lazy]


def _names_by_memory(kept: Mapping[str, Tensor]) -> dict[Hashable, str]:
    """Return the names of tensors on the device by the identity of their memory."""
    named = {name: tensor for name, tensor in kept.items() if has_value(tensor)}
    return dict(zip(handles(list(named.values())), named, strict=True))


def _find_outputs(own: Sequence[Tensor], wanted: Sequence[Tensor]) -> tuple[list[Tensor], list[int]]:
    """Return the further outputs that a graph needs for some tensors, and the index of each tensor's output among them.

    A graph has one output for all tensors of one identity, and no output for a tensor that has a value.

    Args:
        own: The outputs that the graph has anyway.
        wanted: The tensors.
    """
    taken = set(map(identity, own))
    pending = set(find_pending(wanted))
    outputs: list[Tensor] = []
    found: dict[int, int] = {}
    indices = []
    for i, tensor in enumerate(wanted):
        which = identity(tensor)
        if which not in found:
            found[which] = len(outputs)
            outputs += [tensor] if i in pending and which not in taken else put_behind_barrier([tensor])
        indices.append(found[which])
    return outputs, indices
