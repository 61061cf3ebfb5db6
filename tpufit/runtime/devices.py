"""Find and start the cores. The first call that needs a device settles their number, once for the process.

Nothing is imported or started before that: the runtime reads the number of virtual cores of a CPU from the environment
when it starts, and can't change it later, nor go from one core to many.
"""

import importlib
import logging
import os
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from .. import hosts
from ..backend.cores import Cores, CoresArgument
from ..errors import ArgumentError, CoresError, StartError
from ..utils import hardware, releases
from ..utils.deferred import deferred
from ..utils.users_code import users_line
from . import release
from .faults import translate_import, translate_start
from .forks import guard_forks, refuse_fork
from .ops.indices import narrow_indices
from .ops.lowerings import lower_missing

_MOST = 1 << 20  # more cores than there are
_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"  # 0: all, 1: warnings, 2: errors, 3: what ends the process


@dataclass(frozen=True)
class _Request:
    count: int | None  # None: all that there are
    index: int | None


_settled: Cores | None = None
_failed: StartError | None = None


def settled() -> Cores | None:
    """The cores of this process, or None as long as nobody has asked for any."""
    return _settled


def init(cores: CoresArgument = "auto") -> None:
    """Settle the cores that this process computes on, before `fit`, `evaluate` or `predict` does.

    Args:
        cores: `"auto"` (default): every core of the TPU, or one of the CPU. A count such as `8` or `"8"`: on a TPU 1
            or all, on a CPU any number of virtual cores. `[i]`: the one core with that number, from 0.

    Raises:
        ArgumentError: `cores` is none of these.
        CoresError: This host has no such cores, or the process already computes on others.
        StartError: The runtime doesn't start.
        VersionError: The versions of torch and torch_xla don't belong together.

    Example:
        >>> import tpufit
        >>> tpufit.init(cores=1)
    """
    start(cores, f"tpufit.init(cores={cores!r})")


def start(cores: CoresArgument, asked_by: str) -> Cores:
    """Start the runtime on these cores, or make sure that it already runs on them.

    Args:
        cores: As in `init`. `"auto"` and `None` mean the cores that are settled, if any are.
        asked_by: The call that asks, e.g. `"fit(cores=8)"`, for the message to a later call that asks for others.
    """
    global _settled, _failed
    request = _parse(cores)
    refuse_fork()
    if _settled is not None:
        _require_same(request, _settled, cores)
        return _settled
    wish = os.environ.get("PJRT_DEVICE")  # torch_xla sets it when it is imported
    if _failed is not None:  # torch_xla tries once only, and 2.8 ends a process that tries again
        cure = "torch_xla tries once only: then restart this process (in a notebook: the kernel)"
        raise type(_failed)(f"{_failed}\n{cure}") from _failed
    runtime = _import_runtime()
    started = runtime._XLAC._xla_runtime_is_initialized()
    platform = runtime.runtime.device_type()
    if platform == "TPU" and not started:
        release.warn_of_libtpu()
    if platform == "CPU" and not started:
        wanted = request.count or 1
        os.environ["CPU_NUM_DEVICES"] = str(wanted if request.index is None else request.index + 1)
    try:
        available = runtime.runtime.global_runtime_device_count()
        processes = runtime.runtime.process_count()
    except (RuntimeError, OSError) as error:
        release.survive(runtime)
        _failed = translate_start(error, platform, wish)
        raise _failed from error
    index, count = _choose(request, available, platform, started, runtime.runtime.is_spmd(), cores)
    if processes > 1 and count < available:
        raise CoresError(
            f"cores={cores!r} asked for, but this is one of {processes} hosts, which compute together on all "
            f"{available} cores: pass cores='auto'"
        )
    if count > 1 and not runtime.runtime.is_spmd():
        if runtime._XLAC._xla_get_spmd_config_is_locked():  # going on would be a segmentation fault in torch_xla 2.9
            why = "this process has already computed on one XLA device without tpufit, and can't go to many"
            cure = f"Restart it (in a notebook: the kernel) and call tpufit.init(cores={count}) first"
            raise CoresError(f"{asked_by} needs {count} cores, but {why}. {cure}")
        runtime.runtime.use_spmd()
    lower_missing()
    if count > 1:
        narrow_indices()
    guard_forks()
    if processes > 1:
        store = _store()
        hosts.connect(runtime.runtime.process_index(), processes, store, store.host)
    _settled = Cores(count, index, platform, f"{asked_by} at {users_line()}", processes)
    return _settled


def _store() -> Any:
    """The store that all hosts share."""
    import torch_xla.distributed.xla_backend  # noqa: F401 - makes xla:// known, which finds process 0
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(iter(rendezvous("xla://")))
    return store


def process_index() -> int:
    """The number of this host among those of a pod, from 0; 0 where there is no pod.

    A pod runs the same script on each host, and process 0 writes the files. On a TPU this settles the cores, as `init`
    does.

    Example:
        >>> import tpufit
        >>> tpufit.process_index(), tpufit.process_count()
        (0, 1)
    """
    return _host("tpufit.process_index()")[0]


def process_count() -> int:
    """The number of hosts of a pod, each of which runs the same script; 1 where there is no pod.

    On a TPU this settles the cores, as `init` does.
    """
    return _host("tpufit.process_count()")[1]


def _host(asked_by: str) -> tuple[int, int]:
    if _settled is None and hosts.known() is None and platform() != "CPU":
        start("auto", asked_by)
    return hosts.known() or (0, 1)


