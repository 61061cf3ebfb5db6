"""This host's hardware, read without torch: TPU chips, their holders, the platform, the memory.

All of it is read from files that Linux keeps. The functions take their root, so that tests can lay out another host in
a folder.
"""

import os
import resource
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path

from .users_code import warn

# What a process says that may use no more memory, or start no more threads.
LACKS_MEMORY = (
    "failed to map",
    "Cannot allocate memory",
    "MemoryError",
    "bad_alloc",
    "pthread_create failed",
    "out of memory",
)

# Variables that were once the way to bfloat16 on TPUs. torch_xla still obeys some, behind PyTorch's back, so that
# tensors say float32 and are not.
_RETIRED = ("XLA_USE_BF16", "XLA_DOWNCAST_BF16", "XLA_USE_F16", "XLA_DOWNCAST_F16")

_ROOT = Path("/")
_VENDOR = "0x1ae0"  # Google's
# Variables that another run leaves: they make libtpu wait for processes that are not there. Kaggle's images set some.
_OF_MANY_PROCESSES = ("TPU_PROCESS_ADDRESSES", "CLOUD_TPU_TASK_ID")


@dataclass(frozen=True)
class Chip:
    """A type of TPU, as its vendor says."""

    name: str  # e.g. "v5e"
    devices: int  # that the runtime reports for one chip
    memory: int  # of a device, in GiB; for "v2 or v3" that of a v2
    peak: float | None = None  # products of a device in bfloat16, in operations a second


# Sources: cloud.google.com/tpu/docs/system-architecture-tpu-vm, and the pages of v2, v3, v4, v5e, v5p and v6e; the peak
# of a v2: Jouppi et al., "A Domain-Specific Supercomputer for Training Deep Neural Networks" (2020).
GENERATIONS = {
    chip.name: chip
    for chip in (
        Chip("v2", 2, 8, 23e12),
        Chip("v3", 2, 16, 61.5e12),
        Chip("v4", 1, 32, 275e12),
        Chip("v5e", 1, 16, 197e12),
        Chip("v5p", 1, 95, 459e12),
        Chip("v6e", 1, 32, 918e12),
    )
}
# By the PCI device. Sources: torch_xla/_internal/tpu.py (torch_xla 2.9), jax/_src/hardware_utils.py (v5p).
CHIPS = {
    "0x0027": replace(GENERATIONS["v2"], name="v2 or v3", peak=None),
    "0x005e": GENERATIONS["v4"],
    "0x0062": GENERATIONS["v5p"],
    "0x0063": GENERATIONS["v5e"],
    "0x006f": GENERATIONS["v6e"],
    # Two devices, by torch_xla's bounds of its processes. It must be known at least as a TPU: on a host that counts as
    # one without, torch_xla 2.9 can't be imported beside it.
    "0x0076": Chip("v7x", 2, 96),
}


def chips(root: Path = _ROOT) -> list[Chip]:
    """The TPU chips that are attached to this host.

    Example:
        >>> sum(chip.devices for chip in [CHIPS["0x0027"]] * 4)  # a v3-8 has four chips
        8
    """
    vendors = sorted(root.glob("sys/bus/pci/devices/*/vendor"))
    devices = [_read(vendor.with_name("device")) for vendor in vendors if _read(vendor) == _VENDOR]
    return [CHIPS[device] for device in devices if device in CHIPS]


def holders(root: Path = _ROOT) -> dict[int, str]:
    """The commands of the processes that have a TPU open, by process id. Other users' processes show to root only."""
    found = {}
    for process in root.glob("proc/[0-9]*"):
        try:
            opened = [os.readlink(descriptor) for descriptor in (process / "fd").iterdir()]
        except OSError:  # another user's, or just ended
            continue
        if any(path.startswith(("/dev/accel", "/dev/vfio/")) for path in opened):
            found[int(process.name)] = _read(process / "cmdline").replace("\0", " ").strip() or "(ended)"
    return dict(sorted(found.items()))


def describe(holders: Mapping[int, str]) -> str:
    """Write process ids with their commands in one line.

    Example:
        >>> describe({17: "python train.py", 18: "python -m ipykernel_launcher"})
        '17 (python train.py), 18 (python -m ipykernel_launcher)'
    """
    return ", ".join(f"{pid} ({command[:60]})" for pid, command in holders.items())


def place(root: Path = _ROOT) -> str:
    """The platform: `"Kaggle"`, `"Colab"`, `"TPU VM"` or `"a machine without a TPU"`, by its folders and devices.

    Environment variables say nothing: they are copied, left over and forged.
    """
    if (root / "kaggle").is_dir():
        return "Kaggle"
    if (root / "content").is_dir() and any(root.glob("usr/local/lib/python3*/dist-packages/google/colab")):
        return "Colab"
    return "TPU VM" if chips(root) else "a machine without a TPU"


def drop_stale_variables(environ: MutableMapping[str, str] = os.environ, root: Path = _ROOT) -> None:
    """On Kaggle, remove the variables that a run of many processes has left in the environment, and warn of it.

    Only there, and only with a TPU: elsewhere they may be meant. It must come before torch_xla is imported.
    """
    stale = [name for name in _OF_MANY_PROCESSES if name in environ]
    if stale and place(root) == "Kaggle" and chips(root):
        removed = " and ".join(f"{name}={environ.pop(name)!r}" for name in stale)
        warn(
            f"removed {removed} from the environment: left from a run of several processes, for which the TPU would "
            "wait in vain",
        )


def leave_the_cloud_alone(environ: MutableMapping[str, str] = os.environ, root: Path = _ROOT) -> None:
    """On a host without a TPU, keep libtpu from asking the cloud's metadata server for one, which takes minutes.

    It must come before libtpu is loaded, which then says at once that there is none.
    """
    if not chips(root):
        environ.setdefault("TPU_SKIP_MDS_QUERY", "1")


def memory(root: Path = _ROOT) -> dict[str, int]:
    """The bytes of memory that this process may use, by the limit that says so; `"RAM"` is always among them."""
    found = {"RAM": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")}
    for path in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = _read(root / path)
        if text.isdecimal() and int(text) < found["RAM"]:
            found["the container (cgroup)"] = int(text)
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit not in (resource.RLIM_INFINITY, -1):
        found["ulimit -v (RLIMIT_AS)"] = limit
    return found


def cpus() -> int:
    """The number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def retired_variables(environ: Mapping[str, str]) -> list[str]:
    """The variables that are set, of those that were once the way to another precision.

    Example:
        >>> retired_variables({"XLA_USE_BF16": "1", "XLA_USE_F16": "0"})
        ['XLA_USE_BF16']
    """
    return [variable for variable in _RETIRED if environ.get(variable, "0") not in ("", "0")]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
