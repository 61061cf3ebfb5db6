"""`Capture`: one trace of a step, and its graph. `undoing` undoes a failed trace.

The body of a step runs here over lazy tensors: operations are only recorded. Where the order of statements matters, a
comment says why.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves
from torch.utils.weak import TensorWeakRef

from ..backend import AttentionForms, Body, Sums
from ..utils.is_compiling import compiling
from .aliases import aliases_of, find_shared, link
from .device_state import HeldState
from .driver import Trace, driver, on_device
from .followers import Follower, followers_of
from .graph import Graph, recognise, template_of
from .lazy import (
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
    others_wait,
    put_behind_barrier,
)
from .operations import operations_in
from .ops.attention_choice import choose_attention
from .ops.kernels import replace_kernels
from .own_thread import unguarding
from .placement import CorePlacement
from .trace_context import tracing_with
from .trace_seeds import TraceSeeds
from .trace_view import TraceView
from .trace_watch import Glance, Watch
from .transfer import swap_value
from .unsharding import Unsharding

_LISTS = ("state", "sum", "input", "seed", "constant")


@dataclass(frozen=True)
class Target:
    """The device, the state and the sums of a program's graphs."""

    placement: CorePlacement
    role: str  # for which its graphs are counted
    state: HeldState  # read and changed by a step
    sums: Sums
    donates: bool  # whether graphs write the new state over the old
    attention: AttentionForms  # requested by the user
    kept: Callable[[], Mapping[str, Tensor]]  # returns the tensors that the user's Python keeps, by name

    def trace_seeds(self, seeds: list[int]) -> TraceSeeds:
        """Return the source of a trace's random numbers."""
        return driver().trace_seeds(self.placement, seeds)

    def trace(
        self,
        body: Body,
        inputs: list[Tensor],
        seeds: TraceSeeds,
        watch: AbstractContextManager[object],
        view: TraceView | None = None,
    ) -> Any:
        """Run the body over lazy tensors while `watch` observes it. `begin` of the sums must have been called.

        Without a view, the trace can't be replayed, and its graph isn't known.
        """
        shardings = self.state.shardings
        whole = Unsharding(shardings, self.placement) if shardings else None
        with (
            # On one core too, because torch_xla's batch norm in eval mode has no backward pass.
            replace_kernels(),
            choose_attention(self.attention, self.placement),
            tracing_with(tracing=True, draw=seeds.draw, unsharding=whole),
            whole or nullcontext(),
            watch,
            compiling(True),
            driver().body(),
            seeds.inside(),
            seeds.seeded_by_torch(),
            # In this thread, because autograd has no thread for the device if a backward pass ran on the CPU before the
            # runtime was imported, and then fails with an internal error.
            torch.autograd.set_multithreading_enabled(False),
        ):
            with nullcontext() if view is None else view.following():
                result = body(inputs, seeds)
            if shardings:
                self.state.pin(self.state.tensors, self.placement)
            return result

    def launch(self, outputs: Any, new: Sequence[Tensor], because: str) -> Any:
        """Run a trace that can't be replayed for this reason. If it fails, the state that it changed is lost.

        Args:
            outputs: The body's result.
            new: The living tensors that the trace has made.
            because: The reason.
        """
        try:
            changed = [*self.state.list_present(), *self.sums.tensors, *new]
            self.placement.launch(self.role, f"it is traced anew on every call, because {because}", changed)
        except BaseException:
            tensors = self.state.tensors
            # Mark before pending work is dropped; afterwards lost tensors can't be distinguished.
            self.state.mark_lost(find_pending(tensors))
            returned = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
            drop([*returned, *self.sums.tensors, *(tensors if self.state.lost else ())])
            raise
        return outputs


