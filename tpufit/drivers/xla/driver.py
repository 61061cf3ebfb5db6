"""`XlaDriver`: the engine's interface to torch_xla.

torch_xla's tensors are lazy: operations are recorded, and computed when a result is needed or `launch` starts them. So
a step's Python is traced on its actual tensors.
"""

import atexit
import ctypes
import os
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ... import hosts
from ...backend import Cores, Placement
from ...runtime import device_counters
from ...runtime.driver import CoresRequest, Driver, Trace
from ...runtime.trace_seeds import Place, TraceSeeds
from ...utils import hardware
from ...utils.replacing_attributes import replacing_attributes
from . import (
    copy_to_host,
    dropout_bits,
    graph_hash,
    host_rows,
    jax_calls,
    profiler,
    release_differences,
    trace_seeds,
    xla_counters,
)
from .cpp_bindings import xla
from .placement import AbsentXlaCores, XlaCores
from .start import import_runtime, start, store

# The kinds of devices, by the chip on the PCI bus.
_KINDS = {"v4": "TPU v4", "v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite"}


class XlaDriver(Driver):
    """torch_xla."""

    name = "torch_xla"
    device_type = "xla"
    dispatch_key = "XLA"
    is_lazy = True
    # If a step writes over the old state, XLA:CPU waits for the previous step, which costs a fifth of a small step.
    donates_from = 1 << 24

    def __init__(self) -> None:
        self._requested_device: str | None = (
            None  # the user's `PJRT_DEVICE`, read before torch_xla sets it during its import
        )

    # Cores

    def load(self) -> None:
        if "torch_xla" not in sys.modules:
            self._requested_device = os.environ.get("PJRT_DEVICE")
        import_runtime()

    def start(self, request: CoresRequest, cores: Any, asked_by: str) -> tuple[int, int, str, int]:
        return start(request, cores, asked_by, self._requested_device)

    def start_absent(self, count: int) -> str:
        self.load()
        return self.start(CoresRequest(count, None), count, "preflight")[2]

    def connect_hosts(self, processes: int) -> None:
        shared = store()
        hosts.connect(import_runtime().runtime.process_index(), processes, shared, shared.host)

    def platform(self) -> str:
        return str(import_runtime().runtime.device_type())

    def count_available_cores(self) -> int:
        return int(import_runtime().runtime.global_runtime_device_count())

    def memory_info(self) -> Mapping[str, int]:
        import torch_xla
        import torch_xla.core.xla_model as xm

        try:
            info = xm.get_memory_info(torch_xla.device())
        except RuntimeError:
            return {}
        return {"limit": int(info["bytes_limit"]), "used": int(info["bytes_used"])}

    def find_kind(self) -> str:
        import torch_xla
        import torch_xla.runtime as runtime

        if not runtime.is_spmd():
            return str(xla()._xla_device_kind(str(torch_xla.device())))
        # torch_xla doesn't report the kind of several cores: they form one virtual device.
        chips = hardware.find_chips() if runtime.device_type() == "TPU" else []
        return _KINDS.get(chips[0].name, chips[0].name) if chips else "cpu"

    def detach_forked_process(self) -> None:
        # At exit, torch_xla's handler and the C++ destructors wait for the device. The first is unregistered; `_exit`
        # skips the second.
        atexit.unregister(sys.modules["torch_xla"]._prepare_to_exit)
        libc = ctypes.CDLL(None)
        libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)

    # Placements

    def make_placement(self, cores: Cores, recorder: Any) -> Placement:
        return XlaCores(cores) if recorder is None else AbsentXlaCores(cores, recorder=recorder)

    def send_parts(self, parts: Sequence[Tensor], axis: int, block: int, rows_: int, placement: Placement) -> Tensor:
        assert isinstance(placement, XlaCores)
        return host_rows.send_parts(parts, axis, block, rows_, placement)

    def fetch_parts(self, tensor: Tensor) -> Tensor:
        return host_rows.fetch_parts(tensor)

    # Values

    def read(self, tensors: Sequence[Tensor], collective: bool) -> list[Tensor]:
        return copy_to_host.read(tensors, collective)

    def read_one(self, tensor: Tensor) -> Tensor:
        value: Tensor = xla()._xla_get_cpu_tensors([tensor])[0]
        return value

    def wait_for(self, tensor: Tensor) -> None:
        copy_to_host.wait_for(tensor)

    def split_axis(self, tensor: Tensor) -> int | None:
        return copy_to_host.split_axis(tensor)

    def compute(self, tensors: Sequence[Tensor], wait: bool = False) -> None:
        xla()._xla_sync_multi(list(tensors), devices=[], wait=wait, sync_xla_data=not wait)

    def wait(self) -> None:
        xla()._xla_wait_device_ops([])

    def find_pending(self, tensors: Sequence[Tensor]) -> list[int]:
        return [i for i, waits in enumerate(xla()._check_tensor_need_materialization(tensors)) if waits]

    def count_pending(self) -> int:
        import torch_xla

        return sum(xla()._check_device_tensor_need_materialization(str(torch_xla.device())))

    def count_copies(self) -> Hashable:
        return xla_counters.count_copies()

    def identity(self, tensor: Tensor) -> int:
        return int(xla()._xla_get_tensor_id(tensor))

    def handles(self, tensors: Sequence[Tensor]) -> list[Hashable]:
        return list(xla()._get_tensors_handle(tensors))

    def alias_memory(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        _, values = xla()._get_tensors_xla_device_data_node(tensors)
        by_handle = dict(zip(self.handles(values), values, strict=True))
        return [by_handle[handle] for handle in self.handles(tensors)]

    def put_behind_barrier(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        copies = [tensor.detach().clone() for tensor in tensors]
        xla()._xla_optimization_barrier_(copies)
        return copies

    def apply_view(self, tensor: Tensor, view: Tensor) -> Tensor:
        return release_differences.apply_view(tensor, view)

    # Traces

    def tracing(self) -> AbstractContextManager[object]:
        return nullcontext()

    def lend_values(self, values: Sequence[Tensor]) -> list[Tensor]:
        return self.alias_memory(values) if values else []

    def trace_seeds(self, placement: Placement, seeds_: Sequence[int]) -> TraceSeeds:
        assert isinstance(placement, XlaCores)
        return trace_seeds.XlaSeeds(placement.device_name, seeds_)

    def seed_tensors(self, placement: Placement, seeds_: Sequence[int], places: Sequence[Place]) -> list[Tensor]:
        assert isinstance(placement, XlaCores)
        return trace_seeds.seed_tensors(placement.device_name, seeds_, places)

    def work_of(self, tensor: Tensor) -> Hashable:
        graph_hash: Hashable = xla()._get_graph_hash([tensor])
        return graph_hash

    def inputs_of(self, roots: Sequence[Tensor]) -> list[Tensor]:
        return list(xla()._get_tensors_xla_device_data_node(list(roots))[1])

    def outline_of(self, roots: Sequence[Tensor], values: Sequence[Tensor], donated: Sequence[int]) -> Hashable:
        return self._hash_of(roots, values, donated)

    def hash_of(self, roots: Sequence[Tensor], values: Sequence[Tensor], donated: Sequence[int]) -> Hashable:
        with graph_hash.distinguishing_inputs(roots):
            return self._hash_of(roots, values, donated)

    def _hash_of(self, roots: Sequence[Tensor], values: Sequence[Tensor], donated: Sequence[int]) -> Hashable:
        from torch_xla.utils.buffer_donor_context import alias_with_buffer_donor_config

        with alias_with_buffer_donor_config():
            for i in donated:  # before the hash, which includes donation
                xla()._set_buffer_donation(values[i], True)
            graph_hash: Hashable = xla()._get_graph_hash(list(roots))
        return graph_hash

    def revoke_donation(self, values: Sequence[Tensor]) -> None:
        for value in values:
            xla()._set_buffer_donation(value, False)

    def compile(self, trace: Trace) -> None:
        from torch_xla.utils.buffer_donor_context import alias_with_buffer_donor_config

        named = graph_hash.distinguishing_inputs(trace.roots)
        with device_counters.role(trace.role, trace.cause), alias_with_buffer_donor_config(), named:
            xla()._xla_warm_up_cache(trace.roots, [])

    def text_of(self, roots: Sequence[Tensor]) -> str:
        return str(xla()._get_xla_tensors_hlo(list(roots)))

    def serialize(self, trace: Trace) -> bytes:
        proto: bytes = xla()._get_xla_tensors_hlo_proto(list(trace.roots))
        return proto

    # Settings that a graph depends on

    def set_matmul_precision(self, name: str) -> None:
        graph_hash.set_matmul_precision(name)

    def lowering(self, matmul_precision: str) -> AbstractContextManager[object]:
        return graph_hash.lowering(matmul_precision)

    def variables(self) -> tuple[str, ...]:
        return graph_hash.variables()

    def checking_shapes(self) -> AbstractContextManager[object]:
        return release_differences.checking_shapes()

    # Operations

    def compute_keep_mask(self, words: Sequence[Tensor], shape: tuple[int, ...], limit: int, number: int) -> Tensor:
        return dropout_bits.compute_keep_mask(words, shape, limit, number)

    def compute_once(self, tensor: Tensor) -> Tensor:
        xla()._xla_optimization_barrier_([tensor])
        return tensor

    def device_module(self) -> AbstractContextManager[object]:
        import torch_xla

        return replacing_attributes(torch, xla=torch_xla)

    def jax_call(
        self, function: Callable[..., Any], arguments: Sequence[Any], platform: str, name: str
    ) -> tuple[Callable[..., list[Tensor]], list[Any]]:
        return jax_calls.lower(function, arguments, platform, name)

    # Reports

    def extract_message(self, error: BaseException) -> str:
        return release_differences.extract_message(error)

    def count_fallbacks(self) -> Counter[str]:
        return xla_counters.count_fallbacks()

    def count_reads(self) -> Hashable:
        return xla_counters.count_reads()

    def count_compiled(self) -> int:
        import torch_xla.debug.metrics as metrics

        return metrics.counter_value("UncachedCompile") or 0

    def get_seconds_executing(self) -> float:
        metrics = xla_counters.xla_metrics()
        return (metrics.metric_data("ExecuteTime") or (0, 0.0))[1] / 1e9 if metrics else 0.0

    def count_live_tensors(self) -> int:
        return xla_counters.count_live_tensors()

    def metrics_report(self) -> str:
        metrics = xla_counters.xla_metrics()
        return str(metrics.metrics_report()) if metrics else ""

    def start_profile(self, folder: Any) -> None:
        profiler.start_profile(folder)

    def stop_profile(self) -> None:
        profiler.stop_profile()

    def scope(self, name: str) -> AbstractContextManager[None]:
        return profiler.scope(name)
