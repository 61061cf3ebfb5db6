"""`Program`: runs a step as one XLA graph, traced once and then replayed.

torch_xla traces the Python of a step on every call, which for a real network takes longer than the step itself. Here a
step's first run is traced, compiled, and started as a graph of known inputs and outputs. Its second run is traced once
more. Only if that gives the same graph with the same constants, from another batch and seed, is the graph replayed from
then on, without any of the step's Python. A step that can't be shown to be equal is traced on every call.
"""

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ..errors import ReplayError
from ..utils.users_code import warn
from . import counters
from .capture import Body, Capture, Target, capturing, undoing
from .device_state import DeviceState
from .devices import platform
from .draws import draw_seeds
from .graph import Graph, Sums
from .lazy import launch, wait
from .placement import Placement
from .strict import LENIENT, Strict
from .trace_watch import Watch, cure_of

# The number of traces in a row that may differ from the one before, until a step counts as one that can't be replayed.
# One differs without fault where a module builds a cache in its first forward pass.
_ATTEMPTS = 3

# XLA:CPU waits for a step that is given memory, which costs a fifth of a small one: there memory is given from this
# size of the state on, in bytes. Elsewhere it is free.
_WORTH_GIVING = 1 << 24

_ONCE = "it has only been traced once"


class Program:
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

    Attributes:
        jit_compile: The argument.
        python_state: Gives the names and values that the body might change in Python, before and after a trace.
        traced_because: The reason why the step is traced on every call; empty as long as it isn't.
        products: The formats in which the last trace computed matrix products.
        cause: The reason for the next graph, for the report.
        met: The keys of all calls that have been traced.
        donated: The size of the state that a replay writes over, in bytes.
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
        on_cpu = platform() == "CPU" and placement.recorder is None
        donates = donate and (not on_cpu or sum(t.nbytes for t in state.tensors) >= _WORTH_GIVING)
        self._target = Target(placement, role, state, sums, donates, inside)
        self.jit_compile, self._strict = jit_compile, LENIENT
        self.python_state: Callable[[], dict[str, Any]] = dict
        self.products: set[torch.dtype] = set()
        self._graphs: dict[Hashable, Graph] = {}
        self._varied = 0  # traces in a row, of whatever key, whose Python was another
        self.traced_because = "of jit_compile=False" if jit_compile is False else ""
        self._told: set[str] = set()  # the causes that were warned of
        self.cause = ""
        self.met: set[Any] = set()
        self.donated = 0

    def replays(self, key: Hashable) -> bool:
        """True if a call with this key runs none of the body's Python."""
        graph = self._graphs.get(key)
        return graph is not None and graph.proven

    def knows(self, key: Hashable) -> bool:
        """True if a call with this key makes no new graph."""
        return self.replays(key) or self._target.placement.on_host or bool(self.traced_because)

    def forget(self) -> None:
        """Forget all graphs: the state has other tensors than they have."""
        self._graphs.clear()
        self._varied = 0

    def try_again(self) -> None:
        """Try again to replay a step that was given up: another `fit` may have other data, or be strict."""
        if self.jit_compile is not False:
            self.traced_because = ""

    def begin_pass(self, python_state: Callable[[], dict[str, Any]], strict: Strict) -> None:
        """Begin a pass over data.

        Args:
            python_state: Gives the names and values that the body might change in Python, before and after a trace.
            strict: The policy on whatever makes steps slow.
        """
        self.python_state, self._strict = python_state, strict

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
            key: Everything that the graph depends on but the values of tensors: shapes, modes, options.
            inputs: Batches and rates.
            seeds: One for each step.
            body: The Python of the steps, for a call that must be traced.
            pause: Gives a context in which nothing else sends anything to the device.

        Returns:
            The body's result. Its tensors have values as soon as the device has computed them.
        """
        graph = self._graphs.get(key)
        if graph is not None and graph.proven:
            return self._replay(graph, inputs, seeds)
        if self._target.placement.on_host:
            self._target.sums.begin()
            with torch.random.fork_rng(devices=[]):

                def seed(i: int) -> None:
                    torch.manual_seed(seeds[i])

                return body(inputs, seed)
        with pause(), counters.timed("trace"):
            self._target.state.write_back()
            self.met.add(key)
            if self.traced_because:
                return self._trace(inputs, seeds, body)
            with capturing():
                return self._capture(key, inputs, seeds, body)

    def _replay(self, graph: Graph, inputs: list[Tensor], seeds: list[int]) -> Any:
        target = self._target
        state, sums = target.state, target.sums
        if not state.held:
            state.settle(target.placement)
            state.hold()
        drawn = draw_seeds(target.placement.device_name, seeds, graph.places) if graph.places else []
        pool = [*state.values, *sums.tensors, *inputs, *drawn, *graph.constants]
        outputs = graph.run(state, sums, list(graph.pick(pool)), start=target.start)
        return graph.returned(outputs, inputs)

    def _trace(self, inputs: list[Tensor], seeds: list[int], body: Body) -> Any:
        """Trace the step, and run it without keeping its graph."""
        target = self._target
        if self._strict:
            self._finish()
            with undoing(target.state):
                outputs = target.trace(body, inputs, target.draws(seeds), self._watch())
        else:
            # To watch takes time, and nobody wants to know.
            outputs = target.trace(body, inputs, target.draws(seeds), nullcontext())
        return target.launch(outputs, self.traced_because)

    def _capture(self, key: Hashable, inputs: list[Tensor], seeds: list[int], body: Body) -> Any:
        """Trace the step and compile its graph, or show that it is the one there is; then run that graph."""
        target = self._target
        self._finish()
        target.state.part(target.placement)
        graph = None
        with undoing(target.state):
            stored = target.state.begin_trace()  # before the watch, which would see it as work of the step
            watch = self._watch()
            capture = Capture(target, stored, inputs, seeds, watch, self.python_state)
            obstacle = capture.trace(body)
            self.products = watch.products
            if obstacle:
                self._give_up(obstacle)
            else:
                graph = self._prove(key, capture)
        if obstacle:  # outside of `undoing`: what fails now has consumed the state
            return target.launch(capture.outputs, obstacle)
        return capture.outputs if graph is None else capture.settle(graph)

    def _prove(self, key: Hashable, capture: Capture) -> Graph | None:
        """Compare a trace with the one before it, compile its graph if it is new, and run it."""
        target, earlier = self._target, self._graphs.get(key)
        graph = capture.graph()
        if graph is None:  # the step gives back what it was given
            return None
        unproven = _ONCE if earlier is None else earlier.difference(graph)
        variation = capture.variation()
        difference = variation or unproven
        self._varied = self._varied + 1 if variation else 0
        graph.differed = 0 if earlier is None else earlier.differed + 1
        if difference and max(self._varied, graph.differed) >= _ATTEMPTS:
            self._give_up(difference)
        if unproven:
            capture.compile(graph, self.cause if earlier is None else unproven)
        if earlier is not None and not difference:
            graph = earlier
            graph.proven = True
        elif not self.traced_because:
            self._graphs[key] = graph
        state = target.state.tensors
        self.donated = sum(state[i].nbytes for i in graph.changed) if target.donates else 0
        capture.run(graph, first=bool(unproven))
        return graph

    def _finish(self) -> None:
        """Wait until all is computed: memory that is still to be can't be told apart, nor gone back to."""
        launch(self._target.placement, "transfer")  # work that the user has left pending is none of the step's
        wait("capture")

    def _watch(self) -> Watch:
        # A random number in the first traces is no fault: a layer may begin with one.
        draws = self._varied + 1 >= _ATTEMPTS or bool(self.traced_because)
        return Watch(self._strict, f"the {self._target.role} step", draws)

    def _give_up(self, cause: str) -> None:
        role = self._target.role
        self._strict.refuse(f"the {role} step can't be replayed: {cause}. {cure_of(cause)}")
        if self.jit_compile is True:
            raise ReplayError(f"jit_compile=True, but the {role} step can't be replayed: {cause}")
        self.traced_because = cause
        self.forget()
        if cause not in self._told:
            self._told.add(cause)
            slow = f"the {role} step is traced anew on every call, which is slow, because {cause}"
            warn(f"{slow}. {cure_of(cause)}", again=True)  # of another model too
