"""This host's hardware, read without torch: TPU chips, the processes that use them, the platform, the memory.

Everything is read from Linux's files. The functions take the root folder, so that tests can imitate another host.
"""

import os
import resource
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path

from .user_code import warn

# The messages of a process that can't allocate memory or start threads.
LACKS_MEMORY = (
    "failed to map",
    "Cannot allocate memory",
    "MemoryError",
    "bad_alloc",
    "pthread_create failed",
    "out of memory",
)

# Variables that used to select bfloat16 on TPUs. torch_xla still obeys some of them without PyTorch's knowledge, so
# that tensors report float32 but have another dtype.
_RETIRED = ("XLA_USE_BF16", "XLA_DOWNCAST_BF16", "XLA_USE_F16", "XLA_DOWNCAST_F16")

_ROOT = Path("/")
_VENDOR = "0x1ae0"  # Google's
# Variables of runs with several processes: they make libtpu wait for processes that don't exist. Kaggle's images set
# some.
_MULTIPROCESS_VARIABLES = ("TPU_PROCESS_ADDRESSES", "CLOUD_TPU_TASK_ID")


@dataclass(frozen=True)
class Chip:
    """A type of TPU, by its vendor's documentation."""

    name: str  # e.g. "v5e"
    devices: int  # per chip, as the runtime reports
    memory: int  # of a device, in GiB; for "v2 or v3" a v2's
    peak: float | None = None  # of a device's bfloat16 products, in operations per second


# Sources: cloud.google.com/tpu/docs/system-architecture-tpu-vm, and the pages of v2, v3, v4, v5e, v5p, v6e and tpu7x;
# the peak of a v2: Jouppi et al., "A Domain-Specific Supercomputer for Training Deep Neural Networks" (2020).
GENERATIONS = {
    chip.name: chip
    for chip in (
        Chip("v2", 2, 8, 23e12),
        Chip("v3", 2, 16, 61.5e12),
        Chip("v4", 1, 32, 275e12),
        Chip("v5e", 1, 16, 197e12),
        Chip("v5p", 1, 95, 459e12),
        Chip("v6e", 1, 32, 918e12),
        Chip("v7x", 2, 96, 1153.5e12),
    )
}
# By the PCI device. Sources: torch_xla/_internal/tpu.py (torch_xla 2.9), jax/_src/hardware_utils.py (v5p).
CHIPS = {
    "0x0027": replace(GENERATIONS["v2"], name="v2 or v3", peak=None),
    "0x005e": GENERATIONS["v4"],
    "0x0062": GENERATIONS["v5p"],
    "0x0063": GENERATIONS["v5e"],
    "0x006f": GENERATIONS["v6e"],
    # This chip must count as a TPU with torch_xla, too: if a host with this chip counted as a host without TPUs,
    # torch_xla 2.9 couldn't be imported there.
    "0x0076": GENERATIONS["v7x"],
}


def find_chips(root: Path = _ROOT) -> list[Chip]:
    """Return the TPU chips attached to this host.

    Example:
        >>> sum(chip.devices for chip in [CHIPS["0x0027"]] * 4)  # a v3-8 has four chips
        8
    """
    vendors = sorted(root.glob("sys/bus/pci/devices/*/vendor"))
    devices = [_read(vendor.with_name("device")) for vendor in vendors if _read(vendor) == _VENDOR]
    return [CHIPS[device] for device in devices if device in CHIPS]


def count_gpus(root: Path = _ROOT) -> int:
    """Return the number of NVIDIA GPUs that this process may open."""
    return len([*root.glob("dev/nvidia[0-9]*")])


def find_tpu_processes(root: Path = _ROOT) -> dict[int, str]:
    """Return the commands of processes that use a TPU, by process id. Only root sees other users' processes."""
    commands = {}
    for process in root.glob("proc/[0-9]*"):
        try:
            opened = [os.readlink(descriptor) for descriptor in (process / "fd").iterdir()]
        except OSError:  # another user's, or just ended
            continue
        if any(path.startswith(("/dev/accel", "/dev/vfio/")) for path in opened):
            commands[int(process.name)] = _read(process / "cmdline").replace("\0", " ").strip() or "(ended)"
    return dict(sorted(commands.items()))


def describe_processes(holders: Mapping[int, str]) -> str:
    """List process ids with their commands in one line.

    Example:
        >>> describe_processes({17: "python train.py", 18: "python -m ipykernel_launcher"})
        '17 (python train.py), 18 (python -m ipykernel_launcher)'
    """
    return ", ".join(f"{pid} ({command[:60]})" for pid, command in holders.items())


def find_platform(root: Path = _ROOT) -> str:
    """Return the platform, by folders and devices: `"Kaggle"`, `"Colab"`, `"TPU VM"` or `"a machine without a TPU"`.

    Environment variables aren't used: they may be copied, left over or forged.
    """
    if (root / "kaggle").is_dir():
        return "Kaggle"
    if (root / "content").is_dir() and any(root.glob("usr/local/lib/python3*/dist-packages/google/colab")):
        return "Colab"
    return "TPU VM" if find_chips(root) else "a machine without a TPU"


def drop_stale_variables(environ: MutableMapping[str, str] = os.environ, root: Path = _ROOT) -> None:
    """On Kaggle, remove variables that a run of several processes has left in the environment, and warn about it.

    Only there, and only with a TPU: elsewhere they may be intended. Call it before torch_xla is imported.
    """
    stale = [name for name in _MULTIPROCESS_VARIABLES if name in environ]
    if stale and find_platform(root) == "Kaggle" and find_chips(root):
        removed = " and ".join(f"{name}={environ.pop(name)!r}" for name in stale)
        warn(
            f"removed {removed} from the environment: left over from a run of several processes, for which the TPU "
            "would wait forever",
        )


def skip_metadata_query(environ: MutableMapping[str, str] = os.environ, root: Path = _ROOT) -> None:
    """On a host without a TPU, keep libtpu from querying the cloud's metadata server for minutes.

    Call it before libtpu is loaded, which then reports at once that there is no TPU.
    """
    if not find_chips(root):
        environ.setdefault("TPU_SKIP_MDS_QUERY", "1")


def read_memory_limits(root: Path = _ROOT) -> dict[str, int]:
    """Return the bytes of memory that this process may use, by limit; `"RAM"` is always included."""
    limits = {"RAM": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")}
    for path in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = _read(root / path)
        if text.isdecimal() and int(text) < limits["RAM"]:
            limits["the container (cgroup)"] = int(text)
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit not in (resource.RLIM_INFINITY, -1):
        limits["ulimit -v (RLIMIT_AS)"] = limit
    return limits


def count_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def find_retired_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the set variables that used to select another precision.

    Example:
        >>> find_retired_variables({"XLA_USE_BF16": "1", "XLA_USE_F16": "0"})
        ['XLA_USE_BF16']
    """
    return [variable for variable in _RETIRED if environ.get(variable, "0") not in ("", "0")]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
