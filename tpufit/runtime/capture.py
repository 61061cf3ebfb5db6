"""`Capture`: one trace of a step, and the graph that it gives. `undoing` takes a trace back.

The body of a step runs here over lazy tensors: each operation is only noted. Some orders matter, and each has its
reason beside it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves

from ..backend import Body, Sums
from ..utils.compiling import compiling
from .aliases import Follower, aliases_of, followers_of, shared
from .bindings import xla
from .device_state import HeldState
from .graph import Graph, recognise, template_of
from .lazy import (
    behind_barrier,
    by_memory,
    compute,
    drop,
    handles,
    has_value,
    identity,
    noting_new,
    pending,
    pending_elsewhere,
    same_memory,
    young,
)
from .lowering import tell_apart
from .operations import operations_in
from .ops.dropout import drawing
from .placement import CorePlacement
from .recorder import Trace
from .trace_seeds import TraceSeeds
from .trace_watch import Glance, Watch
from .transfer import swap_value
from .unsharding import unsharding


class _Now:
    """The trace that this process is busy with; there is never more than one."""

    tracing = False
    began: float | None = None  # by `perf_counter`, if a capture is under way


_now = _Now()


def tracing() -> bool:
    """True while a step is being traced: then a value on the device can't be read without breaking its graph."""
    return _now.tracing


def tracing_since() -> float | None:
    """The time, by `time.perf_counter`, when the capture under way began; None if there is none."""
    return _now.began


@contextmanager
def capturing() -> Iterator[None]:
    """A context in which `tracing_since` tells the time of its beginning."""
    _now.began = perf_counter()
    try:
        yield
    finally:
        _now.began = None


@dataclass(frozen=True)
class Target:
    """The device, state and sums that a program's graphs work on."""

    placement: CorePlacement
    role: str  # under which its graphs are counted
    state: HeldState  # that a step reads and changes
    sums: Sums
    donates: bool  # graphs write the new state over the old
    inside: Callable[[], AbstractContextManager[object]]  # gives the context in which the body is traced

    def trace_seeds(self, seeds: list[int]) -> TraceSeeds:
        """Return the random numbers of a trace."""
        return TraceSeeds(self.placement.device_name, seeds)

    def trace(self, body: Body, inputs: list[Tensor], seeds: TraceSeeds, watch: AbstractContextManager[object]) -> Any:
        """Run the body over lazy tensors while `watch` sees what it does. The sums must have begun."""
        _now.tracing = True
        try:
            # In this thread: if a backward pass ran on the CPU before torch_xla was imported, autograd has no thread
            # for its device, and ends in an internal error.
            whole = unsharding(self.state.shardings, self.placement)
            with (
                self.inside(),
                whole,
                watch,
                compiling(True),
                seeds.seeded_by_torch(),
                drawing(seeds.draw),
                torch.autograd.set_multithreading_enabled(False),
            ):
                result = body(inputs, seeds)
                self.state.follow()
                if self.state.shardings:
                    self.state.pin(self.state.tensors, self.placement)
                return result
        finally:
            _now.tracing = False

    def launch(self, outputs: Any, because: str) -> Any:
        """Run a trace as it is, which can't be replayed for this reason. If it fails, what it changed is lost."""
        try:
            self.placement.launch(self.role, f"it is traced anew on every call, because {because}")
        except BaseException:
            tensors = self.state.tensors
            # Before the pending work is dropped: afterwards lost tensors can't be told from others.
            self.state.mark_lost(pending(tensors))
            returned = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
            drop([*returned, *self.sums.tensors, *(tensors if self.state.lost else ())])
            raise
        return outputs


@contextmanager
def undoing(state: HeldState) -> Iterator[None]:
    """A context that takes a step back if it can't be traced, compiled or run. The state must have been computed."""
    before = same_memory(state.tensors)
    aliases = aliases_of(state.tensors)
    try:
        yield
    except BaseException:
        # First out of the user's tensors: with `drop` they would lose their place.
        state.unfollow()
        if not state.lost:
            for value in before:  # no graph has consumed it, and none of another step may
                xla()._set_buffer_donation(value, False)
            state.restore(before, aliases)
        elif not state.held:
            state.hold()
        # The error's traceback may hold pending tensors for long. Whatever is started next would try them again.
        drop(pending_elsewhere(()))
        before.clear()  # the traceback would go on sharing the state's memory
        raise


