"""`CapturedProgram`: runs a step as one XLA graph, traced once and then replayed.

Tracing the Python of a step on every call takes longer than a real network's step. Here a step's first run is traced,
compiled, and started as a graph of known inputs and outputs. Its second run is traced again. Only if this trace gives
the same graph with the same constants, from another batch and seed, is the graph replayed from then on, without the
step's Python. A step whose traces differ is traced on every call.

Now and then a replay is audited, see `replay_audits`: the step is traced again only to compare. If the graphs differ,
something has changed that its Python reads, and the step is captured again.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from time import perf_counter
from typing import Any

from torch import Tensor

from ..backend import AttentionForms, Body, Program, Sums
from ..backend.program import Pause
from ..errors import ReplayError
from ..utils.counters import count_capture, timed
from ..utils.strict import LENIENT, Strict
from ..utils.user_code import warn
from .capture import Before, Capture, note_before, undoing
from .device_state import HeldState
from .driver import driver
from .graph import Graph
from .pending_tensors import drop, find_pending_elsewhere, noting_new, wait
from .placement import CorePlacement
from .replay_audits import Audits
from .slow_steps import explain_slowness, find_cure
from .trace_context import tracing_with
from .trace_target import Target
from .trace_view import lending, showing
from .trace_watch import Glance, Watch
from .traced_graph import StartedGraph

# The number of consecutive traces that may differ from the previous trace before a step counts as not replayable.
# A single difference is harmless, e.g. where a module builds a cache in its first forward pass.
_ATTEMPTS = 3

_ONCE = "it has only been traced once"


class CapturedProgram(Program):
    """A step, and the graphs of its traces.

    Args:
        placement: The cores that it runs on.
        role: The role for which its graphs are counted: `"train"`, `"eval"` or `"predict"`.
        state: The tensors that it reads and changes.
        sums: The running sums.
        jit_compile: `"auto"`: replay if possible. True: raise an error if not. False: trace every call.
        donate: True to write the new state over the old, so that memory has only one copy; a CPU does so only for a
            large state, see `Driver.donates_from`.
        attention: The forms of attention that the user has requested.
        matmul_precision: The precision of float32 matrix products.
        python_state: Returns the names and values that the body might change in Python, before and after a trace.
        kept: Returns the tensors on the device that the user's Python keeps, by name.

    Attributes:
        audits: Decides which replays are audited.
        change: A description of the change that the last audit has found ("" if unknown), and the number of steps that
            may have missed it; None without a change, or after `pop_change`.
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
        attention: AttentionForms,
        matmul_precision: str = "default",
        python_state: Callable[[], dict[str, Any]] = dict,
        kept: Callable[[], Mapping[str, Tensor]] = dict,
    ) -> None:
        super().__init__(jit_compile)
        donates = donate and sum(t.nbytes for t in state.tensors) >= placement.donates_from
        self._target = Target(placement, role, state, sums, donates, attention, kept)
        state.may_be_donated |= donates and placement.runs  # a preflight only records, and its device can't copy
        self._strict = self._new_graphs = LENIENT
        self.audits = Audits(in_lockstep=placement.hosts > 1)
        self.change: tuple[str, int] | None = None
        self._matmul_precision = matmul_precision
        self._variables: tuple[str, ...] = ()
        self._python_state = python_state
        self._graphs: dict[Hashable, Graph] = {}
        self._doubtful: dict[Hashable, int] = {}  # the doubtful steps of graphs that an audit has refuted
        self._varied = 0  # consecutive traces, of any keys, whose Python state varied
        self.traced_because = "of jit_compile=False" if jit_compile is False else ""
        self._met_obstacle = False  # True if the step can't be traced as a whole, because its Python reads a value
        self._compared: set[Hashable] = set()  # the keys of graphs that an audit in this `fit` has compared in full
        self._warned: set[str] = set()  # the causes of past warnings

    def prepare_replay(self, key: Hashable) -> bool:
        proven = self._has_proven(key)
        if proven and not self._target.state.held:
            self._hold()
            proven = self._has_proven(key)  # user code may have let other tensors share memory
        return proven

    def _has_proven(self, key: Hashable) -> bool:
        graph = self._graphs.get(self._make_graph_key(key))
        return graph is not None and graph.proven

    def _make_graph_key(self, key: Hashable) -> Hashable:
        """Return the key of a graph: the key of its call, and the state's tensors that share memory when it starts."""
        aliases = self._target.state.aliases
        return (key, aliases) if aliases else key

    def audit_due(self, key: Hashable, remaining: int | None) -> bool:
        named = self._make_graph_key(key)
        return self.audits.is_due(named, remaining) or self._graphs[named].superseded

    @property
    def captures(self) -> bool:
        return not self.traced_because

    @property
    def runs_eagerly(self) -> bool:
        return self._met_obstacle and not driver().is_lazy

    def note_user_code(self, every_batch: bool) -> None:
        self.audits.note_user_code(every_batch)

    def forget(self) -> None:
        self._graphs.clear()
        self._doubtful.clear()
        self._varied = 0

    def try_again(self) -> None:
        if self.jit_compile is not False:
            self.traced_because = ""
        self._met_obstacle = False
        self._compared.clear()

    def begin_pass(self, strict: Strict, new_graphs: Strict) -> None:
        self._strict = strict
        self._new_graphs = new_graphs
        self.audits.begin_pass()
        if self._variables != driver().variables():  # the graphs were lowered with other values
            self._variables = driver().variables()
            self.forget()

    def __call__(
        self,
        key: Hashable,
        inputs: list[Tensor],
        seeds: list[int],
        body: Body,
        pause: Pause = nullcontext,
    ) -> Any:
        checking = nullcontext() if key in self.traced_keys else driver().checking_shapes()
        with pause(), timed("trace"), driver().lowering(self._matmul_precision), checking:
            self._target.state.write_back()
            self.traced_keys.add(key)
            if self.traced_because:
                return self._trace(inputs, seeds, body)
            with tracing_with(began=perf_counter()):
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
        key = self._make_graph_key(key)
        graph = self._graphs[key]
        reference = graph
        if sample is not None and graph.sample is not None:
            reference = graph.sample
            body = sample
        if graph.escaped:  # tensors that it stores elsewhere must be computed
            graph.proven = False
            self._doubtful[key] = self.audits.count_doubtful_steps(key)
            return
        with pause(), timed("audit"), driver().lowering(self._matmul_precision):
            self._hold()
            wait("audit")  # pending tensors have no memory to identify
            began = perf_counter()  # from here on the device is idle
            watch: Glance | Watch = Glance()
            # Compared in full once in a `fit`. The outline ignores which of several inputs of one shape an operation
            # takes, if the order of inputs is the same. The full comparison takes as long as a trace.
            thorough = key not in self._compared
            difference = self._compare(reference, inputs, seeds, body, watch, thorough)
            if difference != "" or watch.may_have_drawn:  # a `Watch` tells reads and draws of other threads apart
                watch = self._watch()
                difference = self._compare(reference, inputs, seeds, body, watch, thorough)
        if difference is None and not watch.traced_code_reads:
            self.audits.note_disturbed_audit(key)
            return
        agreed = difference == "" and not watch.may_have_drawn
        if agreed:
            self._compared.add(key)
        if not agreed:
            graph.proven = False
            self._doubtful[key] = self.audits.count_doubtful_steps(key)
        self.audits.note_audit(key, perf_counter() - began, agreed)

    def _compare(
        self, graph: Graph, inputs: list[Tensor], seeds: list[int], body: Body, watch: Glance | Watch, thorough: bool
    ) -> str | None:
        """Trace a step without running it, and describe how its graph differs; None if a value was read."""
        try:
            with self._tracing_without_running(inputs, seeds, watch) as (before, new):
                capture = None
                try:
                    capture = before.trace(body, new)
                except Exception as error:  # the capture that follows raises the step's error again
                    difference = f"its trace failed: {error}"
                if capture is None:
                    before.compute_stored(new)
                else:
                    difference = capture.obstacle or capture.find_difference(graph, thorough)
                    capture.compute_escaped()
        except RuntimeError:  # the runtime fails if another thread reads a tensor of the trace
            if not watch.describe_read():
                raise
            return None
        return None if watch.describe_read() else difference

    @contextmanager
    def _tracing_without_running(
        self, inputs: list[Tensor], seeds: list[int], watch: Glance | Watch
    ) -> Iterator[tuple[Before, list[Tensor]]]:
        """A context for a trace that isn't run; all changes are undone at its end.

        It yields what is known before the trace, and a list for the tensors that the trace makes.
        """
        target = self._target
        new: list[Tensor] = []
        try:
            with driver().tracing(), lending(target.state) as view:
                yield note_before(target, view, inputs, seeds, watch, self._python_state), new
        finally:
            # Other references to the trace's tensors, e.g. in another thread, get no values: nothing computes them.
            drop(find_pending_elsewhere(target.state.tensors, new))
            target.sums.roll_back()

    def lacks_sample(self, key: Hashable) -> bool:
        graph = self._graphs[self._make_graph_key(key)]
        return graph.sample is None and not graph.escaped

    def trace_sample(
        self,
        key: Hashable,
        inputs: list[Tensor],
        seeds: list[int],
        sample: Body,
        pause: Pause = nullcontext,
    ) -> None:
        with pause(), timed("audit"), driver().lowering(self._matmul_precision):
            self._hold()
            wait("audit")
            with self._tracing_without_running(inputs, seeds, Glance()) as (before, new):
                capture = before.trace(sample, new)
                self._graphs[self._make_graph_key(key)].sample = (
                    None if capture.obstacle else capture.build_for_comparison()
                )
                capture.compute_escaped()

    def _hold(self) -> None:
        """Take the state's values out of the user's tensors."""
        state = self._target.state
        if not state.held:
            state.compute_changes(self._target.placement)
            state.hold()

    def replay(self, key: Hashable, inputs: list[Tensor], seeds: list[int]) -> Any:
        key = self._make_graph_key(key)
        graph = self._graphs[key]
        target = self._target
        self.operations = graph.operations
        self.audits.note_replay(key, len(seeds))
        state = target.state
        sums = target.sums
        drawn = driver().seed_tensors(target.placement, seeds, graph.places) if graph.places else []
        pool = [*state.values, *sums.tensors, *inputs, *drawn, *graph.constants]
        outputs = graph.run(state, sums, list(graph.pick(pool)), target.placement)
        return graph.rebuild_result(outputs, inputs)

    def _trace(self, inputs: list[Tensor], seeds: list[int], body: Body) -> Any:
        """Trace the step, and run it without keeping its graph."""
        target = self._target
        if not driver().is_lazy and not self._met_obstacle:
            return self._run_traced(inputs, seeds, body)
        target.sums.begin()
        # Without strict, there is no watch, which takes time and isn't needed.
        watch = self._watch() if self._strict else nullcontext()
        if self._strict:
            self._finish_pending_work()
        new: list[Tensor] = []
        with undoing(target.state) if self._strict else nullcontext(), noting_new(new):
            outputs = target.trace(body, inputs, target.trace_seeds(seeds), watch)
        return target.launch(outputs, new, self.traced_because)

    def _run_traced(self, inputs: list[Tensor], seeds: list[int], body: Body) -> Any:
        """Trace the step on a runtime that isn't lazy, so that its numbers equal a replay's."""
        target = self._target
        self._finish_pending_work()
        with driver().tracing():
            with undoing(target.state), showing(target.state) as view:
                capture = note_before(target, view, inputs, seeds, self._watch(), dict).trace(body, [])
                self._met_obstacle = bool(capture.obstacle)
                if capture.obstacle and target.placement.has_mesh:
                    raise ReplayError(_explain_several_graphs(target.role, capture.obstacle))
            return capture.launch(self.traced_because)

    def _capture(self, key: Hashable, inputs: list[Tensor], seeds: list[int], body: Body) -> Any:
        """Trace the step, compile its graph unless it equals the earlier graph, and run it."""
        self._finish_pending_work()
        with driver().tracing():
            return self._capture_traced(key, inputs, seeds, body)

    def _capture_traced(self, key: Hashable, inputs: list[Tensor], seeds: list[int], body: Body) -> Any:
        target = self._target
        started = None
        began = perf_counter()
        # The view comes before the watch, which would count it as work of the step.
        with undoing(target.state), showing(target.state) as view:
            key = self._make_graph_key(key)
            earlier = self._graphs.get(key)
            watch = self._watch()
            capture = note_before(target, view, inputs, seeds, watch, self._python_state).trace(body, [])
            self.products = watch.products
            if capture.obstacle:
                self._met_obstacle = True
                self._give_up(capture.obstacle)
            else:
                started = self._prove(key, capture)
        known = started is not None and started.graph is earlier
        self.audits.note_capture(key, perf_counter() - began if known else None)
        if capture.obstacle:  # outside of `undoing`, because a failure now has consumed the state
            return capture.launch(capture.obstacle)
        return capture.outputs if started is None else started.fill_tensors()

    def _prove(self, key: Hashable, capture: Capture) -> StartedGraph | None:
        """Compare a trace with the previous trace, compile its graph if it is new, and start it."""
        target = self._target
        earlier = self._graphs.get(key)
        doubtful = self._doubtful.pop(key, None)
        traced = capture.build()
        if traced is None:  # the step returns its inputs unchanged
            return None
        graph = traced.graph
        # A graph is replayed once a trace gives the same graph as the previous trace, and changes no state in Python.
        unproven = _ONCE if earlier is None else capture.compare(earlier, graph)
        variation = capture.explain_variation()
        difference = variation or unproven
        if earlier is not None and doubtful is not None and difference:
            self._note_change(earlier, graph, difference, doubtful)
        self._varied = self._varied + 1 if variation else 0
        # After an audit the difference may come from the user's change instead of the step, so the count restarts.
        graph.differed = 0 if earlier is None or doubtful is not None else earlier.differed + 1
        if difference and max(self._varied, graph.differed) >= _ATTEMPTS:
            self._give_up(difference)
        if unproven:
            traced.compile(self.cause if earlier is None else unproven)
            graph.operations = traced.count_operations() if target.placement.peak else 0
        if earlier is not None and not difference:  # keep the earlier object, which has its operations and its sample
            graph = earlier
            graph.proven = True
        elif not self.traced_because:
            self._graphs[key] = graph
        state = target.state.tensors
        self.donated = sum(state[i].nbytes for i in graph.consumed)
        self.operations = graph.operations
        return traced.start(graph, first=bool(unproven))

    def _note_change(self, earlier: Graph, later: Graph, difference: str, doubtful: int) -> None:
        """Note that an audit has found a different graph, and the number of doubtful steps."""
        before = earlier.facts
        now = later.facts
        known = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
        if known:
            difference = f"{known[0]} changed (from {before.get(known[0])!r} to {now.get(known[0])!r})"
        self._new_graphs.refuse(
            f"the {self._target.role} step needs another graph than the one that is replayed: {difference}"
        )
        count_capture(difference)
        self.change = "" if not known and earlier.hash != later.hash else difference, doubtful

    def pop_change(self) -> tuple[str, int] | None:
        change = self.change
        self.change = None
        return change

    def _finish_pending_work(self) -> None:
        """Wait until everything is computed, because pending tensors have no memory to identify or restore."""
        target = self._target
        target.placement.launch("transfer")  # the user's pending work doesn't belong to the step
        wait("capture")
        target.state.unalias(target.placement)
        target.state.find_state_aliases(target.placement)

    def _watch(self) -> Watch:
        # A random number in the first traces is harmless, e.g. for a layer's initial values.
        refuses_draws = self._varied + 1 >= _ATTEMPTS or bool(self.traced_because)
        return Watch(self._strict, f"the {self._target.role} step", refuses_draws)

    def _give_up(self, cause: str) -> None:
        role = self._target.role
        self._strict.refuse(f"the {role} step can't be replayed: {cause}. {find_cure(cause)}")
        if self.runs_eagerly and self._target.placement.has_mesh:
            raise ReplayError(_explain_several_graphs(role, cause))
        if self.jit_compile is True:
            cure = f"{find_cure(cause)}. Or trace it at every step, with jit_compile='auto'"
            raise ReplayError(f"jit_compile=True, but the {role} step can't be replayed: {cause}. {cure}")
        self.traced_because = cause
        self.forget()
        if cause not in self._warned:
            self._warned.add(cause)
            warn(explain_slowness(role, cause, self.runs_eagerly), again=True)  # another model may have warned already


def _explain_several_graphs(role: str, cause: str) -> str:
    """Return an error message for a step that isn't a single graph, which several cores require."""
    return (
        f"the {role} step can't run on several cores of {driver().name}, which needs all of it as one graph: {cause}. "
        f"{find_cure(cause)}. Or compute on one core, with cores=1, or without graphs, with run_eagerly=True"
    )
