"""Import torch_tpu and start it, without output on the user's terminal."""

import atexit
import contextlib
import ctypes
import io
import os
import warnings

import torch

from ...backend.cores import CoresArgument
from ...errors import CoresError, HostError, StartError, VersionError, say_count
from ...hosts import connect, is_connected, note_place
from ...runtime.driver import CoresRequest
from ...runtime.ops.lowerings import lower_missing
from ...utils import hardware, releases
from ...utils.defer_import import defer_import
from ...utils.defer_interrupt import defer_interrupt
from . import core_environments
from .compile_cache import environment
from .core_group import CoreGroup
from .host import Host, find_host
from .kernels import patch_kernels
from .one_core import OneCore
from .private_names import TRIED, is_registered, names, register_device

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"  # 3: only fatal errors
# A third of torch_tpu's import. Only torch.compile needs it, and imports it then.
_INDUCTOR = "torch._inductor.fx_passes.post_grad"


def load() -> None:
    """Import torch_tpu without its output, and register its device with PyTorch.

    Raises:
        VersionError: tpufit doesn't support this release, or torch's.
        StartError: torch_tpu can't be imported, or there is neither a TPU nor another plugin.
    """
    releases.check_versions(*(releases.find_version(name) for name in ("torch", *releases.RUNTIMES)))
    # Check before torch_tpu's device is registered. After that, backward passes on the host start the device, and
    # libtpu searches the cloud for a TPU for minutes. When libtpu is imported, it sets the variable to its path.
    if platform() != "TPU" and os.path.basename(os.environ.get("TPU_LIBRARY_PATH", "")) in ("", "libtpu.so"):
        raise StartError(
            "torch_tpu is installed, but this host has no TPU chip on its PCI bus. Choose a TPU machine, compile with "
            "run_eagerly=True, or install torch_xla instead for virtual cores: pip install 'tpufit[xla]'"
        )
    register_quietly()
    names()


def register_quietly() -> None:
    """Import torch_tpu and register its device, without its output."""
    if not is_registered():
        os.environ.setdefault(_LOG_LEVEL, "3")
        before = os.environ.get(_AUTOLOAD)
        os.environ[_AUTOLOAD] = "0"
        try:
            with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
                warnings.simplefilter("ignore")
                # Half an import can't be repeated: PyTorch registers each name only once.
                with defer_interrupt(), defer_import(_INDUCTOR):
                    register_device()
        except (ImportError, RuntimeError, OSError, KeyError) as error:
            own, torch_version = map(releases.find_version, ("torch_tpu", "torch"))
            raise StartError(
                f"torch_tpu {own} doesn't work with torch {torch_version}: {error!r}. "
                f"Run: pip install torch_tpu=={TRIED[-1]}"
            ) from error
        finally:
            if before is None:
                del os.environ[_AUTOLOAD]
            else:
                os.environ[_AUTOLOAD] = before
        # TorchTPU's Python and its C++ both warn at the first use of each function that it is experimental.
        warnings.filterwarnings("ignore", module=r"torch_tpu\.")
        warnings.filterwarnings("ignore", message="<TorchTpu/")
        # TorchTPU reads `.grad` in PyTorch's decompositions.
        warnings.filterwarnings("ignore", message="The .grad attribute", module=r"torch\._decomp\.")


def register_early() -> None:
    """Register the device with PyTorch before the first backward pass on the host, which starts the device.

    `import torch` loads torch_tpu automatically, but doesn't name the device if the host has no TPU on its PCI bus. A
    device that starts without a name can't be used later.
    """
    if not is_registered():
        # Importing tpufit must not fail. `start` raises the same error when a fit needs the device.
        with contextlib.suppress(StartError, VersionError):
            load()


def platform() -> str:
    """Return the kind of device: `"TPU"`, or `"CPU"` without a TPU, for the plugin that TPU_LIBRARY_PATH names."""
    return "TPU" if hardware.find_chips() else "CPU"