def platform() -> str:
    """The kind of device that `"auto"` would compute on, e.g. `"TPU"` or `"CPU"`, without starting the runtime."""
    if _settled is not None:
        return _settled.platform
    return str(_import_runtime().runtime.device_type())


def device_memory() -> int | None:
    """A core's memory in bytes, or None where the runtime doesn't tell, as on a CPU."""
    import torch_xla
    import torch_xla.core.xla_model as xm

    try:
        return int(xm.get_memory_info(torch_xla.device())["bytes_limit"])
    except RuntimeError:
        return None


def memory_used() -> int | None:
    """The bytes of the first core's memory that are in use, or None where the runtime doesn't tell.

    It tells of one core only: torch_xla has no such figure for a process that computes on several.
    """
    import torch_xla
    import torch_xla.core.xla_model as xm

    try:
        return int(xm.get_memory_info(torch_xla.device())["bytes_used"])
    except RuntimeError:
        return None


def available(used: int) -> int:
    """The number of cores of this host's TPU; without a TPU, the number that is used."""
    if _settled is None or _settled.platform != "TPU":
        return used
    return int(_import_runtime().runtime.global_runtime_device_count())


def versions() -> dict[str, str]:
    """The installed versions that the last digits of a training depend on."""
    return {name: releases.version(name) or "none" for name in ("torch", "torch_xla")}


def _import_runtime() -> Any:
    """Import torch_xla without its log line about the platform: `fit` prints a better one."""
    release.release()
    _quieten()
    if "torch_xla" not in sys.modules:
        hardware.drop_stale_variables()
        hardware.leave_the_cloud_alone()
        logging.disable(logging.WARNING)
        try:
            # It needs half of PyTorch's compiler, for `torch.compile` only, which takes half of the time of the import.
            with deferred("torch_xla._dynamo.dynamo_bridge"):
                importlib.import_module("torch_xla")
        except (KeyError, TypeError, OSError) as error:
            if not hardware.chips():
                raise
            raise translate_import(error) from error
        finally:
            logging.disable(logging.NOTSET)
    torch_xla = sys.modules["torch_xla"]
    importlib.import_module("torch_xla.runtime")
    # It puts a GRU of its own in PyTorch's place, whose backward pass needs JAX on several cores.
    nn.GRU = getattr(nn.GRU, "_orig", nn.GRU)  # type: ignore[misc]
    return torch_xla


def _quieten() -> None:
    """Hide what XLA notes and warns of, such as that GSPMD will be replaced, at every compilation. Errors still show.

    XLA reads the level when it has something to say for the first time, and so later than torch_xla, which sets it to
    1 where a user has set nothing, or has imported torch_xla first.
    """
    if os.environ.get(_LOG_LEVEL, "1") == "1":
        os.environ[_LOG_LEVEL] = "2"


def _parse(cores: CoresArgument) -> _Request:
    if cores is None or (isinstance(cores, str) and cores == "auto"):
        return _Request(None, None)
    if isinstance(cores, str) and cores.strip().isdecimal():
        cores = int(cores)
    if isinstance(cores, (int, np.integer)) and not isinstance(cores, bool) and 1 <= cores < _MOST:
        return _Request(int(cores), None)
    if isinstance(cores, (list, tuple)) and len(cores) == 1:
        index = cores[0]
        if isinstance(index, (int, np.integer)) and not isinstance(index, bool) and 0 <= index < _MOST:
            return _Request(1, int(index))
    known = "'auto', a count of at least 1 such as 8 or '8', or a list with one core's number from 0 such as [0]"
    raise ArgumentError(f"cores must be {known}; got {cores!r}")


def _require_same(request: _Request, now: Cores, cores: CoresArgument) -> None:
    if request.count in (None, now.count) and request.index in (None, now.index):
        return
    wanted = f"cores={cores!r}" if request.index is not None else f"{request.count} core{'s' * (request.count != 1)}"
    why = f"this process computes on {now}, settled by {now.settled_by}, and a process can't change that"
    cure = f"Restart it (in a notebook: the kernel), and begin with tpufit.init(cores={cores!r})"
    raise CoresError(f"{wanted} asked for, but {why}. {cure}")


def _choose(
    request: _Request, available: int, platform: str, started: bool, spmd: bool, cores: CoresArgument
) -> tuple[int, int]:
    """The core's number and the count, out of `available`; an error names the cores of this host."""
    who = "this process was started with" if started else "this host has"
    have = f"{who} {available} {platform} core{'s' * (available != 1)}"
    if request.index is not None and request.index >= available:
        raise CoresError(f"cores={cores!r} asked for, but {have}, numbered from 0; cores='auto' uses them all")
    count = request.count
    if count is None:
        count = available if platform != "CPU" or spmd else 1
    if spmd and count != available:  # someone else called use_spmd, which can't be undone
        cure = f"pass cores={available} or cores='auto', or restart without torch_xla's use_spmd"
        raise CoresError(f"cores={cores!r} asked for, but {have} in SPMD mode, which uses all of them; {cure}")
    if count not in (1, available):
        other = "start nothing on the device before tpufit" if platform == "CPU" else "use cores=1"
        cure = f"it can be 1, {available} or [i] for one core from 0. Pass cores='auto' for all of them, or {other}"
        raise CoresError(f"{count} cores asked for, but {have}: {cure}")
    return request.index or 0, count
