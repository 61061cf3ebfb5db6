"""Run a step as one XLA graph: traced once, then replayed.

torch_xla traces the Python of a step on every call, which for a real network takes longer than the step itself. Here a
step's first run is traced, compiled, and started as a graph of known inputs and outputs. Its second run is traced once
more; only if that gives the same graph with the same constants, from another batch and seed, is the graph
replayed from then on, without any of the step's Python. Whatever can't be shown to be equal is traced on every call.
"""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from ..errors import ReplayError, StateLostError
from . import counters as report
from .devices import platform
from .placement import Placement
from .strict import LENIENT, Strict
from .trace_watch import Watch
from .transfer import copy_into, swap_value, to_host

# How many traces in a row may differ from the one before until a step counts as one that can't be replayed. One differs
# without fault where a module builds a cache in its first forward pass.
_ATTEMPTS = 3

# XLA:CPU waits for a step that is given memory, which costs a fifth of a small one: there it is done from so many bytes
# on. Elsewhere it is free.
_WORTH_GIVING = 1 << 24

_ONCE = "it has only been traced once"

_tracing = False
_capture_began: float | None = None


def tracing() -> bool:
    """Whether a step is being traced right now: then a value on the device can't be read without breaking its graph."""
    return _tracing


def capture_began() -> float | None:
    """When the step that is being traced and compiled right now was begun, by `time.perf_counter`; else None."""
    return _capture_began


def launch(placement: Placement, role: str, cause: str = "") -> None:
    """Start everything that is pending on the device, without waiting for it.

    Args:
        placement: Where it is pending; nothing ever is on the host.
        role: What a graph that must be compiled for it is counted under.
        cause: Why it is needed.
    """
    if placement.on_host:
        return
    import torch_xla

    with report.role(role, cause):
        torch_xla._XLAC._xla_step_marker(str(placement.device), [], wait=False)


class DeviceState:
    """The tensors that training changes: weights, buffers, and the optimizer's.

    While graphs are replayed their values are held here, as a flat list, and the user's tensors are empty: on the meta
    device, where a read at the wrong moment is an error in Python, and not the end of the process.

    Args:
        tensors: The user's own tensor objects.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.tensors = list(tensors)
        self.values: list[Tensor] = []
        self.held = False
        self._lost: list[int] = []
        self._under_way: _UnderWay | None = None
        self._empty: list[Tensor] = []
        self._versions: list[int] = []  # of the user's tensors as they were given back

    @property
    def lost(self) -> list[int]:
        """Which values are lost with a step that failed on the device, by their places; usually none."""
        self.collect()
        return self._lost

    @property
    def touched(self) -> bool:
        """Whether user code has changed a tensor in place since they were given back."""
        return self._versions != [tensor._version for tensor in self.tensors]

    def hold(self) -> list[Tensor]:
        """Take the values out of the user's tensors. An interrupt leaves a state that `write_back` puts in order.

        Returns:
            What the user's tensors were; it is needed by nobody but a trace, which may still have to compute it.
        """
        # Not empty_like: like the device's own tensors, its results would drag a longer history along at each exchange.
        empty = self._empty or [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in self.tensors]
        self.values = [tensor.detach() for tensor in self.tensors]
        self.held, self._empty = True, []
        return [swap_value(tensor, nothing) for tensor, nothing in zip(self.tensors, empty, strict=True)]

    def replace(self, tensors: Iterable[Tensor]) -> None:
        """Go on with other tensors, while nothing is held."""
        self.tensors, self._empty = list(tensors), []

    def write_back(self) -> None:
        """Put the values back into the user's tensors. If it is interrupted, it may be called again.

        Raises:
            StateLostError: A step failed on the device after it had consumed them.
        """
        if self.lost:
            raise StateLostError(
                "the weights on the device are lost: a step failed there after it had consumed them. Load the last "
                "good ones with load_weights; the optimizer then begins anew"
            )
        if self.held:
            empty = [swap_value(tensor, value) for tensor, value in zip(self.tensors, self.values, strict=True)]
            self.values, self.held = [], False
            self._empty = empty if all(tensor.is_meta for tensor in empty) else []
            self._versions = [tensor._version for tensor in self.tensors]

    def expect(self, graph: _Graph, donates: bool) -> list[Any]:
        """A graph is about to be started.

        Args:
            graph: The graph.
            donates: Whether it consumes the values that it replaces.

        Returns:
            A list for whoever starts it: None as it is started, and then its outputs.
        """
        self._under_way = _UnderWay(graph.changed, donates, [])
        return self._under_way.outputs

    def collect(self) -> None:
        """Take the new values from the graph that was started last, once; or note what is lost because it failed."""
        if self._under_way is None:
            return
        changed, donates, outputs = self._under_way
        if len(outputs) == 2:
            values = _replaced(self.values, changed, outputs[1][: len(changed)])
            self.values, self._under_way = values, None
        else:
            lost = changed if donates and outputs else []
            self._lost, self._under_way = lost, None

    def lose(self, places: list[int]) -> None:
        """Note that values are lost, by their places."""
        self._lost = places

    def examine(self) -> None:
        """After an error, find out what is lost: no result of a failed step can be read. **This waits**, and reads."""
        import torch_xla

        tensors = self.values if self.held else self.tensors
        known = self.lost
        there = [i for i, tensor in enumerate(tensors) if tensor.device.type == "xla" and i not in known]
        pending = torch_xla._XLAC._check_tensor_need_materialization([tensors[i] for i in there]) if there else []
        for i, is_pending in zip(there, pending, strict=True):
            if not is_pending:  # an error in a step's Python may have left it half traced; that is not the device's
                try:
                    to_host([tensors[i]], "after an error")
                except RuntimeError:
                    self._lost = [*self._lost, i]

    def revive(self) -> None:
        """Let lost values count as there, because all of them are about to be replaced. Until then none may be read."""
        self.collect()
        self._lost = []
        self.write_back()


Body = Callable[[list[Tensor], Callable[[int], None]], Any]
"""`body(inputs, seed)`: the Python of one step or several. `seed(i)` begins the random numbers of the i-th. It changes
the state's tensors in place, replaces the sums, and returns a nest of tensors."""