class Capture:
    """One trace of a step. Everything before it must have been computed.

    The state's values are stored, see `HeldState.begin_trace`; the inputs are batches and rates; each step has a seed.
    `watch` sees what the body reads and draws, and `python_state` gives what it might change in Python.
    """

    def __init__(
        self,
        target: Target,
        stored: list[Tensor],
        inputs: list[Tensor],
        seeds: list[int],
        watch: Watch | Glance,
        python_state: Callable[[], dict[str, Any]],
    ) -> None:
        self._target = target
        self._inputs = inputs
        self._seeds = target.trace_seeds(seeds)
        self._watch = watch
        self._python_state = python_state
        # Before the trace, which replaces the sums and gives the state's tensors other memory.
        lists = {"state": stored, "sum": target.sums.tensors, "input": inputs}
        self._memory = by_memory(lists)
        self._stored = handles(stored)
        # Weak references would keep `torch.utils.swap_tensors` from its work in the trace.
        self._state = list(target.state.tensors)
        self._young = young()
        self._begun: list[ref[Tensor]] = []
        self._given = len(inputs)  # the body may add others
        self._before = python_state()
        self.outputs: Any = None
        self._new: list[Tensor] = []  # the tensors that the trace has made, but for those that it has let go
        self._roots: list[Tensor] = []  # the outputs of its graph
        self._values: list[Tensor] = []  # the inputs of its graph
        self._settled: list[int] = []  # the indices of the state that the graph replaces
        self._taken: list[Tensor] = []  # the traced tensors of these
        self._left: list[Tensor] = []  # what the body has returned or left elsewhere, and the graph computes
        self._results: list[Tensor] = []  # its values
        self._followers: list[Follower] = []  # of what was left elsewhere, those that share memory with the state
        self._escaped: list[Tensor] | None = None  # what the body has left elsewhere, once `graph` has looked for it

    def trace(self, body: Body) -> str:
        """Run the body, and return the reason why no trace of it can be replayed, or nothing."""
        self._target.sums.begin()
        with noting_new() as self._new:
            self.outputs = self._target.trace(body, self._inputs, self._seeds, self._watch)
        self._begun = self._let_go()
        obstacle = self._watch.reads() or self._leftover()
        if obstacle:
            self._target.state.end_trace()
        return obstacle

    def _let_go(self) -> list[ref[Tensor]]:
        """Keep the tensors of the state no longer: one that the trace has replaced lives on only if the user has it."""
        begun = list(map(ref, self._state))
        state = set(map(id, self._target.state.tensors))
        replaced = {id(t) for t in self._state if id(t) not in state}
        if replaced:
            self._new = [t for t in self._new if id(t) not in replaced]
            self._young = [t for t in self._young if id(t) not in replaced]
        self._state.clear()
        return begun

    def _leftover(self) -> str:
        state = self._target.state
        sums = self._target.sums
        # `hold` would lose them: a tensor's gradient goes with its value.
        if self._target.role == "train" and any(t.grad is not None for t in state.tensors if t.is_leaf):
            return "it leaves gradients to the next one"
        if [(t.shape, t.dtype) for t in sums.begun] != [(t.shape, t.dtype) for t in sums.tensors]:
            return "its running sums change their shape or dtype"
        if any(alias.apart for alias in aliases_of(state.present())):
            return "two tensors of its state share a part of their memory"
        return ""

    def variation(self) -> str:
        """The reason why the step may be another the next time, even if its graph is the same; or nothing.

        The first time it may be harmless: a cache is built, a layer begins with the statistics of its first batch.
        """
        before = self._before
        after = self._python_state()
        changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
        if changed:
            return f"its Python changes {changed[0]} (from {before.get(changed[0])!r} to {after.get(changed[0])!r})"
        drew = self._watch.drew_at
        return drew and f"its Python draws random numbers at {drew}"

    def difference(self, earlier: Graph) -> str:
        """Compare this trace, which won't be run, with a graph: the difference in words, or nothing."""
        graph = self.unrun()
        if graph is None:
            return "it computes nothing any more"
        return self.variation() or earlier.difference(graph)

    def unrun(self) -> Graph | None:
        """Find out what was traced, only to compare it; None if there is nothing."""
        # A weight that another thread has just taken, as by `state_dict`, is none that the body has left.
        everything = self._new
        state = set(map(identity, self._target.state.tensors))
        put_back = {id(begun()) for begun in self._begun}  # those that the trace has replaced
        self._new = [t for t in everything if identity(t) not in state and id(t) not in put_back]
        self._begun = []
        graph = self.graph()
        self._new = everything
        for value in self._values:
            xla()._set_buffer_donation(value, False)  # nothing has consumed it
        return graph

    def compute_escaped(self) -> None:
        """Compute what the body of a trace that isn't run has left elsewhere, as in a cache, and nothing else of it."""
        state = self._target.state
        left = self._escaped
        if left is None:
            known = [leaf for leaf in tree_leaves(self.outputs) if isinstance(leaf, Tensor)]
            left = pending_elsewhere([*known, *state.tensors, *self._target.sums.tensors], self._new)
        taken = set(map(identity, state.tensors))  # by another thread: nobody has left it
        compute([t for t in left if identity(t) not in taken], "a trace that isn't run has left tensors elsewhere")

    def graph(self) -> Graph | None:
        """Find out what was traced, without compiling it. None if there is nothing to run."""
        from torch_xla.utils.buffer_donor_context import alias_with_buffer_donor_config

        target = self._target
        state = target.state
        sums = target.sums
        # Sums that the step made itself are known only now. They come first: what was known before has the last word.
        added = by_memory({"input": self._inputs[self._given :]})
        memory = by_memory({"sum": sums.begun}) | self._memory
        memory |= {handle: (name, self._given + i) for handle, (name, i) in added.items()}
        leaves, spec = tree_flatten(self.outputs)
        template, computed = template_of(leaves, memory)
        changed, replaced, aliases = state.traced(self._stored, target.placement)
        summed = pending(sums.tensors)
        own = [*replaced, *(sums.tensors[i] for i in summed)]
        # A tensor that the body left elsewhere becomes an output too. Left pending it would be computed later, from
        # memory that the graph has written over.
        known = [*own, *computed, *state.tensors]
        escaped = self._escaped = self._elsewhere(known)
        self._left = [*computed, *escaped]
        self._followers = followers_of(state.tensors, escaped) if escaped else []
        others, left = _outputs(own, self._left)
        self._roots = roots = [*own, *others]
        if not roots:
            state.end_trace()
            return None
        _, self._values = xla()._get_tensors_xla_device_data_node(roots)
        sources, constants, places = recognise(self._values, memory, self._seeds.places)
        consumed = list[int]()
        changes = {*changed, *(i for i, _ in shared(aliases))}
        kept = {handle for i, handle in enumerate(self._stored) if i not in changes}
        with alias_with_buffer_donor_config():
            # Before the hash, of which donation is a part. Only memory that is replaced: a donated tensor is gone.
            for value, (name, i) in zip(self._values, sources, strict=True) if target.donates else ():
                if name == "state" and self._stored[i] not in kept:
                    xla()._set_buffer_donation(value, True)
                    consumed += [j for j, handle in enumerate(self._stored) if handle == self._stored[i]]
            tell_apart(roots)
            found = xla()._get_graph_hash(roots)
        result = template, spec
        graph = Graph(
            hash=found,
            sources=sources,
            constants=constants,
            places=places,
            changed=changed,
            summed=summed,
            result=result,
            escaped=len(escaped),
            left=left,
            aliases=aliases,
            consumed=consumed,
            facts=self._before,
        )
        sizes = {
            "state": len(state.tensors),
            "sum": len(sums.begun),
            "input": len(self._inputs),
            "seed": len(places),
        }
        graph.arrange(sizes | {"constant": len(constants)})
        return graph

    def _elsewhere(self, known: Sequence[Tensor]) -> list[Tensor]:
        """The tensors that the body has left elsewhere than in its result: in an attribute, a list, a closure.

        They wait for the graph, or are copies of the state as it was before: to make one computes nothing.
        """
        state = set(map(id, self._target.state.tensors))
        replaced = [t for begun in self._begun if (t := begun()) is not None and id(t) not in state]
        followers = [t for f in self._target.state.followers if (t := f.tensor()) is not None]
        among = list({id(t): t for t in (*self._new, *replaced, *followers)}.values())  # a follower may be young
        waiting = pending_elsewhere(known, among)
        young_ids = set(map(id, self._young))
        left_out = {*map(id, known), *map(id, waiting), *(young_ids - {*map(id, replaced), *map(id, followers)})}
        stored = set(self._stored)
        # Not the tensors inside of the state's own, which kernels in Python have seen: they live as long as its values.
        others = [t for t in among if id(t) not in left_out and torch._is_functional_tensor(t)]
        return waiting + [t for t in others if has_value(t) and handles([t])[0] in stored]

    def compile(self, graph: Graph, cause: str) -> None:
        """Compile the graph of this trace; the report says why it is needed."""
        target = self._target
        target.placement.compile(
            Trace(graph, self._roots, self._values, target.state.axes, target.role, cause),
        )

    def operations(self) -> int:
        """What the graph of this trace computes, see `operations_in`. It must not have run."""
        return operations_in(xla()._get_xla_tensors_hlo(self._roots), self._target.placement.count)

    def run(self, graph: Graph, first: bool) -> None:
        """Run the graph of this trace, or an equal one, with its inputs; `first` if it has never run."""
        state = self._target.state
        taken = state.hold()
        self._settled = [*graph.changed, *(i for i, _ in shared(graph.aliases))]
        self._taken = [taken[i] for i in self._settled]
        target = self._target
        self._results = graph.run(
            state, target.sums, self._values, target.placement.starter, first and target.placement.runs
        )

    def settle(self, graph: Graph) -> Any:
        """Give the traced tensors the values that `run` has computed, and return the body's result.

        Nothing of the trace stays pending: it would be computed from memory that is no longer there.
        """
        # The history of other tensors may keep the traced state alive, so its objects stay as they are. The others lose
        # their history, which keeps more of the trace alive.
        for tensor, value in zip(self._taken, self._target.state.shown(self._settled), strict=True):
            tensor.data = value
        left = self._left
        # Each once: a body may return the same tensor twice.
        for tensor, value in {id(t): (t, value) for t, value in zip(left, self._results, strict=True)}.values():
            if (
                tensor._is_view() and not tensor.requires_grad
            ):  # as `h[:, 0]` of a prediction: PyTorch swaps no such view
                tensor.data = value
            else:
                swap_value(tensor, value, requires_grad=tensor.requires_grad and tensor.is_leaf)
        graph.escaped_tensors = list(map(ref, left[len(left) - graph.escaped :]))
        self._target.state.followers = self._followers
        return self.outputs


def _outputs(own: Sequence[Tensor], left: Sequence[Tensor]) -> tuple[list[Tensor], list[int]]:
    """The outputs of a graph for the tensors that its body has left, beside those of `own`: which are they, by index.

    A graph has one output for all tensors of one identity, and none for one that has a value.
    """
    taken = set(map(identity, own))
    waiting = set(pending(left))
    outputs: list[Tensor] = []
    found: dict[int, int] = {}
    indices = []
    for i, tensor in enumerate(left):
        which = identity(tensor)
        if which not in found:
            found[which] = len(outputs)
            outputs += [tensor] if i in waiting and which not in taken else behind_barrier([tensor])
        indices.append(found[which])
    return outputs, indices
