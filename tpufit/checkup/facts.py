"""`collect`: the facts of this machine, without a judgement and without starting the runtime in this process."""

import os
import shutil
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..utils import hardware, releases
from .trial import ALL, Trial, run

_PACKAGES = ("torch", "torch_xla", "tensorflow", "tensorflow-cpu", *releases.COMPILER)


@dataclass(frozen=True)
class Pod:
    """The hosts of a pod."""

    names: tuple[str, ...] = ()  # empty if there is no pod, or the environment doesn't have them
    missing: tuple[str, ...] = ()  # those whose names lead nowhere
    doing: str = ""  # what each is doing, or which are gone; nothing before they have found each other


@dataclass(frozen=True)
class Process:
    """This process."""

    pid: int = 1
    settled: str = ""  # its cores, in words, or nothing if none are settled
    foreign: bool = False  # torch_xla was imported in it before tpufit needed it
    pod: Pod = Pod()  # that it is one host of


@dataclass(frozen=True)
class Facts:
    """The facts that the checks go by. The defaults are a sound laptop's, so that a test names only the faults."""

    python: tuple[int, ...] = (3, 11, 0)
    # Of the packages that matter and are installed.
    versions: Mapping[str, str] = field(default_factory=lambda: {"torch": "2.9.0", "torch_xla": "2.9.0"})
    environ: Mapping[str, str] = field(default_factory=dict)
    place: str = "a machine without a TPU"  # or "Kaggle", "Colab", "TPU VM"
    chips: tuple[hardware.Chip, ...] = ()  # on the PCI bus
    # The commands of the processes that have a TPU open, by process id.
    holders: Mapping[int, str] = field(default_factory=dict)
    process: Process = Process()
    # Bytes that this process may use, by the source of each limit.
    memory: Mapping[str, int] = field(default_factory=lambda: {"RAM": 64 << 30})
    cpus: int = 16  # that it may use
    disk: int = 100 << 30  # free bytes where caches and checkpoints go by default
    trials: tuple[Trial, ...] = ()  # the results of the trainings


def collect(train: bool, timeout: float) -> Facts:
    """Gather the facts of this machine; each training may take so many seconds."""
    # Loading the runtime loads torch, which may be the fault here.
    runtime = sys.modules.get("tpufit.runtime")
    pod = sys.modules.get("tpufit.hosts")
    cores = runtime.settled() if runtime else None
    hosts = tuple(name for name in os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if name)
    missing = tuple(name for name in hosts if not _leads_somewhere(name)) if len(hosts) > 1 else ()
    # On a pod a training that not all hosts begin would wait for them for ever.
    train = train and cores is None and len(hosts) < 2
    return Facts(
        python=sys.version_info[:3],
        versions={name: version for name in _PACKAGES if (version := releases.version(name)) is not None},
        environ=dict(os.environ),
        place=hardware.place(),
        chips=tuple(hardware.chips()),
        holders=hardware.holders(),
        process=Process(
            os.getpid(),
            str(cores or ""),
            cores is None and "torch_xla" in sys.modules,
            Pod(hosts, missing, pod.whereabouts() if pod and cores else ""),
        ),
        memory=hardware.memory(),
        cpus=hardware.cpus(),
        disk=shutil.disk_usage(os.getcwd()).free,
        trials=tuple(run(cores, timeout) for cores in (1, ALL)) if train else (),
    )


def _leads_somewhere(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None))
    except OSError:
        return False
