"""Imports and starts torch_xla.

torch_xla is imported only when a call needs a device: when it starts it reads the number of a CPU's virtual cores from
the environment, and afterwards it can't change the number, or go from one core to several.
"""

import importlib
import logging
import os
import sys
from typing import Any

from torch import nn

from ...backend.cores import CoresArgument
from ...errors import CoresError
from ...runtime.driver import CoresRequest
from ...runtime.ops.lowerings import lower_missing
from ...utils import hardware
from ...utils.defer_import import defer_import
from . import release_differences
from .kernels import patch_kernels
from .narrow_indices import narrow_indices
from .start_errors import translate_import, translate_start
from .sync_functions import patch_syncs

# On a CPU: maxima and minima propagate NaN, as on a TPU and in PyTorch; and a network compiles in four fifths of the
# time, to a program that is as fast.
_CPU_FLAGS = "--xla_cpu_enable_fast_min_max=false --xla_backend_optimization_level=1"
_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"  # 0: all, 1: warnings, 2: errors, 3: fatal errors


def start(request: CoresRequest, cores: Any, asked_by: str, requested_device: str | None) -> tuple[int, int, str, int]:
    """Start torch_xla on these cores, see `Driver.start`; `requested_device` is the user's `PJRT_DEVICE`, or None."""
    runtime = import_runtime()
    started = runtime._XLAC._xla_runtime_is_initialized()
    platform = runtime.runtime.device_type()
    if platform == "TPU" and not started:
        release_differences.warn_of_libtpu()
    if platform == "CPU" and not started:
        count = request.count or 1
        os.environ["CPU_NUM_DEVICES"] = str(count if request.index is None else request.index + 1)
        _set_flags()
    try:
        available = runtime.runtime.global_runtime_device_count()
        processes = runtime.runtime.process_count()
    except (RuntimeError, OSError) as error:
        release_differences.remove_exit_handler(runtime)
        raise translate_start(error, platform, requested_device) from error
    index, count = _choose(request, available, platform, started, runtime.runtime.is_spmd(), cores)
    if processes > 1 and count < available:
        raise CoresError(
            f"cores={cores!r} was requested, but this process is one of {processes} hosts, which compute together on "
            f"all {available} cores: pass cores='auto'"
        )
    if count > 1 and not runtime.runtime.is_spmd():
        if runtime._XLAC._xla_get_spmd_config_is_locked():  # torch_xla 2.9 would crash with a segmentation fault
            why = "this process has already computed on one XLA device without tpufit, and can't switch to several"
            cure = f"Restart it (in a notebook: the kernel) and call tpufit.init(cores={count}) first"
            raise CoresError(f"{asked_by} needs {count} cores, but {why}. {cure}")
        runtime.runtime.use_spmd()
    lower_missing("XLA")
    patch_kernels()
    patch_syncs()
    if count > 1:
        narrow_indices()
    return count, index, platform, processes


def store() -> Any:
    """Return the store that all hosts share."""
    import torch_xla.distributed.xla_backend  # noqa: F401 - registers xla://, which finds process 0
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(iter(rendezvous("xla://")))
    return store


def import_runtime() -> Any:
    """Import torch_xla without its log line about the platform: `fit` prints a better one."""
    release_differences.release()
    _quieten()
    if "torch_xla" not in sys.modules:
        hardware.drop_stale_variables()
        hardware.skip_metadata_query()
        logging.disable(logging.WARNING)
        try:
            # This module imports half of PyTorch's compiler, takes half of the import time, and serves `torch.compile`.
            with defer_import("torch_xla._dynamo.dynamo_bridge"):
                importlib.import_module("torch_xla")
        except (KeyError, TypeError, OSError) as error:
            if not hardware.find_chips():
                raise
            raise translate_import(error) from error
        finally:
            logging.disable(logging.NOTSET)
    torch_xla = sys.modules["torch_xla"]
    importlib.import_module("torch_xla.runtime")
    # torch_xla replaces PyTorch's GRU by a class whose backward pass needs JAX on several cores. That class, which the
    # user may have imported by its name, looks for PyTorch's in the attribute.
    original: Any = getattr(nn.GRU, "_orig", nn.GRU)
    type.__setattr__(original, "_orig", original)
    nn.GRU = original  # type: ignore[misc]
    return torch_xla


def _quieten() -> None:
    """Hide XLA's notes and warnings at every compilation, e.g. that GSPMD will be replaced. Errors still show.

    XLA reads the level when it first logs a message. torch_xla sets it to 1 when it is imported, unless the user has
    set it.
    """
    if os.environ.get(_LOG_LEVEL, "1") == "1":
        os.environ[_LOG_LEVEL] = "2"


def _set_flags() -> None:
    """Set XLA's flags for a CPU. XLA reads them when it starts. The user's flags follow, and so prevail."""
    flags = os.environ.get("XLA_FLAGS", "")
    if _CPU_FLAGS not in flags:
        os.environ["XLA_FLAGS"] = f"{_CPU_FLAGS} {flags}".strip()


def _choose(
    request: CoresRequest, available: int, platform: str, started: bool, spmd: bool, cores: CoresArgument
) -> tuple[int, int]:
    """Return the core's index and the number of cores, out of `available`; errors name the cores of this host."""
    who = "this process was started with" if started else "this host has"
    have = f"{who} {available} {platform} core{'s' * (available != 1)}"
    if request.index is not None and request.index >= available:
        raise CoresError(f"cores={cores!r} was requested, but {have}, numbered from 0; cores='auto' uses all cores")
    count = request.count
    if count is None:
        count = available if platform != "CPU" or spmd else 1
    if spmd and count != available:  # the user's code called use_spmd, which can't be undone
        cure = f"pass cores={available} or cores='auto', or restart without torch_xla's use_spmd"
        raise CoresError(f"cores={cores!r} was requested, but {have} in SPMD mode, which uses all cores; {cure}")
    if count not in (1, available):
        other = "use no device before tpufit" if platform == "CPU" else "use cores=1"
        cure = (
            f"cores can be 1, {available} or [i], one core counted from 0. Pass cores='auto' for all cores, or {other}"
        )
        raise CoresError(f"{count} cores were requested, but {have}: {cure}")
    return request.index or 0, count
