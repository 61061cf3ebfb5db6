"""`collect_facts`: gathers facts about this machine, without judging them or starting the runtime in this process."""

import os
import shutil
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..utils import hardware, releases
from .trial import ALL, Trial, run_trial

_PACKAGES = ("torch", *releases.RUNTIMES, "tensorflow", "tensorflow-cpu", *releases.COMPILER)


@dataclass(frozen=True)
class Pod:
    """The hosts of a pod."""

    names: tuple[str, ...] = ()  # empty if there is no pod, or the environment doesn't have them
    missing: tuple[str, ...] = ()  # hosts whose names can't be resolved
    activity: str = ""  # what each is doing, or which are gone; "" before they are connected


@dataclass(frozen=True)
class Process:
    """This process."""

    pid: int = 1
    cores: str = ""  # its cores as text, or "" if they aren't chosen yet
    imported_xla: bool = False  # torch_xla was imported in it before tpufit needed it
    pod: Pod = Pod()  # the pod that it belongs to


@dataclass(frozen=True)
class Facts:
    """The facts for the checks. The defaults are a healthy laptop's, so that a test sets only the faults."""

    python: tuple[int, ...] = (3, 11, 0)
    # Of the relevant installed packages.
    versions: Mapping[str, str] = field(default_factory=lambda: {"torch": "2.9.0", "torch_xla": "2.9.0"})
    environ: Mapping[str, str] = field(default_factory=dict)
    place: str = "a machine without a TPU"  # or "Kaggle", "Colab", "TPU VM"
    chips: tuple[hardware.Chip, ...] = ()  # on the PCI bus
    gpus: int = 0  # NVIDIA's, for which plain PyTorch is enough
    # The commands of the processes that use a TPU, by process id.
    holders: Mapping[int, str] = field(default_factory=dict)
    process: Process = Process()
    # Bytes that this process may use, by limit.
    memory: Mapping[str, int] = field(default_factory=lambda: {"RAM": 64 << 30})
    cpus: int = 16  # that it may use
    disk: int = 100 << 30  # free bytes where caches and checkpoints go by default
    trials: tuple[Trial, ...] = ()  # the results of the trainings


def collect_facts(train: bool, timeout: float) -> Facts:
    """Gather facts about this machine; each training may take `timeout` seconds."""
    # Importing the runtime would import torch, which may be the fault.
    runtime = sys.modules.get("tpufit.runtime")
    pod = sys.modules.get("tpufit.hosts")
    cores = runtime.get_settled_cores() if runtime else None
    hosts = tuple(name for name in os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if name)
    missing = tuple(name for name in hosts if not _is_resolvable(name)) if len(hosts) > 1 else ()
    # On a pod, a training that not all hosts begin would wait forever.
    train = train and cores is None and len(hosts) < 2
    gpus = hardware.count_gpus()
    # Without a TPU, TorchTPU's cores are processes of a plugin: a trial on eight says nothing about this machine.
    counts = (1,) if releases.find_version("torch_tpu") and not hardware.find_chips() else (1, ALL)
    if gpus and not any(map(releases.find_version, releases.RUNTIMES)):
        counts = (ALL,)  # the GPU; a count means cores, which a runtime has
    return Facts(
        python=sys.version_info[:3],
        versions={name: version for name in _PACKAGES if (version := releases.find_version(name)) is not None},
        environ=dict(os.environ),
        place=hardware.find_platform(),
        chips=tuple(hardware.find_chips()),
        gpus=gpus,
        holders=hardware.find_tpu_processes(),
        process=Process(
            os.getpid(),
            str(cores or ""),
            cores is None and "torch_xla" in sys.modules,
            Pod(hosts, missing, pod.describe_hosts() if pod and cores else ""),
        ),
        memory=hardware.read_memory_limits(),
        cpus=hardware.count_cpus(),
        disk=shutil.disk_usage(os.getcwd()).free,
        trials=tuple(run_trial(count, timeout) for count in counts) if train else (),
    )


def _is_resolvable(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None))
    except OSError:
        return False
