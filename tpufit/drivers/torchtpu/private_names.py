"""The private names of torch_tpu that tpufit uses. Any release may change them, so they are looked up at the start."""

import sys
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from operator import attrgetter
from typing import Any

from ...errors import VersionError
from ...utils import releases

TRIED = ("0.2.0",)
"""The releases of torch_tpu with which tpufit was tested."""

_COMPILE = "torch_tpu._internal.compile.tpu_torch_compile"
_MODES = "torch_tpu._internal.execution_mode.execution_mode_impl"
_DEVICE = "torch_tpu._internal.device._device_ops_backend"
_SYNC = "torch_tpu._internal.sync._tpu_torch_sync"
_PROFILER = "torch_tpu._internal.profiler._impl"
_PRECISION = "torch_tpu._internal.precision.precision_impl"


@dataclass(frozen=True)
class Names:
    """torch_tpu's objects under tpufit's names."""

    placeholder: Any
    build_mlir: Any
    serialize_text: Any
    parse_text: Any
    compile_mlir: Any
    serialize_executable: Any
    load_executable: Any
    custom_options: Any
    make_runner: Any
    make_generator: Any
    generator_state: Any
    set_generator_state: Any
    set_default_generator: Any
    clear_default_generators: Any
    push_mode: Any
    pop_mode: Any
    modes: Any
    fall_back: Any
    synchronize_list: Any
    is_materializing: Any
    is_materialized: Any
    synchronize_device: Any
    device_attributes: Any
    has_started: Any
    shut_down: Any
    default_generator: Any
    manual_seed: Any
    set_precision: Any
    get_precision: Any
    precisions: Any
    excess_precision: Any
    barrier: Any
    memory_size: Any
    topology: Any
    start_profile: Any
    stop_profile: Any
    unpatch_max_pool: Any


_FROM = {
    "placeholder": (_COMPILE, "placeholder"),
    "build_mlir": (_COMPILE, "build_mlir"),
    "serialize_text": (_COMPILE, "serialize_mlir_text"),
    "parse_text": (_COMPILE, "parse_mlir_text"),
    "compile_mlir": (_COMPILE, "compile_mlir"),
    "serialize_executable": (_COMPILE, "serialize_executable"),
    "load_executable": (_COMPILE, "load_serialized_executable"),
    "custom_options": ("torch_tpu._internal.compiler_options", "custom_compiler_options"),
    "make_runner": (_COMPILE, "make_compiled_runner"),
    "make_generator": (_COMPILE, "make_export_mode_device_generator"),
    "generator_state": (_COMPILE, "get_device_state_tensor"),
    "set_generator_state": (_COMPILE, "set_device_state_tensor"),
    "set_default_generator": (_COMPILE, "set_export_mode_default_device_generator"),
    "clear_default_generators": (_COMPILE, "clear_export_mode_default_device_generators"),
    "push_mode": (_MODES, "_push_eager_mode"),
    "pop_mode": (_MODES, "_pop_eager_mode"),
    "modes": (_MODES, "_EagerMode"),
    "fall_back": (_MODES, "_enable_cpu_fallback"),
    "synchronize_list": (_SYNC, "_synchronize_list"),
    "is_materializing": (_SYNC, "_is_materializing"),
    "is_materialized": (_SYNC, "_is_materialized"),
    "synchronize_device": (_DEVICE, "_synchronize_device"),
    "device_attributes": (_DEVICE, "_get_local_device_attributes"),
    "has_started": (_DEVICE, "_is_initialized"),
    "shut_down": ("torch_tpu._internal.device._device_module", "TpuDeviceModule._shutdown_runtime"),
    "default_generator": (_DEVICE, "get_default_generator"),
    "manual_seed": (_DEVICE, "manual_seed"),
    "set_precision": (_PRECISION, "_set_global_precision"),
    "get_precision": (_PRECISION, "_get_global_precision"),
    "precisions": (_PRECISION, "Precision"),
    "excess_precision": (_DEVICE, "_get_allow_excess_precision"),
    "barrier": ("torch", "ops.tpu._optimization_barrier"),
    "memory_size": ("torch_tpu._internal.utils.hardware", "get_hbm_bytes_per_device"),
    "topology": ("torch_tpu._internal.utils.hardware", "get_tpu_topology"),
    "start_profile": (_PROFILER, "start_trace"),
    "stop_profile": (_PROFILER, "stop_trace"),
    "unpatch_max_pool": ("torch_tpu._internal.pooling.patch", "unpatch_max_pool"),
}


@cache
def names() -> Names:
    """Look the names up. torch_tpu must have been started.

    Raises:
        VersionError: This release lacks a name.
    """
    found = {}
    missing = []
    for own, (module, name) in _FROM.items():
        try:
            found[own] = attrgetter(name)(import_module(module))
        except (ImportError, AttributeError):
            missing.append(f"{module}.{name}")
    if missing:
        here = releases.find_version("torch_tpu")
        raise VersionError(
            f"tpufit was tested with torch_tpu {', '.join(TRIED)}, but {here} is installed, which has no {missing[0]}. "
            f"Run: pip install torch_tpu=={TRIED[-1]}"
        )
    return Names(**found)


def register_device() -> None:
    """Import torch_tpu, and register its device with PyTorch.

    torch_tpu itself doesn't do so without a TPU on the bus, even if TPU_LIBRARY_PATH names a plugin.
    """
    loader = vars(import_module("torch_tpu._loader"))
    loader["_init_device"]("tpu")
    loader["_LOADED"] = True


def is_registered() -> bool:
    """True if torch_tpu's device is registered with PyTorch."""
    loader = sys.modules.get("torch_tpu._loader")
    return loader is not None and bool(vars(loader)["_DEVICE_INITIALIZED"])