def start(request: CoresRequest, cores: CoresArgument, asked_by: str, interrupted: CoreGroup | None) -> OneCore:
    """Start TorchTPU on one core, or prepare it on several, which `CoreGroup.begin` starts.

    Several hosts are connected first, because the runtime's start waits for all hosts, without an error if one is
    missing.

    Args:
        interrupted: Cores whose start was interrupted, or None.
    """
    load()
    host = find_host()
    count = _count_on(host, request, cores)
    if interrupted is not None:
        if interrupted.count == count:
            return interrupted
        if not interrupted.connections.cancel():
            raise CoresError(
                f"{asked_by} needs {say_count(count, 'core')}, but an interrupted call has started this process on "
                f"{interrupted.count}. Restart it (in a notebook: the kernel)"
            )
    if count == 1:
        with core_environments.setting_variables(
            core_environments.make_core_variables(request.index if hardware.find_chips() else None)
        ):
            start_core()
        return OneCore()
    if names().has_started() and count > host.count:
        raise CoresError(
            f"{asked_by} needs {count} cores, but this process has already computed on one TPU core without tpufit, "
            "and can't switch to several. Restart it (in a notebook: the kernel) and call "
            f"tpufit.init(cores={count}) first"
        )
    try:
        if host.count > 1 and not is_connected():
            connect(host.index, host.count, host.store(), host.address)
            note_place("starting its cores")
        environments = core_environments.environments(host, count // host.count, platform())
    except HostError:
        raise
    except RuntimeError as error:
        raise CoresError(f"cores={cores!r} was requested, but torch_tpu can't group these cores: {error}") from error

    def start_first() -> None:
        with core_environments.setting_variables(environments[0]):
            # PyTorch sends TorchTPU's warnings during this call to Python's filters; otherwise they are printed.
            with contextlib.suppress(RuntimeError):
                torch.zeros(1).to("tpu")
            start_core()

    return CoreGroup(environments, start_first, skip_wait_at_exit, host)


def _count_on(host: Host, request: CoresRequest, cores: CoresArgument) -> int:
    """Return the number of cores that a call requests, on all hosts together."""
    there = core_environments.count_cores()
    if host.count == 1:
        return core_environments.count_requested(request, there)
    own = 1 if host.started_by == "torchrun" else max(there, 1)
    count = request.count or own * host.count
    if request.index is not None or count % host.count:
        raise CoresError(
            f"cores={cores!r} was requested, but this is one of {host.count} processes of {host.started_by}, which "
            f"compute together, each on the same number of cores. Pass cores='auto', or a multiple of {host.count}"
        )
    return count


def start_core() -> None:
    """Start TorchTPU in this process, on the core that the environment selects."""
    _check_backward_passes()
    environment()  # cached now, because libtpu reads the variables only now
    try:
        names().device_attributes()
        names().synchronize_device(0, True)
    except RuntimeError as error:
        held = hardware.find_tpu_processes()
        who = f" The TPU is held by process {hardware.describe_processes(held)}: end it." if held else ""
        raise StartError(f"torch_tpu did not start.{who}\ntorch_tpu says: {error}") from error
    add_operations(platform())


def _check_backward_passes() -> None:
    try:
        torch._C._get_accelerator()
    except RuntimeError as error:
        if "PrivateUse1HooksInterface" not in str(error):
            return  # the start that follows raises an error with the reason
        raise StartError(
            "a backward pass ran on the host before torch_tpu's device had a name, so no more backward passes can "
            "run in this process. Restart Python, and import tpufit after torch and before that backward pass"
        ) from error


def add_operations(platform: str) -> None:
    """Enable fallback to the host, and add operations that torch_tpu lacks on this kind of device."""
    names().fall_back(True)
    lower_missing("PrivateUse1")
    patch_kernels(platform)


def skip_wait_at_exit() -> None:
    """Prevent this process from waiting at its end for the device, which may never answer."""
    atexit.unregister(names().shut_down)
    libc = ctypes.CDLL(None)
    libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)
