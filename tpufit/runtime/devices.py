"""Find and start the cores. The first call that needs a device settles their number, once for the process.

Nothing is imported or started before that, because the runtime reads the number of a CPU's virtual cores from the
environment when it starts, and can't change the number later.
"""

import os

import numpy as np
import torch

from .. import hosts
from ..backend.cores import Cores, CoresArgument
from ..errors import ArgumentError, CoresError, StartError
from ..utils import hardware, releases
from ..utils.user_code import find_user_line, warn
from .driver import CoresRequest, driver
from .forks import guard_forks, refuse_fork

_MAX_CORES = 1 << 20  # more cores than any device has
_REQUESTED_DEVICE = os.environ.get("PJRT_DEVICE")  # read before torch_xla sets the variable itself


_settled: Cores | None = None
_failed: StartError | None = None


def get_settled_cores() -> Cores | None:
    """Return the cores of this process, or None before the first call that needs cores."""
    return _settled


def init(cores: CoresArgument = "auto") -> None:
    """Settle the cores that this process computes on, before `fit`, `evaluate` or `predict` does.

    Args:
        cores: `"auto"` (default): every core of the TPU; without a TPU the GPU; without either, one core of the CPU. A
            number such as `8` or `"8"`: on a TPU 1 or all cores, on a CPU any number of virtual cores. `[i]`: core
            number i, from 0.

    Raises:
        ArgumentError: `cores` is none of these.
        CoresError: This host doesn't have these cores, or the process already computes on other cores.
        StartError: The runtime doesn't start.
        VersionError: The versions of torch and torch_xla are incompatible.

    Example:
        >>> import tpufit
        >>> tpufit.init(cores=1)
    """
    start(cores, f"tpufit.init(cores={cores!r})")


def start(cores: CoresArgument, asked_by: str, eager: bool = False) -> Cores:
    """Start the runtime on these cores, or check that it already runs on them.

    Args:
        cores: As in `init`. `"auto"` and `None` mean the settled cores, if any.
        asked_by: The call, e.g. `"fit(cores=8)"`, for the error of a later call with other cores.
        eager: True (default False) for steps that plain PyTorch computes on the host: without an installed runtime, the
            host's processor counts as one core.
    """
    global _settled, _failed
    request = _parse(cores)
    refuse_fork()
    if _settled is not None:
        _require_same(request, _settled, cores)
        return _settled
    if eager and request.count in (None, 1) and not request.index and not releases.has_runtime():
        if driver().has_hosts():
            raise ArgumentError(
                "run_eagerly=True computes on one host's processor, but this is one of several hosts: leave it out"
            )
        return Cores(1, 0, "host", asked_by)
    if _failed is not None:  # torch_xla can be started only once: 2.8 ends a process that tries again
        cure = f"{driver().name} can't be started again in this process: then restart it (in a notebook: the kernel)"
        raise type(_failed)(f"{_failed}\n{cure}") from _failed
    if not eager and _means_gpu():
        if request.count is None:
            _settled = Cores(1, torch.cuda.current_device(), "CUDA", f"{asked_by} at {find_user_line()}")
            _warn_of_other_gpus(_settled.index)
            return _settled
        if not releases.has_runtime():
            raise CoresError(
                f"cores={cores!r} asks for cores of a TPU or a CPU, and no runtime for them is installed. This host "
                "has a GPU: cores='auto', the default, computes on it"
            )
    driver().load()
    try:
        count, index, platform, processes = driver().start(request, cores, asked_by)
    except StartError as error:
        _failed = None if isinstance(error, CoresError) else error
        raise
    guard_forks()
    if processes > 1:
        driver().connect_hosts(processes)
    _settled = Cores(count, index, platform, f"{asked_by} at {find_user_line()}", processes)
    return _settled


def start_absent(count: int, asked_by: str) -> Cores:
    """Start the runtime for tracing only, with this number of absent cores."""
    global _settled
    _settled = Cores(count, 0, driver().start_absent(count), asked_by)
    return _settled


def process_index() -> int:
    """Return the number of this host in a pod, from 0; 0 without a pod.

    A pod runs the same script on each host, and process 0 writes the files. On a TPU this settles the cores, as `init`
    does.

    Example:
        >>> import tpufit
        >>> tpufit.process_index(), tpufit.process_count()
        (0, 1)
    """
    return _host("tpufit.process_index()")[0]


