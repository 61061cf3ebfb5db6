"""`gather`: the facts of this machine, without a judgement and without starting the runtime in this process."""

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
    """The hosts of a pod.

    Attributes:
        names: Their names; empty if there is no pod, or the environment doesn't have them.
        missing: Those whose names lead nowhere.
        doing: What each is doing, or which are gone; nothing before they have met.
    """

    names: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    doing: str = ""


@dataclass(frozen=True)
class Process:
    """This process.

    Attributes:
        pid: Its id.
        settled: Its cores, in words, or nothing if none are settled.
        foreign: True if torch_xla was imported in it before tpufit needed it.
        pod: The pod that it is one host of.
    """

    pid: int = 1
    settled: str = ""
    foreign: bool = False
    pod: Pod = Pod()


@dataclass(frozen=True)
class Facts:
    """The facts that the checks go by. The defaults are those of a sound laptop, so that a test names only the faults.

    Attributes:
        python: Python's version.
        versions: The versions of the packages that matter and are installed.
        environ: The environment's variables.
        place: `"Kaggle"`, `"Colab"`, `"TPU VM"` or `"a machine without a TPU"`.
        chips: The TPU chips on the PCI bus.
        holders: The commands of the processes that have a TPU open, by process id.
        process: This process.
        memory: The bytes that this process may use, by the source of each limit.
        cpus: The number of CPUs that it may use.
        disk: Free bytes where caches and checkpoints go by default.
        trials: The results of the trainings; empty if there were none.
    """

    python: tuple[int, ...] = (3, 11, 0)
    versions: Mapping[str, str] = field(default_factory=lambda: {"torch": "2.9.0", "torch_xla": "2.9.0"})
    environ: Mapping[str, str] = field(default_factory=dict)
    place: str = "a machine without a TPU"
    chips: tuple[hardware.Chip, ...] = ()
    holders: Mapping[int, str] = field(default_factory=dict)
    process: Process = Process()
    memory: Mapping[str, int] = field(default_factory=lambda: {"RAM": 64 << 30})
    cpus: int = 16
    disk: int = 100 << 30
    trials: tuple[Trial, ...] = ()


def gather(train: bool, timeout: float) -> Facts:
    """Gather the facts of this machine.

    Args:
        train: True to train.
        timeout: The seconds that each training may take.
    """
    # Loading the runtime loads torch, which may be the fault here.
    runtime, pod = sys.modules.get("tpufit.runtime"), sys.modules.get("tpufit.hosts")
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
