"""`TorchTpuDriver`: the engine's `Driver` for TorchTPU."""

import gc
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ...backend import Cores, Placement
from ...hosts import collective
from ...runtime import device_counters
from ...runtime.driver import CoresRequest, Driver, Trace
from ...runtime.trace_seeds import Place, TraceSeeds
from . import core_environments, dropout_bits, start
from .absent_cores import AbsentSeeds, AbsentTpu, ValuelessCores, register_without_device
from .compute_modes import computing, printing, recording
from .core_group import CoreGroup
from .host import find_host
from .jax_calls import JaxCalls
from .one_core import OneCore, Program
from .placement import TpuCore
from .private_names import names
from .programs import shard_text
from .tensor_identity import handle_of, on_tpu
from .trace_seeds import TpuSeeds, state_of
from .trace_session import Session
from .user_reads import guard_reads

_PRECISIONS = {"default": "DEFAULT", "high": "HIGH", "highest": "HIGHEST"}


class TorchTpuDriver(Driver):
    """Drives TorchTPU."""

    name = "torch_tpu"
    device_type = "tpu"
    dispatch_key = "PrivateUse1"
    is_lazy = False
    # Never: TorchTPU releases a tensor in XLA:CPU's callback, and XLA:CPU may wait there forever for the next step.
    donates_from = inf

    def __init__(self) -> None:
        self._session: Session | None = None  # of the current trace
        self._cores = OneCore()
        self._interrupted: CoreGroup | None = None  # cores whose start may have been interrupted
        self._programs: dict[Hashable, Program] = {}
        self._jax_calls = JaxCalls(self._put_behind)
        self._compiled = 0
        self._fell_back: Counter[str] = Counter()
        self._reads = 0

    # Cores

    def load(self) -> None:
        start.load()

    def start(self, request: CoresRequest, cores: Any, asked_by: str) -> tuple[int, int, str, int]:
        prepared = start.start(request, cores, asked_by, self._interrupted)
        self._interrupted = prepared if isinstance(prepared, CoreGroup) else None
        if self._interrupted is not None:
            with collective():
                self._interrupted.begin()
            guard_reads(self._prepare_read)
        self._cores = prepared
        return self._cores.count, request.index or 0, start.platform(), self._cores.hosts

    def _prepare_read(self, tensor: Tensor) -> Tensor | None:
        return self._cores.prepare_read(tensor) if self._session is None else None

    def start_absent(self, count: int) -> str:
        register_without_device()
        self._cores = ValuelessCores(count)
        return "TPU"

    def connect_hosts(self, processes: int) -> None:
        pass  # the start has connected them

    def has_hosts(self) -> bool:
        return find_host().count > 1

    def platform(self) -> str:
        return start.platform()

    def count_available_cores(self) -> int:
        return core_environments.count_cores() or self._cores.count

    def memory_info(self) -> Mapping[str, int]:
        limit = names().memory_size()
        return {} if limit is None else {"limit": limit}  # TorchTPU doesn't report the memory in use

    def find_kind(self) -> str:
        return str(names().device_attributes().get("device_kind", "cpu"))

    def detach_forked_process(self) -> None:
        start.skip_wait_at_exit()

    # Placements

    def make_placement(self, cores: Cores, recorder: Any) -> Placement:
        if recorder is not None:
            return AbsentTpu(cores, self._cores, self._programs, recorder)
        return TpuCore(cores, self._cores, self._programs)

    def send_parts(self, parts: Sequence[Tensor], axis: int, block: int, rows: int, placement: Placement) -> Tensor:
        assert isinstance(self._cores, CoreGroup)
        here = torch.cat(list(parts), axis) if len(parts) > 1 else parts[0]
        return self._cores.send_rows(here, axis, block, rows)

    def fetch_parts(self, tensor: Tensor) -> Tensor:
        assert isinstance(self._cores, CoreGroup)
        return self._cores.read_rows(tensor)

    # Values

    def read(self, tensors: Sequence[Tensor], collective: bool) -> list[Tensor]:
        return self._cores.read([self._value_of(tensor) for tensor in tensors], collective)

    def read_one(self, tensor: Tensor) -> Tensor:
        (value,) = self.read([tensor], False)
        return value

    def _value_of(self, tensor: Tensor) -> Tensor:
        """Return the value that a tensor shows to the current trace, or the tensor itself."""
        shown = None if self._session is None else self._session.find_value(tensor)
        return tensor if shown is None else shown

    def wait_for(self, tensor: Tensor) -> None:
        self._cores.wait_for(self._value_of(tensor))

    def split_axis(self, tensor: Tensor) -> int | None:
        return self._cores.axis_of(tensor)

    def compute(self, tensors: Sequence[Tensor], wait: bool = False) -> None:
        session = self._session
        if session is not None:
            for tensor, value in zip(tensors, session.evaluate(tensors), strict=True):
                if value is not tensor:
                    tensor.data = value
        self._cores.compute(tensors, wait)

    def wait(self) -> None:
        self._cores.wait()

    def find_pending(self, tensors: Sequence[Tensor]) -> list[int]:
        session = self._session
        if session is not None:
            return [i for i, tensor in enumerate(tensors) if session.is_pending(tensor)]
        return [i for i, tensor in enumerate(tensors) if not self._cores.has_value(tensor)]

    def identity(self, tensor: Tensor) -> int:
        return hash(handle_of(tensor))

    def handles(self, tensors: Sequence[Tensor]) -> list[Hashable]:
        session = self._session
        return [handle_of(tensor) if session is None else session.handle(tensor) for tensor in tensors]

    def find_written(self) -> list[Tensor]:
        return [] if self._session is None else self._session.find_written()

    def list_own(self) -> list[Tensor]:
        return [] if self._session is None else self._session.list_kept()

    def alias_memory(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        if self._session is not None:
            return [tensor.detach() for tensor in tensors]
        return self._cores.copy(tensors)

    def copy_apart(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return self._cores.copy_apart(tensors)

    def put_behind_barrier(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return self._put_behind([tensor.detach() for tensor in tensors])

    def _put_behind(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        session = self._session
        if session is None:
            copies: list[Tensor] = names().barrier(list(tensors))
            return copies
        # PyTorch's activation checkpointing records each operation, and must not see this one.
        with recording(), _disable_current_modes():
            session.note(tensors)
            results: list[Tensor] = names().barrier(list(tensors))
            session.note(results)
            return results

    def note_exposed(self, tensors: Sequence[Tensor]) -> None:
        self._cores.forget(tensors)

    def apply_view(self, tensor: Tensor, view: Tensor) -> Tensor:
        raise RuntimeError("torch_tpu has no functional views")

    # Traces

    @contextmanager
    def tracing(self) -> Iterator[None]:
        self._cores.compute_all()  # from now on only the trace's tensors are pending
        session = Session(self._note_fallback, self._cores, self._jax_calls)
        before = self._session
        self._session = session
        try:
            yield
        finally:
            self._session = before
            session.end()

    @contextmanager
    def body(self) -> Iterator[None]:
        session = self._session
        tracing = nullcontext() if session is None else recording()
        with tracing, session or nullcontext(), printing(), warnings.catch_warnings():
            # TorchTPU itself causes these warnings when it copies a tensor or computes a loss.
            for message in (
                "The .grad attribute of a Tensor that is not a leaf",
                "An output with one or more elements",
            ):
                warnings.filterwarnings("ignore", message=message)
            yield

    def show_values(self, values: list[Tensor]) -> list[Tensor]:
        return values if self._session is None else self._session.show(values)

    def lend_values(self, values: Sequence[Tensor]) -> list[Tensor]:
        assert self._session is not None
        return self._session.show(values)

    def resolve(self, tensors: Sequence[Tensor]) -> None:
        assert self._session is not None
        for tensor in tensors:
            value = self._session.find_value(tensor)
            if value is not None:
                tensor.data = value

    def trace_seeds(self, placement: Placement, seeds: Sequence[int]) -> TraceSeeds:
        kind = AbsentSeeds if isinstance(placement, AbsentTpu) else TpuSeeds
        return kind(placement, seeds, self._session)

    def seed_tensors(self, placement: Placement, seeds: Sequence[int], places: Sequence[Place]) -> list[Tensor]:
        return [state_of(seeds[step], placement) for step, _ in places]

    def work_of(self, tensor: Tensor) -> Hashable:
        assert self._session is not None
        return self._session.build([tensor], self._session.inputs_of([tensor])).digest(())

    def inputs_of(self, roots: Sequence[Tensor]) -> list[Tensor]:
        assert self._session is not None
        return self._session.inputs_of(roots)

    def hash_of(self, roots: Sequence[Tensor], values: Sequence[Tensor], donated: Sequence[int]) -> Hashable:
        assert self._session is not None
        axes = tuple(map(self._cores.axis_of, values))
        return self._session.build(roots, values).digest(donated), axes, str(names().get_precision())

    def revoke_donation(self, values: Sequence[Tensor]) -> None:
        pass

    def compile(self, trace: Trace) -> None:
        graph = trace.graph
        if graph.hash in self._programs:
            return
        with device_counters.role(trace.role, trace.cause), computing():
            text = self._complete(trace)
            outputs = trace.roots, trace.output_axes
            program = self._programs[graph.hash] = self._cores.compile(text, trace.values, *outputs)
            self._compiled += not program.loaded

    def _complete(self, trace: Trace) -> str:
        """Return the text of the graph that was built last, for a compiler."""
        assert self._session is not None and self._session.built is not None
        return self._jax_calls.insert(self._session.built.donate(find_replaced(trace)))

    def text_of(self, roots: Sequence[Tensor]) -> str:
        assert self._session is not None
        return self._jax_calls.insert(self._session.text_of(roots))

    def serialize(self, trace: Trace) -> bytes:
        text = self._complete(trace)
        count = self._cores.count
        if count > 1:
            text = shard_text(text, [self._cores.axis_of(value) for value in trace.values], count, trace.output_axes)
        return text.encode()

    # What a graph depends on besides its operations

    def set_matmul_precision(self, name: str) -> None:
        names().set_precision(getattr(names().precisions, _PRECISIONS[name]))

    @contextmanager
    def lowering(self, matmul_precision: str) -> Iterator[None]:
        before = names().get_precision()
        self.set_matmul_precision(matmul_precision)
        try:
            yield
        finally:
            names().set_precision(before)

    # Operations

    def compute_keep_mask(self, words: Sequence[Tensor], shape: tuple[int, ...], limit: int, number: int) -> Tensor:
        return dropout_bits.compute_keep_mask(words, shape, limit, number)

    def compute_once(self, tensor: Tensor) -> Tensor:
        return self._put_behind([tensor])[0]

    def jax_call(
        self, function: Callable[..., Any], arguments: Sequence[Any], platform: str, name: str
    ) -> tuple[Callable[..., list[Tensor]], list[Any]]:
        return self._jax_calls.lower(function, arguments, platform, name)

    # Reports

    def extract_message(self, error: BaseException) -> str:
        return str(error).strip()

    def _note_fallback(self, name: str) -> None:
        self._fell_back[name] += 1
        self._reads += 1

    def count_fallbacks(self) -> Counter[str]:
        return Counter(self._fell_back)

    def count_reads(self) -> Hashable:
        return self._reads

    def count_compiled(self) -> int:
        return self._compiled

    def get_seconds_executing(self) -> float:
        return 0.0

    def count_live_tensors(self) -> int:
        # Not `isinstance`: it would read `__class__` of lazy objects, and some of them warn then.
        return sum(issubclass(type(o), Tensor) and on_tpu(o) for o in gc.get_objects())

    def metrics_report(self) -> str:
        return ""

    def start_profile(self, folder: Any) -> None:
        names().start_profile(folder)

    def stop_profile(self) -> None:
        names().stop_profile()


def find_replaced(trace: Trace) -> dict[int, int]:
    """Return which outputs of a trace's graph are written over its inputs: output numbers by input numbers."""
    graph = trace.graph
    return {
        at: graph.changed.index(i)
        for at, (name, i) in enumerate(graph.sources)
        if name == "state" and i in graph.consumed and i in graph.changed
    }
