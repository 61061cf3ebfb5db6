"""`CapturedProgram`: runs a step as one XLA graph, traced once and then replayed.

torch_xla traces the Python of a step on every call, which for a real network takes longer than the step itself. Here a
step's first run is traced, compiled, and started as a graph of known inputs and outputs. Its second run is traced once
more. Only if that gives the same graph with the same constants, from another batch and seed, is the graph replayed from
then on, without any of the step's Python. A step that can't be shown to be equal is traced on every call.

Now and then a replay is audited, see `audits`: the step is traced once more, only to compare. If that gives another
graph, something has changed that its Python reads, and the step is captured anew.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import Any

from torch import Tensor

from ..backend import Body, Program, Sums
from ..backend.program import Pause
from ..errors import ReplayError
from ..utils.counters import count_capture, timed
from ..utils.strict import LENIENT, Strict
from ..utils.users_code import warn
from .audits import Audits
from .capture import Capture, Target, capturing, undoing
from .device_state import HeldState
from .graph import Graph
from .lazy import drop, noting_new, pending_elsewhere, wait
from .lowering import lowering, variables
from .placement import CorePlacement
from .release import checking_shapes
from .trace_seeds import seed_tensors
from .trace_watch import Glance, Watch, cure_for

# The number of traces in a row that may differ from the one before, until a step counts as one that can't be replayed.
# One differs without fault where a module builds a cache in its first forward pass.
_ATTEMPTS = 3

# XLA:CPU waits for a step that is given memory, which costs a fifth of a small one: there memory is given from this
# size of the state on, in bytes. Elsewhere it is free.
_WORTH_GIVING = 1 << 24

_ONCE = "it has only been traced once"


class CapturedProgram(Program):
    """A step, and the graphs that its Python has been traced to.

    Args:
        placement: The cores that it runs on.
        role: The role that its graphs are counted under: `"train"`, `"eval"` or `"predict"`.
        state: The tensors that it reads and changes.
        sums: The running sums.
        jit_compile: `"auto"`: replay what can be replayed. True: an error if it can't be. False: trace every call.
        donate: True to write the new state over the old, so that it is in memory once only. A small state is left as
            it is where that costs time.
        inside: Gives the context in which the body is traced.
        matmul_precision: The precision of float32 matrix products.
        python_state: Gives the names and values that the body might change in Python, before and after a trace.

    Attributes:
        audits: Decides which replays are audited.
        change: The change that the last audit has found, in words if it is known, and the number of steps that may have
            run without it; None if it has found none, or after `pop_change`.
    """

    def __init__(
        self,
        *,
        placement: CorePlacement,
        role: str,
        state: HeldState,
        sums: Sums,
        jit_compile: str | bool = "auto",
        donate: bool = False,
        inside: Callable[[], AbstractContextManager[object]] = nullcontext,
        matmul_precision: str = "default",
        python_state: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        super().__init__(jit_compile)
        free = placement.gives_memory_freely
        donates = donate and (free or sum(t.nbytes for t in state.tensors) >= _WORTH_GIVING)
        self._target = Target(placement, role, state, sums, donates, inside)
        self._strict = self._new = LENIENT
        self.audits = Audits(in_lockstep=placement.hosts > 1)
        self.change: tuple[str, int] | None = None
        self._matmul_precision = matmul_precision
        self._variables: tuple[str, ...] = ()
        self._python_state = python_state
        self._graphs: dict[Hashable, Graph] = {}
        self._doubtful: dict[Hashable, int] = {}  # the doubtful steps of graphs that an audit has refuted
        self._varied = 0  # traces in a row, of whatever key, whose Python was another
        self.traced_because = "of jit_compile=False" if jit_compile is False else ""
        self._told: set[str] = set()  # the causes that were warned of

    def replays(self, key: Hashable) -> bool:
        graph = self._graphs.get(self._named(key))
        if graph is None or not graph.proven:
            return False
        if self._target.state.held:
            return True
        self._hold()  # user code may have let other tensors share memory
        graph = self._graphs.get(self._named(key))
        return graph is not None and graph.proven

    def _named(self, key: Hashable) -> Hashable:
        """The key of a graph: that of its call, and which of the state's tensors share memory when it starts."""
        aliases = self._target.state.aliases
        return (key, aliases) if aliases else key

    def audit_due(self, key: Hashable, remaining: int | None) -> bool:
        if not self.replays(key):
            return False
        named = self._named(key)
        return self.audits.due(named, remaining) or self._graphs[named].superseded

    @property
    def captures(self) -> bool:
        return not self.traced_because

    def note_users_code(self, seldom: bool) -> None:
        self.audits.note_users_code(seldom)

    def forget(self) -> None:
        self._graphs.clear()
        self._doubtful.clear()
        self._varied = 0

    def try_again(self) -> None:
        if self.jit_compile is not False:
            self.traced_because = ""

    def begin_pass(self, strict: Strict, new: Strict) -> None:
        self._strict = strict
        self._new = new
        self.audits.begin_pass()
        if self._variables != variables():  # the graphs were lowered with others
            self._variables = variables()
            self.forget()

    def __call__(
        self,
        key: Hashable,
        inputs: list[Tensor],
        seeds: list[int],
        body: Body,
        pause: Pause = nullcontext,
    ) -> Any:
        checking = nullcontext() if key in self.traced_keys else checking_shapes()
        with pause(), timed("trace"), lowering(self._matmul_precision), checking:
            self._target.state.write_back()
            self.traced_keys.add(key)
            if self.traced_because:
                return self._trace(inputs, seeds, body)
            with capturing():
                return self._capture(key, inputs, seeds, body)

    def audit(
        self,
        key: Hashable,
        inputs: list[Tensor],
        seeds: list[int],
        body: Body,
        pause: Pause = nullcontext,
        sample: Body | None = None,
    ) -> None:
        key = self._named(key)
        graph = self._graphs[key]
        reference = graph
        if sample is not None and graph.sample is not None:
            reference = graph.sample
            body = sample
        if graph.escaped:  # what it leaves elsewhere must be computed
            graph.proven = False
            self._doubtful[key] = self.audits.doubtful(key)
            return
        with pause(), timed("audit"), lowering(self._matmul_precision):
            self._hold()
            wait("audit")  # memory that is still to be can't be told apart
            began = perf_counter()  # from here on the device has nothing to do
            watch: Glance | Watch = Glance()
            difference = self._compare(reference, inputs, seeds, body, watch)
            if difference != "" or watch.may_have_drawn:  # by the step, or by another thread: a watch can tell
                watch = self._watch()
                difference = self._compare(reference, inputs, seeds, body, watch)
        if difference is None and not watch.reads_itself:
            self.audits.disturbed(key)
            return
        agreed = difference == "" and not watch.may_have_drawn
        if not agreed:
            graph.proven = False
            self._doubtful[key] = self.audits.doubtful(key)
        self.audits.ended(key, perf_counter() - began, agreed)

    def _compare(
        self, graph: Graph, inputs: list[Tensor], seeds: list[int], body: Body, watch: Glance | Watch
    ) -> str | None:
        """Trace a step, run nothing, and say how its graph differs; None if a value was read meanwhile."""
        try:
            with self._unrun(inputs, seeds, watch) as capture:
                try:
                    obstacle = capture.trace(body)
                except Exception as error:  # a fault of the step's is one of its capture, which follows, too
                    obstacle = f"its trace failed: {error}"
                difference = obstacle or capture.difference(graph)
        except RuntimeError:  # torch_xla stumbles over a tensor of the trace while another thread reads it
            if not watch.reads():
                raise
            return None
        return None if watch.reads() else difference

    @contextmanager
    def _unrun(self, inputs: list[Tensor], seeds: list[int], watch: Glance | Watch) -> Iterator[Capture]:
        """A context for a trace that isn't run: at its end all is as it was."""
        target = self._target
        try:
            with noting_new() as new, target.state.lent() as stored:
                capture = Capture(target, stored, inputs, seeds, watch, self._python_state)
                yield capture
                capture.compute_escaped()
        finally:
            # Whoever has taken more of the trace, as another thread, can't have its value, as nothing computes it.
            drop(pending_elsewhere(target.state.tensors, new))
            target.sums.roll_back()

    def lacks_sample(self, key: Hashable) -> bool:
        if not self.replays(key):
            return False
        graph = self._graphs[self._named(key)]
        return graph.sample is None and not graph.escaped

    def trace_sample(
        self,
        key: Hashable,
        inputs: list[Tensor],
        seeds: list[int],
        sample: Body,
        pause: Pause = nullcontext,
    ) -> None:
        with pause(), timed("audit"), lowering(self._matmul_precision):
            self._hold()
            wait("audit")
            with self._unrun(inputs, seeds, Glance()) as capture:
                obstacle = capture.trace(sample)
                self._graphs[self._named(key)].sample = None if obstacle else capture.unrun()

    def _hold(self) -> None:
        """Take the state's values out of the user's tensors."""
        state = self._target.state
        if not state.held:
            state.settle(self._target.placement)
            state.hold()

    def replay(self, key: Hashable, inputs: list[Tensor], seeds: list[int]) -> Any:
        key = self._named(key)
        graph = self._graphs[key]
        target = self._target
        self.operations = graph.operations
        self.audits.replayed(key, len(seeds))
        state = target.state
        sums = target.sums
        drawn = seed_tensors(target.placement.device_name, seeds, graph.places) if graph.places else []
        pool = [*state.values, *sums.tensors, *inputs, *drawn, *graph.constants]
        outputs = graph.run(state, sums, list(graph.pick(pool)), target.placement.starter)
        return graph.returned(outputs, inputs)

    def _trace(self, inputs: list[Tensor], seeds: list[int], body: Body) -> Any:
        """Trace the step, and run it without keeping its graph."""
        target = self._target
        target.sums.begin()
        if self._strict:
            self._finish()
            with undoing(target.state):
                outputs = target.trace(body, inputs, target.trace_seeds(seeds), self._watch())
        else:
            # To watch takes time, and nobody wants to know.
            outputs = target.trace(body, inputs, target.trace_seeds(seeds), nullcontext())
        return target.launch(outputs, self.traced_because)

    def _capture(self, key: Hashable, inputs: list[Tensor], seeds: list[int], body: Body) -> Any:
        """Trace the step and compile its graph, or show that it is the one there is; then run that graph."""
        target = self._target
        self._finish()
        graph = None
        began = perf_counter()
        with undoing(target.state):
            stored = target.state.begin_trace()  # before the watch, which would see it as work of the step
            key = self._named(key)
            earlier = self._graphs.get(key)
            watch = self._watch()
            capture = Capture(target, stored, inputs, seeds, watch, self._python_state)
            del stored  # the body may replace some of them
            obstacle = capture.trace(body)
            self.products = watch.products
            if obstacle:
                self._give_up(obstacle)
            else:
                graph = self._prove(key, capture)
        self.audits.captured(key, perf_counter() - began if graph is not None and graph is earlier else None)
        if obstacle:  # outside of `undoing`: what fails now has consumed the state
            return target.launch(capture.outputs, obstacle)
        return capture.outputs if graph is None else capture.settle(graph)

    def _prove(self, key: Hashable, capture: Capture) -> Graph | None:
        """Compare a trace with the one before it, compile its graph if it is new, and run it."""
        target = self._target
        earlier = self._graphs.get(key)
        doubtful = self._doubtful.pop(key, None)
        graph = capture.graph()
        if graph is None:  # the step gives back what it was given
            return None
        # A graph is replayed once two traces in a row agree: in the graph, and in what the Python leaves behind.
        unproven = _ONCE if earlier is None else earlier.difference(graph)
        variation = capture.variation()
        difference = variation or unproven
        if earlier is not None and doubtful is not None and difference:
            self._note_change(earlier, graph, difference, doubtful)
        self._varied = self._varied + 1 if variation else 0
        # After an audit the user's change, and not the step itself, may have made the difference: count anew.
        graph.differed = 0 if earlier is None or doubtful is not None else earlier.differed + 1
        if difference and max(self._varied, graph.differed) >= _ATTEMPTS:
            self._give_up(difference)
        if unproven:
            capture.compile(graph, self.cause if earlier is None else unproven)
            graph.operations = capture.operations() if target.placement.peak else 0
        if earlier is not None and not difference:  # the earlier object keeps its compiled figures and its sample
            graph = earlier
            graph.proven = True
        elif not self.traced_because:
            self._graphs[key] = graph
        state = target.state.tensors
        self.donated = sum(state[i].nbytes for i in graph.consumed)
        self.operations = graph.operations
        capture.run(graph, first=bool(unproven))
        return graph

    def _note_change(self, earlier: Graph, later: Graph, difference: str, doubtful: int) -> None:
        """Note that an audit has found another graph than the one that is replayed, and steps in doubt."""
        before = earlier.facts
        now = later.facts
        known = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
        if known:
            difference = f"{known[0]} changed (from {before.get(known[0])!r} to {now.get(known[0])!r})"
        self._new.refuse(
            f"the {self._target.role} step needs another graph than the one that is replayed: {difference}"
        )
        count_capture(difference)
        self.change = "" if not known and earlier.hash != later.hash else difference, doubtful

    def pop_change(self) -> tuple[str, int] | None:
        change = self.change
        self.change = None
        return change

    def _finish(self) -> None:
        """Wait until all is computed: memory that is still to be can't be told apart, nor gone back to."""
        target = self._target
        target.placement.launch("transfer")  # work that the user has left pending is none of the step's
        wait("capture")
        target.state.unalias(target.placement)

    def _watch(self) -> Watch:
        # A random number in the first traces is no fault: a layer may begin with one.
        refuses_draws = self._varied + 1 >= _ATTEMPTS or bool(self.traced_because)
        return Watch(self._strict, f"the {self._target.role} step", refuses_draws)

    def _give_up(self, cause: str) -> None:
        role = self._target.role
        self._strict.refuse(f"the {role} step can't be replayed: {cause}. {cure_for(cause)}")
        if self.jit_compile is True:
            raise ReplayError(f"jit_compile=True, but the {role} step can't be replayed: {cause}")
        self.traced_because = cause
        self.forget()
        if cause not in self._told:
            self._told.add(cause)
            slow = f"the {role} step is traced anew on every call, which is slow, because {cause}"
            warn(f"{slow}. {cure_for(cause)}", again=True)  # of another model too