def process_count() -> int:
    """Return the number of hosts of a pod, which all run the same script; 1 without a pod.

    On a TPU this settles the cores, as `init` does.

    Example:
        >>> import tpufit
        >>> files = [f"part-{number}.npz" for number in range(4)]
        >>> files[tpufit.process_index() :: tpufit.process_count()]  # this host's files: without a pod, all
        ['part-0.npz', 'part-1.npz', 'part-2.npz', 'part-3.npz']
    """
    return _host("tpufit.process_count()")[1]


def _host(asked_by: str) -> tuple[int, int]:
    if hosts.find_index_and_count() is None and may_have_hosts():
        start("auto", asked_by)
    return hosts.find_index_and_count() or (0, 1)


def may_have_hosts() -> bool:
    """Return False only if no other host can compute with this one. May be called before the start."""
    if _settled is not None:
        return _settled.hosts > 1
    kind = platform()
    return kind not in ("CPU", "CUDA") or (kind == "CPU" and driver().has_hosts())


def platform() -> str:
    """Return the kind of device for `"auto"`, e.g. `"TPU"` or `"CPU"`, without starting the runtime."""
    if _settled is not None:
        return _settled.platform
    if _means_gpu():
        return "CUDA"
    if not releases.has_runtime():
        return "TPU" if hardware.find_chips() else "CPU"
    return driver().platform()


def _means_gpu() -> bool:
    """True if `"auto"` means a GPU: PyTorch has a GPU, there is no TPU, and PJRT_DEVICE isn't set."""
    return _REQUESTED_DEVICE is None and not hardware.find_chips() and torch.cuda.is_available()


def _warn_of_other_gpus(index: int) -> None:
    count = torch.cuda.device_count()
    if count > 1:
        warn(
            f"this host has {count} GPUs, and tpufit computes only on cuda:{index}. torch.cuda.set_device(i) "
            "before the first fit chooses another"
        )


def device_memory() -> int | None:
    """Return a core's memory in bytes, or None if the runtime doesn't report it, as on a CPU."""
    if _settled is not None and _settled.platform == "CUDA":
        return int(torch.cuda.get_device_properties(_settled.index).total_memory)
    return driver().memory_info().get("limit")


def memory_used() -> int | None:
    """Return the bytes of the first core's memory that are in use, or None if the runtime doesn't report it.

    No runtime reports it for a process that computes on several cores.
    """
    return driver().memory_info().get("used")


def count_available_cores(used: int) -> int:
    """Return the number of cores of this host's TPU; without a TPU, the number of used cores."""
    if _settled is None or _settled.platform != "TPU":
        return used
    return driver().count_available_cores()


def versions() -> dict[str, str]:
    """Return the installed versions of torch and the runtime, on which rounding depends."""
    return {name: releases.find_version(name) or "none" for name in ("torch", driver().name)}


def _parse(cores: CoresArgument) -> CoresRequest:
    if cores is None or (isinstance(cores, str) and cores == "auto"):
        return CoresRequest(None, None)
    if isinstance(cores, str) and cores.strip().isdecimal():
        cores = int(cores)
    if isinstance(cores, (int, np.integer)) and not isinstance(cores, bool) and 1 <= cores < _MAX_CORES:
        return CoresRequest(int(cores), None)
    if isinstance(cores, (list, tuple)) and len(cores) == 1:
        index = cores[0]
        if isinstance(index, (int, np.integer)) and not isinstance(index, bool) and 0 <= index < _MAX_CORES:
            return CoresRequest(1, int(index))
    known = "'auto', a count of at least 1 such as 8 or '8', or a list with one core's number from 0 such as [0]"
    raise ArgumentError(f"cores must be {known}; got {cores!r}")


def _require_same(request: CoresRequest, now: Cores, cores: CoresArgument) -> None:
    if request.count in (None, now.count) and request.index in (None, now.index):
        return
    several = f"{request.count} cores were" if request.count != 1 else "1 core was"
    wanted = f"cores={cores!r} was" if request.index is not None else several
    why = f"this process computes on {now}, settled by {now.settled_by}, and a process can't change that"
    cure = f"Restart it (in a notebook: the kernel), and begin with tpufit.init(cores={cores!r})"
    raise CoresError(f"{wanted} requested, but {why}. {cure}")