@contextmanager
def undoing(state: HeldState) -> Iterator[None]:
    """A context that undoes a step if it can't be traced, compiled or run. The state must have been computed."""
    before = alias_memory(state.tensors)
    aliases = aliases_of(state.tensors)
    try:
        yield
    except BaseException:
        # The user's tensors must release the trace's values before `drop`, which takes the device from their tensors.
        if not state.lost:
            driver().keep(before)  # no graph has consumed these values, and a later step's graph mustn't
            state.restore(before, aliases)
        elif not state.held:
            state.hold()
        # The error's traceback may keep pending tensors alive, which the next graph would try to compute again.
        drop(find_pending_elsewhere(()))
        before.clear()  # else the traceback would keep the state's memory
        raise


class Capture:
    """One trace of a step. Everything before it must have been computed.

    Args:
        target: The device, the state and the sums.
        view: The state as the trace sees it.
        inputs: The batches and rates.
        seeds: The seed of each step.
        watch: Observes what the body reads and draws.
        python_state: Returns the Python state that the body might change.

    Attributes:
        new: The living tensors that the trace has made.
        outputs: The value that the body has returned.
    """

    def __init__(
        self,
        target: Target,
        view: TraceView,
        inputs: list[Tensor],
        seeds: list[int],
        watch: Watch | Glance,
        python_state: Callable[[], dict[str, Any]],
    ) -> None:
        self._target = target
        self._view = view
        self._inputs = driver().show_values(inputs)
        self._seeds = target.trace_seeds(seeds)
        self._watch = watch
        self._python_state = python_state
        # Noted before the trace, which replaces the sums and the memory of the state's tensors.
        self._memory = {handle: ("state", i) for i, handle in enumerate(view.memory)}
        self._memory |= index_by_memory({"sum": target.sums.tensors, "input": inputs})
        # Strong references, because `torch.utils.swap_tensors` refuses tensors with weak references in the trace.
        self._state = list(target.state.tensors)
        self._young = find_young()
        self._begun: list[TensorWeakRef] = []
        self._given = len(inputs)  # the body may add inputs
        self._before = python_state()
        # Names are only needed by a capture, which tells the user what has changed.
        self._names = _names_by_memory(target.kept()) if isinstance(watch, Watch) else {}
        self.outputs: Any = None
        self.new: list[Tensor] = []
        self._roots: list[Tensor] = []  # the outputs of the graph
        self._values: list[Tensor] = []  # the inputs of the graph
        self._settled: list[int] = []  # the indices of the state that the graph replaces
        self._taken: list[Tensor] = []  # the traced tensors at these indices
        self._left: list[Tensor] = []  # what the body has returned or stored elsewhere, and the graph computes
        self._results: list[Tensor] = []  # the computed values of `_left`
        self._followers: list[Follower] = []  # tensors stored elsewhere that share memory with the state
        self._escaped: list[Tensor] | None = None  # what the body has stored elsewhere, once `graph` has searched

    def trace(self, body: Body) -> str:
        """Run the body, and return the reason why no trace of it can be replayed, or ""."""
        sums = self._target.sums
        sums.begin()
        sums.tensors = driver().show_values(sums.tensors)
        with noting_new() as self.new:
            self.outputs = self._target.trace(body, self._inputs, self._seeds, self._watch, self._view)
        own = set(map(id, driver().list_own())) - set(map(id, self._inputs))
        self.new = [tensor for tensor in self.new if id(tensor) not in own]
        self._begun = self._let_go()
        obstacle = self._watch.reads() or self._describe_leftover()
        if obstacle and driver().is_lazy:
            self._view.end()
        return obstacle

    def _let_go(self) -> list[TensorWeakRef]:
        """Release the tensors of the state, so that a replaced tensor stays alive only if the user keeps it."""
        begun = list(map(TensorWeakRef, self._state))
        state = set(map(id, self._target.state.tensors))
        replaced = {id(t) for t in self._state if id(t) not in state}
        if replaced:
            self.new = [t for t in self.new if id(t) not in replaced]
            self._young = [t for t in self._young if id(t) not in replaced]
        self._state.clear()
        return begun

    def _describe_leftover(self) -> str:
        state = self._target.state
        sums = self._target.sums
        # `hold` would lose gradients, because a tensor's gradient goes with its value.
        with unguarding():
            leaves_gradients = any(t.grad is not None for t in state.tensors if t.is_leaf)
        if self._target.role == "train" and leaves_gradients:
            return "it leaves gradients to the next step"
        if [(t.shape, t.dtype) for t in sums.begun] != [(t.shape, t.dtype) for t in sums.tensors]:
            return "its running sums change their shape or dtype"
        if any(alias.apart for alias in aliases_of(state.list_present())):
            return "two tensors of its state share a part of their memory"
        return ""

    def explain_variation(self) -> str:
        """Return the reason why the next trace may differ, even if the graphs are equal, or "".

        At the first trace the reason may be harmless: a cache is built, a layer takes its first batch's statistics.
        """
        before = self._before
        after = self._python_state()
        changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
        if changed:
            return f"its Python changes {changed[0]} (from {before.get(changed[0])!r} to {after.get(changed[0])!r})"
        drew = self._watch.drew_at
        return drew and f"its Python draws random numbers at {drew}"

    def find_difference(self, earlier: Graph, thorough: bool) -> str:
        """Compare this trace, which won't run, with a graph or its outline; return the difference, or ""."""
        graph = self.unrun(thorough)
        if graph is None:
            return "it computes nothing now"
        return self.explain_variation() or self.compare(earlier, graph)

    def compare(self, earlier: Graph, graph: Graph) -> str:
        """Describe the difference of this trace's graph from an earlier graph, or return ""."""
        difference = earlier.find_difference(graph)
        if difference and self._watch.drew_unseen:
            return f"{difference}, and NumPy's global generator drew numbers meanwhile, as scipy's functions do"
        return difference

    def unrun(self, thorough: bool = True) -> Graph | None:
        """Return the graph of a trace that won't run, or its outline, to compare it; None if it is empty."""
        # Leave out weights that another thread has just read, e.g. by `state_dict`: the body hasn't stored them.
        everything = self.new
        state = set(map(identity, self._target.state.tensors))
        put_back = {id(begun()) for begun in self._begun}  # tensors that the trace has replaced
        self.new = [t for t in everything if identity(t) not in state and id(t) not in put_back]
        self._begun = []
        graph = self.graph(hashes=thorough, searches=False)  # other pending tensors aren't the body's, either
        self.new = everything
        driver().keep(self._values)  # no graph has consumed them
        return graph

    def compute_escaped(self) -> None:
        """Compute only what the body of a trace that isn't run has stored elsewhere, as in a cache."""
        state = self._target.state
        left = self._escaped
        if left is None:
            known = [leaf for leaf in tree_leaves(self.outputs) if isinstance(leaf, Tensor)]
            left = find_pending_elsewhere([*known, *state.tensors, *self._target.sums.tensors], self.new)
        taken = set(map(identity, state.tensors))  # read by another thread, not stored by the body
        compute([t for t in left if identity(t) not in taken], "a trace that isn't run has stored tensors elsewhere")

    def graph(self, hashes: bool = True, searches: bool = True) -> Graph | None:
        """Build the graph of the trace, without compiling it. None if there is nothing to run.

        Args:
            hashes: True to include its hash, False for only its outline.
            searches: True to search for tensors that are older than the trace and that the trace has changed.
        """
        target = self._target
        state = target.state
        sums = target.sums
        # Sums that the step has created are known only now. Entries from before the trace take precedence over them.
        added = index_by_memory({"input": self._inputs[self._given :]})
        memory = index_by_memory({"sum": sums.begun}) | self._memory
        memory |= {handle: (name, self._given + i) for handle, (name, i) in added.items()}
        leaves, spec = tree_flatten(self.outputs)
        template, computed = template_of(leaves, memory)
        changed, replaced, aliases = self._view.find_changes(target.placement)
        summed = find_pending(sums.tensors)
        own = [*replaced, *(sums.tensors[i] for i in summed)]
        # A tensor that the body stored elsewhere becomes an output too. If it stayed pending, it would be computed from
        # memory that the graph has written over.
        known = [*own, *computed, *state.tensors]
        escaped = self._find_stored_elsewhere(known, searches)
        self._followers = followers_of(state.tensors, escaped) if escaped else []
        following = {id(f.tensor()) for f in self._followers}
        escaped = self._escaped = [t for t in escaped if id(t) not in following]
        self._left = [*computed, *escaped]
        others, left = _outputs(own, self._left)
        self._roots = roots = [*own, *others]
        if not roots:
            self._view.end()
            self._resolve()
            return None
        self._values = driver().inputs_of(roots)
        sources, constants, places = recognise(self._values, memory, self._seeds)
        if not driver().is_lazy:
            # The trace lists its inputs in any order; a graph takes them in the order of the lists.
            order = sorted(range(len(sources)), key=lambda i: (_LISTS.index(sources[i][0]), sources[i][1]))
            self._values = [self._values[i] for i in order]
            sources = [sources[i] for i in order]
        consumed = list[int]()
        changes = {*changed, *(i for i, _ in find_shared(aliases))}
        stored = self._view.memory
        kept = {handle for i, handle in enumerate(stored) if i not in changes}
        donated = []
        # Only replaced memory is donated, because a donated tensor is gone.
        for at, (name, i) in enumerate(sources) if target.donates else ():
            if name == "state" and stored[i] not in kept:
                donated.append(at)
                consumed += [j for j, handle in enumerate(stored) if handle == stored[i]]
        outline = driver().outline_of(roots, self._values, donated)
        found = driver().hash_of(roots, self._values, donated) if hashes or outline is None else None
        result = template, spec
        graph = Graph(
            hash=found,
            outline=outline,
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
            names=self._names,
        )
        sizes = {
            "state": len(state.tensors),
            "sum": len(sums.begun),
            "input": len(self._inputs),
            "seed": len(places),
        }
        graph.arrange(sizes | {"constant": len(constants)})
        return graph

    def _find_stored_elsewhere(self, known: Sequence[Tensor], searches: bool) -> list[Tensor]:
        """Return the tensors that the body has stored outside of its result: in an attribute, a list, a closure.

        These tensors are pending, or they are copies of the state from before the step, which record no operation.
        Inputs that the body has changed come first, because nothing refers to them after the step.
        """
        state = set(map(id, self._target.state.tensors))
        replaced = [t for begun in self._begun if (t := begun()) is not None and id(t) not in state]
        followers = self._target.state.followers.list_alive()
        every = (*self.new, *replaced, *followers, *driver().find_written())
        among = list({id(t): t for t in every}.values())  # a follower may also be in `new`
        waiting = find_pending_elsewhere(known, among)
        if searches and others_wait([*known, *waiting]):
            # Among all tensors, e.g. the user's state that is older than the trace.
            waiting = find_pending_elsewhere(known)
        # Leave out the inner tensors of functional tensors: Python kernels have seen them, but the outer tensors count.
        lazy = driver().is_lazy
        waiting = [t for t in waiting if torch._is_functional_tensor(t) == lazy]
        inputs = set(map(id, self._inputs))
        waiting.sort(key=lambda tensor: id(tensor) not in inputs)
        young_ids = set(map(id, self._young))
        left_out = {*map(id, known), *map(id, waiting), *(young_ids - {*map(id, replaced), *map(id, followers)})}
        stored = set(self._view.memory)
        others = [t for t in among if id(t) not in left_out and torch._is_functional_tensor(t) == lazy]
        return waiting + [t for t in others if has_value(t) and handles([t])[0] in stored]

    def compile(self, graph: Graph, cause: str) -> None:
        """Compile the graph of this trace; `cause` is for the report."""
        target = self._target
        target.placement.compile(
            Trace(graph, self._roots, self._values, target.state.axes, target.role, cause),
        )

    def operations(self) -> int:
        """Count the operations of this trace's graph, see `operations_in`. The graph must not have run."""
        return operations_in(driver().text_of(self._roots), self._target.placement.count)

    def run(self, graph: Graph, first: bool) -> None:
        """Run the graph of this trace, or an equal graph, with its inputs; `first` if it has never run."""
        state = self._target.state
        taken = state.hold(self._view.take_values())
        self._settled = [*graph.changed, *(i for i, _ in find_shared(graph.aliases))]
        self._taken = [taken[i] for i in self._settled]
        target = self._target
        self._results = graph.run(
            state,
            target.sums,
            self._values,
            target.placement,
            first and target.placement.runs,
        )

    def settle(self, graph: Graph) -> Any:
        """Give the traced tensors the values that `run` has computed, and return the body's result.

        No tensor of the trace stays pending, because it would be computed from memory that is gone.
        """
        # The state's tensors keep their objects, because the autograd history of other tensors may refer to them. Other
        # tensors lose their own history, which would keep more of the trace alive.
        for tensor, value in zip(self._taken, self._target.state.unpack_values(self._settled), strict=True):
            tensor.data = value
        left = self._left
        escaped = left[len(left) - graph.escaped :]
        together = aliases_of(escaped)  # noted while they share memory, because each gets a separate value below
        # A body may return the same tensor twice, which gets its value only once.
        for tensor, value in {id(t): (t, value) for t, value in zip(left, self._results, strict=True)}.values():
            # PyTorch can't swap views without gradients, such as `h[:, 0]` of a prediction.
            if tensor._is_view() and not tensor.requires_grad:
                tensor.data = value
            else:
                swap_value(tensor, value, requires_grad=tensor.requires_grad and tensor.is_leaf)
        compute(link(escaped, together))
        self._resolve()
        inputs = set(map(id, self._inputs))
        graph.escaped_tensors = [TensorWeakRef(t) for t in escaped if id(t) not in inputs]
        followers = self._target.state.followers
        followers.replace(self._followers)
        followers.empty()
        return self.outputs

    def launch(self, cause: str) -> Any:
        """Run this trace, which can't be replayed for this reason, and return the body's result."""
        if driver().is_lazy:
            return self._target.launch(self.outputs, self.new, cause)
        graph = self.graph()
        if graph is None:
            return self.outputs
        self.compile(graph, f"it can't be replayed, because {cause}")
        state = self._target.state
        gradients = [tensor.grad for tensor in state.tensors]
        self.run(graph, first=True)
        outputs = self.settle(graph)
        state.write_back()
        for tensor, gradient in zip(state.tensors, gradients, strict=True):  # taken by `run`
            tensor.grad = gradient
        return outputs

    def _resolve(self) -> None:
        leaves = [leaf for leaf in tree_leaves(self.outputs) if isinstance(leaf, Tensor) and on_device(leaf)]
        driver().resolve([*leaves, *self._target.sums.tensors])


def _names_by_memory(kept: Mapping[str, Tensor]) -> dict[Hashable, str]:
    """Return the names of tensors on the device by the identity of their memory."""
    named = {name: tensor for name, tensor in kept.items() if has_value(tensor)}
    return dict(zip(handles(list(named.values())), named, strict=True))


def _outputs(own: Sequence[Tensor], left: Sequence[Tensor]) -> tuple[list[Tensor], list[int]]:
    """Return the outputs that a graph needs for the tensors `left` besides the outputs `own`, and each tensor's output.

    A graph has one output for all tensors of one identity, and no output for a tensor that has a value.
    """
    taken = set(map(identity, own))
    waiting = set(find_pending(left))
    outputs: list[Tensor] = []
    found: dict[int, int] = {}
    indices = []
    for i, tensor in enumerate(left):
        which = identity(tensor)
        if which not in found:
            found[which] = len(outputs)
            outputs += [tensor] if i in waiting and which not in taken else put_behind_barrier([tensor])
        indices.append(found[which])
    return outputs, indices