class _UnderWay(NamedTuple):
    """A graph that is being started, what of the state it replaces, and whether it consumes that."""

    changed: list[int]
    donates: bool
    outputs: list[Any]


class Sums(Protocol):
    """Running sums. A step takes them in and gives new ones out; the old stay valid for whoever keeps them."""

    tensors: list[Tensor]
    """The sums as they stand."""

    begun: list[Tensor]
    """The sums that the step being traced began with, those that it made itself among them."""

    def begin(self) -> None:
        """A trace begins."""


@dataclass
class _Graph:
    """A compiled graph, and where its inputs come from and its outputs go."""

    hash: Any
    sources: list[tuple[str, int]]  # for each input which list it is in, and where
    constants: list[Tensor]
    changed: list[int]  # the outputs: first these state tensors,
    summed: list[int]  # then these sums,
    template: list[Any]  # then the tensors that are computed among these leaves of what the body returned,
    spec: TreeSpec
    escaped: int  # then so many that the body has left somewhere else
    pick: Callable[[list[Tensor]], Sequence[Tensor]] = field(init=False)
    seeds: list[int] = field(init=False)

    def arrange(self, sizes: dict[str, int]) -> None:
        """Turn sources into places in one list, given the sizes of its parts, so that picking inputs runs in C."""
        first, total = {}, 0
        for name, size in sizes.items():
            first[name], total = total, total + size
        places = [first[name] + i for name, i in self.sources]
        self.pick = itemgetter(*places) if len(places) > 1 else lambda pool: [pool[i] for i in places]
        self.seeds = sorted({i for name, i in self.sources if name == "seed"})

    def returned(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
        """What the body would have returned."""
        tensors = iter(outputs)
        leaves = [
            next(tensors) if leaf is _COMPUTED else inputs[leaf.index] if isinstance(leaf, _Input) else leaf
            for leaf in self.template
        ]
        return tree_unflatten(leaves, self.spec)


_COMPUTED = object()


@dataclass(frozen=True)
class _Input:
    """An input that the body returned as it was: a graph has no output for it."""

    index: int


class Program:
    """A step, and the graphs that its Python has been traced to.

    Args:
        placement: Where it runs.
        role: What its graphs are counted under: `"train"`, `"eval"` or `"predict"`.
        state: The tensors that it reads and changes.
        sums: The running sums.
        jit_compile: `"auto"`: replay what can be replayed. True: an error if it can't be. False: trace every call.
        donate: Whether the state's memory is given to its new values, so that it is needed only once. A small state's
            is not given where that costs time.
        inside: The context in which the body is traced.

    Attributes:
        python_state: Gives names and values of what the body might change in Python; it is called before and after a
            trace.
        traced_because: Why the step is traced on every call; empty as long as it isn't.
        products: In which formats the last trace computed matrix products.
        cause: Why the next graph is needed, for the report.
        met: The keys of all calls that have been traced.
        donated: How many bytes of the state a replay writes its new values over.
    """

    def __init__(
        self,
        *,
        placement: Placement,
        role: str,
        state: DeviceState,
        sums: Sums,
        jit_compile: str | bool = "auto",
        donate: bool = False,
        inside: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._placement, self._role = placement, role
        self._state, self._sums = state, sums
        self._jit_compile = jit_compile
        self._donate = donate and (platform() != "CPU" or sum(t.nbytes for t in state.tensors) >= _WORTH_GIVING)
        self.python_state: Callable[[], dict[str, Any]] = dict
        self._inside = inside
        self.products: set[torch.dtype] = set()
        self._graphs: dict[Hashable, _Graph] = {}
        self._proven: set[Hashable] = set()
        self._differed: Counter[Hashable] = Counter()  # traces in a row of one key that gave another graph
        self._varied = 0  # traces in a row, of whatever key, whose Python was another
        self.traced_because = "of jit_compile=False" if jit_compile is False else ""
        self._strict = LENIENT
        self.cause = ""
        self.met: set[Any] = set()
        self.donated = 0

    def replays(self, key: Hashable) -> bool:
        """Whether a call with this key runs none of the body's Python."""
        return key in self._proven

    def knows(self, key: Hashable) -> bool:
        """Whether a call with this key makes no new graph."""
        return self.replays(key) or self._placement.on_host or bool(self.traced_because)

    def forget(self) -> None:
        """Forget all graphs: the state has other tensors than they have."""
        self._graphs.clear()
        self._proven.clear()
        self._differed.clear()
        self._varied = 0

    def begin_pass(self, python_state: Callable[[], dict[str, Any]], strict: Strict) -> None:
        """Begin a pass over data.

        Args:
            python_state: Gives the names and values that the body might change in Python, before and after a trace.
            strict: The policy on whatever makes steps slow. If it is strict, a step that had been given up is tried
                again: the error shall name its line.
        """
        self.python_state, self._strict = python_state, strict
        if strict and self._jit_compile is not False:
            self.traced_because = ""

    def __call__(
        self,
        key: Hashable,
        inputs: list[Tensor],
        seeds: list[int],
        body: Body,
        pause: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> Any:
        """Run once, without waiting for the device.

        Args:
            key: All that the graph depends on but the values of tensors: shapes, modes, options.
            inputs: Batches and rates.
            seeds: One for each step.
            body: The Python of the steps, for a call that must be traced.
            pause: A context in which nothing else sends anything to the device.

        Returns:
            What the body returned; its tensors will hold values as soon as the device has got to them.
        """
        global _capture_began
        if key in self._proven:
            return self._replay(self._graphs[key], inputs, seeds)
        if self._placement.on_host:
            with torch.random.fork_rng(devices=[]):

                def seed(i: int) -> None:
                    torch.manual_seed(seeds[i])

                return body(inputs, seed)
        with pause(), report.timed("trace"):
            self._state.write_back()
            self.met.add(key)
            if self.traced_because:
                return self._run_traced(body, inputs, seeds)
            _capture_began = perf_counter()
            try:
                return self._prove(key, inputs, seeds, body)
            finally:
                _capture_began = None

    def _trace(self, body: Body, inputs: list[Tensor], seeds: list[int], watch: AbstractContextManager[object]) -> Any:
        """Run the body over lazy tensors."""
        import torch_xla

        global _tracing
        device = str(self._placement.device)
        self._sums.begin()
        _tracing = True
        try:
            # In this thread: if a backward pass ran on the CPU before torch_xla was imported, autograd has no thread
            # for its device, and ends in an internal error.
            with self._inside(), watch, torch.autograd.set_multithreading_enabled(False):
                return body(inputs, lambda i: torch_xla._XLAC._xla_set_rng_seed(seeds[i], device))
        finally:
            _tracing = False

    def _run_traced(self, body: Body, inputs: list[Tensor], seeds: list[int]) -> Any:
        """Trace the step and run it."""
        if self._strict:
            self._finish()
            with self._going_back_to(_same_memory(self._state.tensors)):
                outputs = self._trace(body, inputs, seeds, self._watch())
        else:
            outputs = self._trace(body, inputs, seeds, nullcontext())  # nobody needs to watch it, which takes time
        return self._launch(outputs)

    def _finish(self) -> None:
        """Wait until all is computed: memory that is still to be can't be told apart, nor gone back to."""
        import torch_xla

        launch(self._placement, "transfer")  # what the user has left pending is none of the step's
        with report.waiting("capture"):
            torch_xla._XLAC._xla_wait_device_ops([])

    def _launch(self, outputs: Any) -> Any:
        """Run what has been traced. If it fails, nothing of the trace may stay pending; what it changed is lost."""
        import torch_xla

        try:
            launch(self._placement, self._role, f"it is traced anew on every call, because {self.traced_because}")
        except BaseException:
            state = self._state.tensors
            waiting = torch_xla._XLAC._check_tensor_need_materialization(state) if state else []
            self._state.lose([i for i, is_waiting in enumerate(waiting) if is_waiting])
            returned = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
            _empty([*returned, *self._sums.tensors, *(state if self._state.lost else ())])
            raise
        return outputs

    def _prove(self, key: Hashable, inputs: list[Tensor], seeds: list[int], body: Body) -> Any:
        """Trace the step and compile its graph, or show that it is the one there is; then run that graph."""
        import torch_xla
        from torch_xla.utils.buffer_donor_context import alias_with_buffer_donor_config

        xla, state, sums = torch_xla._XLAC, self._state.tensors, self._sums
        self._finish()
        self._part()
        earlier = self._graphs.get(key)
        places = _places({"state": state, "sum": sums.tensors, "input": inputs})
        python, looked, fallen = self.python_state(), report.looked_at(), report.fallen()
        before = _same_memory(state)  # to go back to
        watch = self._watch()
        with self._going_back_to(before):
            outputs = self._trace(body, inputs, seeds, watch)
            self.products = watch.products
            cause = self._obstacle(looked, fallen, watch)
            if cause:
                self._give_up(cause)
        if cause:
            return self._launch(outputs)

        places = _places({"sum": sums.begun}) | places  # with those sums that the step made
        leaves, spec = tree_flatten(outputs)
        template = [_kind(leaf, places) for leaf in leaves]
        returned = [leaf for leaf, kind in zip(leaves, template, strict=True) if kind is _COMPUTED]
        waiting = xla._check_tensor_need_materialization(state) if state else []
        changed = [i for i, is_waiting in enumerate(waiting) if is_waiting]
        added = xla._check_tensor_need_materialization(sums.tensors) if sums.tensors else []
        summed = [i for i, is_waiting in enumerate(added) if is_waiting]
        roots = [*(state[i] for i in changed), *(sums.tensors[i] for i in summed), *returned]
        escaped = _pending_elsewhere(roots)
        roots += escaped
        if not roots:  # it gives back what it was given, and there is nothing to run
            return outputs
        with self._going_back_to(before), alias_with_buffer_donor_config():
            _, values = xla._get_tensors_xla_device_data_node(roots)
            sources, constants = _recognise(values, places, seeds)
            if self._donate:  # only what is replaced: a donated tensor is gone
                for value, (name, i) in zip(values, sources, strict=True):
                    if name == "state" and i in changed:
                        xla._set_buffer_donation(value, True)
            graph = _Graph(
                hash=xla._get_graph_hash(roots),
                sources=sources,
                constants=constants,
                changed=changed,
                summed=summed,
                template=template,
                spec=spec,
                escaped=len(escaped),
            )
            unproven = _ONCE if earlier is None else _difference(earlier, graph)
            varies = self._varies(python, watch)
            difference = varies or unproven
            if self._is_hopeless(key, varies, difference):
                self._give_up(difference)
            if unproven:
                with report.role(self._role, self.cause if earlier is None else unproven):
                    xla._xla_warm_up_cache(roots, [])
        if not difference:
            assert earlier is not None
            graph = earlier
            self._proven.add(key)
        else:
            sizes = {"state": len(state), "sum": len(sums.begun), "input": len(inputs), "seed": len(seeds)}
            graph.arrange(sizes | {"constant": len(constants)})
            if not self.traced_because:
                self._graphs[key] = graph

        self.donated = sum(state[i].nbytes for i in changed) if self._donate else 0
        taken = self._state.hold()
        left = [taken[i] for i in changed]
        with self._going_back_to(before):
            results = self._run(graph, values, first=bool(unproven))
        # Nothing may stay pending: it would be computed from memory that is no longer there. What the body returned, or
        # left elsewhere, loses its history, which keeps more of the trace alive; the state's own may be kept alive by
        # the history of others.
        for tensor, i in zip(left, changed, strict=True):
            tensor.data = self._state.values[i]
        for tensor, value in zip([*returned, *escaped], results, strict=True):
            swap_value(tensor, value, requires_grad=False)
        return outputs

    def _replay(self, graph: _Graph, inputs: list[Tensor], seeds: list[int]) -> Any:
        if not self._state.held:
            self._settle()
            self._state.hold()
        tensors: list[Any] = [None] * len(seeds)
        for i in graph.seeds:
            tensors[i] = self._seed(seeds[i])
        pool = [*self._state.values, *self._sums.tensors, *inputs, *tensors, *graph.constants]
        return graph.returned(self._run(graph, list(graph.pick(pool))), inputs)

    def _run(self, graph: _Graph, inputs: list[Tensor], first: bool = False) -> list[Tensor]:
        """Start the graph, put its results where they belong, and give back those that the body returned.

        What has no room usually fails the first time: that is waited for where the state can still be gone back to.
        """
        import torch_xla

        state, sums = self._state, self._sums
        outputs = state.expect(graph, self._donate)
        # One call in C: no handler of a signal runs between the graph's start and its outputs being in the list, so
        # that an interrupt can't lose them when what they replace has been consumed.
        outputs.extend(chain([None], map(torch_xla._XLAC._run_cached_graph, [graph.hash], [inputs])))
        if first and outputs[1] and not (self._donate and graph.changed):
            try:
                to_host([min(outputs[1], key=torch.numel)], "capture")
            except RuntimeError:
                del outputs[1]
                raise
        state.collect()
        out: list[Tensor] = outputs[1]
        middle, end = len(graph.changed), len(graph.changed) + len(graph.summed)
        sums.tensors = _replaced(sums.tensors, graph.summed, out[middle:end])
        return out[end:]

    @contextmanager
    def _going_back_to(self, before: list[Tensor]) -> Iterator[None]:
        """If the step can't be traced, compiled or run: undo it, so that the state is what it was, and nothing pends.

        What stayed pending, because the error's traceback holds it, would be tried again with whatever is started next.
        """
        import torch_xla

        try:
            yield
        except BaseException:
            state = self._state
            if not state.held:
                state.hold()
            _empty(_pending_elsewhere(()))
            if not state.lost:
                for value in before:
                    torch_xla._XLAC._set_buffer_donation(value, False)
                state.values = before.copy()
                before.clear()  # in the traceback they would go on sharing the state's memory
                state.write_back()
            raise

    def _settle(self) -> None:
        """Finish what the user's code has begun to do to the state: a graph takes only finished values."""
        import torch_xla

        is_pending = any(torch_xla._XLAC._check_tensor_need_materialization(self._state.tensors))
        if is_pending:
            launch(self._placement, "transfer")
        if is_pending or self._state.touched:
            with report.waiting("changed weights"):
                torch_xla._XLAC._xla_wait_device_ops([])
            self._part()

    def _part(self) -> None:
        """Give tensors that share memory, as one does that was copied from another, memory that can be given away.

        What is still to be computed must have been waited for: it has no memory yet.
        """
        import torch_xla

        tensors = self._state.tensors
        handles = torch_xla._XLAC._get_tensors_handle(tensors) if tensors else []
        if len(set(handles)) < len(handles):
            first = dict(zip(reversed(handles), reversed(tensors), strict=True))
            doubles = [t for t, handle in zip(tensors, handles, strict=True) if t is not first[handle]]
            copy_into(doubles, to_host(doubles, "changed weights"), self._placement)

    def _seed(self, seed: int) -> Tensor:
        import torch_xla

        device = str(self._placement.device)
        torch_xla._XLAC._xla_set_rng_seed(seed, device)
        tensor: Tensor = torch_xla._XLAC._get_base_seed_as_tensor(device)
        return tensor

    def _is_hopeless(self, key: Hashable, varies: str, difference: str) -> bool:
        """Note in what a trace differed from the one before; whether it has been too often."""
        self._varied = self._varied + 1 if varies else 0
        if difference:
            self._differed[key] += key in self._graphs
        return bool(difference) and max(self._varied, self._differed[key]) >= _ATTEMPTS

    def _watch(self) -> Watch:
        # A random number in the first traces is no fault: a layer may begin with one.
        draws = self._varied + 1 >= _ATTEMPTS or self.traced_because
        return Watch(self._strict, f"the {self._role} step", bool(draws))

    def _obstacle(self, looked: int, fallen: Counter[str], watch: Watch) -> str:
        """Why no trace of the step can be replayed, or nothing."""
        if watch.where or report.looked_at() != looked:
            operations = sorted(report.fallen() - fallen)
            if operations and not watch.where:
                where = sorted(set(watch.fell.values()))
                called = f", called at {' and '.join(where)}" if where else ""
                return (
                    f"it reads a value from the device: torch_xla runs {' and '.join(operations)} on the host{called}"
                )
            return f"it reads a value from the device{watch.where and f' at {watch.where}'}"
        if [(t.shape, t.dtype) for t in self._sums.begun] != [(t.shape, t.dtype) for t in self._sums.tensors]:
            return "its running sums change their shape or dtype"
        return ""

    def _varies(self, python: dict[str, Any], watch: Watch) -> str:
        """Why the step just traced may be another the next time, even if its graph is the same; or nothing.

        The first time it may be without fault: a cache is built, a layer begins with the statistics of its first batch.
        """
        after = self.python_state()
        changed = sorted(name for name in python.keys() | after.keys() if python.get(name) != after.get(name))
        if changed:
            return f"its Python changes {changed[0]} (from {python.get(changed[0])!r} to {after.get(changed[0])!r})"
        return watch.drew and f"its Python draws random numbers at {watch.drew}"

    def _give_up(self, cause: str) -> None:
        self._strict.refuse(f"the {self._role} step can't be replayed: {cause}")
        if self._jit_compile is True:
            raise ReplayError(f"jit_compile=True, but the {self._role} step can't be replayed: {cause}")
        self.traced_because = cause
        self.forget()
        warnings.warn(
            f"the {self._role} step is traced anew on every call, which is slow, because {cause}", stacklevel=2
        )


def _replaced(values: list[Tensor], places: list[int], new: list[Tensor]) -> list[Tensor]:
    """A list with new values at some places; usually at all of them."""
    if len(new) == len(values):
        return new
    values = list(values)
    for i, value in zip(places, new, strict=True):
        values[i] = value
    return values


def _pending_elsewhere(roots: Sequence[Tensor]) -> list[Tensor]:
    """Tensors that a trace has left without a value in a place of the user's: an attribute, a list, a closure.

    They become outputs of the graph. Left pending they would be computed from memory that the graph has reused.
    """
    import torch_xla

    known = {id(root) for root in roots}
    objects = [o for o in gc.get_objects() if issubclass(type(o), Tensor) and id(o) not in known]
    tensors = [t for t in objects if t.is_xla]  # unlike `device`, it is also there for a tensor that is not
    if not tensors:
        return []
    waiting = torch_xla._XLAC._check_tensor_need_materialization(tensors)
    found = [tensor for tensor, is_waiting in zip(tensors, waiting, strict=True) if is_waiting]
    return sorted(found, key=torch_xla._XLAC._xla_get_tensor_id)  # the order of their making


def _kind(leaf: Any, places: dict[int, tuple[str, int]]) -> Any:
    """What a leaf of the body's result is at the next run: computed anew, an input, or what it is now."""
    if not isinstance(leaf, Tensor) or leaf.device.type != "xla":
        return leaf
    import torch_xla

    if torch_xla._XLAC._check_tensor_need_materialization([leaf])[0]:
        return _COMPUTED
    name, index = places.get(torch_xla._XLAC._get_tensors_handle([leaf])[0], ("", 0))
    return _Input(index) if name == "input" else leaf


def _places(lists: dict[str, list[Tensor]]) -> dict[int, tuple[str, int]]:
    """Where tensors are, by the identity of their memory on the device."""
    import torch_xla

    return {
        handle: (name, i)
        for name, tensors in lists.items()
        if tensors
        for i, handle in enumerate(torch_xla._XLAC._get_tensors_handle(tensors))
    }


def _empty(tensors: Iterable[Tensor]) -> None:
    """Take the values out of tensors, and what is pending with them, whoever else holds the tensors."""
    for tensor in tensors:
        # One that only another's history kept may have ended with it, and not even have a device any more.
        if tensor.is_xla:  # type: ignore[attr-defined]
            swap_value(tensor, torch.empty_like(tensor, device="meta"), requires_grad=False)


def _same_memory(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Other tensors over the memory that these have now, on the device."""
    import torch_xla

    xla = torch_xla._XLAC
    if not tensors:
        return []
    _, values = xla._get_tensors_xla_device_data_node(tensors)
    by_handle = dict(zip(xla._get_tensors_handle(values), values, strict=True))
    return [by_handle[handle] for handle in xla._get_tensors_handle(tensors)]


def _recognise(
    values: Sequence[Tensor], places: dict[int, tuple[str, int]], seeds: Sequence[int]
) -> tuple[list[tuple[str, int]], list[Tensor]]:
    """Find out what each input of a graph is: known by its memory, a seed by its value, or else a constant."""
    import torch_xla

    sources: list[tuple[str, int]] = []
    constants: list[Tensor] = []
    for value, handle in zip(values, torch_xla._XLAC._get_tensors_handle(values) if values else [], strict=True):
        place = places.get(handle)
        if place is None and value.dtype is torch.int64 and value.dim() == 0:
            number = int(_peek(value))
            place = ("seed", seeds.index(number)) if number in seeds else None
        if place is None:
            place = ("constant", len(constants))
            constants.append(value)
        sources.append(place)
    return sources, constants


def _difference(earlier: _Graph, later: _Graph) -> str:
    """In what two traces of one step differ, or nothing."""
    if earlier.hash != later.hash:
        return "two traces of it gave different graphs: its Python depends on something that changes"
    parts = ("sources", "changed", "summed", "escaped")
    if any(getattr(earlier, part) != getattr(later, part) for part in parts):
        return "two traces of it used different tensors"
    for one, other in zip(earlier.constants, later.constants, strict=True):
        if not torch.equal(_bits(one), _bits(other)):
            return (
                f"a number that its Python computes changed between two traces (from {_shown(one)} to {_shown(other)})"
            )
    return ""


def _bits(constant: Tensor) -> Tensor:
    """A constant's memory: NaN is equal to itself here."""
    return _peek(constant).reshape(-1).view(torch.uint8)


def _shown(constant: Tensor) -> str:
    return f"{_peek(constant).item():.6g}" if constant.numel() == 1 else f"a tensor of shape {tuple(constant.shape)}"


def _peek(constant: Tensor) -> Tensor:
    """A constant of a graph on the host. It has long been there, so that this waits for no step."""
    import torch_xla

    value: Tensor = torch_xla._XLAC._xla_get_cpu_tensors([constant])[0]
    return value
