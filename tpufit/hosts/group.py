"""Hosts: a pod runs the same script once on each of its hosts, in a process of its own.

Each process sends its own rows to its own cores; all else is equal on all hosts, because they start the same programs
in the same order. Where a host alone knows something that decides which program comes next, such as a signal or the
time, all of them agree on it first. With one process nothing here does anything.
"""

import atexit
import os
import pickle
import zlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..errors import DeviceLostError, HostError, StateLostError
from .heartbeat import Heartbeat, patience

# How much longer a host waits for another one that lives than for one that is silent: it may read slow data, or write a
# large checkpoint.
_PATIENCE = 30
# What failed here may be the first sign that another host is gone; for how many seconds.
_FIRST_SIGNS = (StateLostError, DeviceLostError)
_NOTICED = 2.0
_GONE = "the other hosts don't answer: {}. Start all hosts again; fit(resume=True) goes on from the last checkpoint"


class Group:
    """The hosts of a pod, as host `index`, from 0, of `count` sees them.

    They find each other through a store that all share, and the address of process 0.
    """

    def __init__(self, index: int, count: int, store: dist.Store, address: str) -> None:
        self.index = index
        self.count = count
        self._gloo: Any = dist.ProcessGroupGloo(
            dist.PrefixStore("tpufit/gloo", store), index, count, timedelta(seconds=_PATIENCE * patience())
        )
        self.heartbeat = Heartbeat(index, count, store, address)
        self._depth = 0
        atexit.register(self.heartbeat.leave, "has ended")

    def all_reduce_max(self, values: Sequence[float]) -> list[float]:
        """Return the largest of each value over all hosts, which must all be at the same place."""
        # The place as a number and its negative: their largest are no longer opposite if two hosts differ.
        here = float(zlib.crc32(self.heartbeat.place.encode()))
        both = torch.tensor([here, -here, *values], dtype=torch.float64)
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self._wait(lambda: self._gloo.allreduce([both], options))
        largest, smallest, *agreed = both.tolist()
        if largest != -smallest:
            places = self.all_gather(self.heartbeat.place)
            where = ", ".join(f"process {index}: {place}" for index, place in enumerate(places))
            raise HostError(
                f"the hosts must do the same, but they are at different places: {where}. Give each the same script, "
                "data of the same length and the same number of steps"
            )
        return agreed

    def broadcast(self, value: Any) -> Any:
        """Return process 0's value on all hosts."""
        return pickle.loads(self._send(pickle.dumps(value) if self.index == 0 else b"", 0))

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all hosts, in their order."""
        own = pickle.dumps(value)
        return [pickle.loads(self._send(own if self.index == root else b"", root)) for root in range(self.count)]

    @contextmanager
    def collective(self) -> Iterator[None]:
        """A context in which this host needs all others. An error that leaves it ends them too."""
        self._depth += 1
        self.heartbeat.busy = True
        try:
            self._check()
            yield
            if self._depth == 1:  # none leaves before all are done, process 0 with writing
                self.heartbeat.place = "the end"
                self.all_reduce_max([])
        except Exception as error:
            if self._depth == 1:
                if isinstance(error, _FIRST_SIGNS) and self.heartbeat.notices(_NOTICED):
                    raise HostError(_GONE.format(self.heartbeat.describe())) from error
                if not self.heartbeat.gone:
                    self.heartbeat.leave(f"has ended with {type(error).__name__}: {error}")
            raise
        finally:
            self._depth -= 1
            self.heartbeat.busy = self._depth > 0

    def _check(self) -> None:
        if self.heartbeat.gone:
            raise HostError(f"{self.heartbeat.describe()}: start all hosts again")

    def _send(self, data: bytes, root: int) -> bytes:
        size = torch.tensor([len(data)])
        options = dist.BroadcastOptions()
        options.rootRank = root
        self._wait(lambda: self._gloo.broadcast([size], options))
        there = int(size)
        content = torch.frombuffer(bytearray(data), dtype=torch.uint8) if self.index == root else None
        sent = torch.empty(there, dtype=torch.uint8) if content is None else content
        self._wait(lambda: self._gloo.broadcast([sent], options))
        return sent.numpy().tobytes()

    def _wait(self, start: Any) -> None:
        self.heartbeat.waits = True
        try:
            start().wait()
        except RuntimeError as error:
            self.heartbeat.notices(_NOTICED)  # which may come after the error, and tells who it is
            raise HostError(_GONE.format(self.heartbeat.describe())) from error
        finally:
            self.heartbeat.waits = False


_group: Group | None = None
# For processes that this one starts, such as workers that read data.
_VARIABLE = "TPUFIT_HOST"


def connect(index: int, count: int, store: dist.Store, address: str) -> None:
    """Meet the other hosts, once; this waits for all of them. See `Group`."""
    global _group
    os.environ[_VARIABLE] = f"{index}/{count}"
    _group = Group(index, count, store, address)


def known() -> tuple[int, int] | None:
    """This host's number and the number of hosts, if they are known: to the process that found them, or a worker."""
    if _group is not None:
        return _group.index, _group.count
    if _VARIABLE in os.environ:
        index, count = os.environ[_VARIABLE].split("/")
        return int(index), int(count)
    return None


def is_first() -> bool:
    """True on the host that writes files and bars: process 0, which is the only one without a pod."""
    return _group is None or _group.index == 0


def all_reduce_max(value: Any) -> Any:
    """The largest value over all hosts, where a value decides which program runs next; with one host it is its own.

    It is a number or flag, or a list of them. All hosts call this at the same moment.
    """
    if _group is None:
        return value
    agreed = _group.all_reduce_max(value if isinstance(value, list) else [value])
    return agreed if isinstance(value, list) else type(value)(agreed[0])


def broadcast(value: Any) -> Any:
    """Process 0's value, on all hosts."""
    return value if _group is None else _group.broadcast(value)


def all_gather(value: Any) -> list[Any]:
    """The values of all hosts, in their order."""
    return [value] if _group is None else _group.all_gather(value)


def barrier() -> None:
    """Wait until all hosts are here."""
    all_gather(None)


def collective() -> AbstractContextManager[None]:
    """A context in which this host needs all others; one that leaves it by an error ends them too."""
    return nullcontext() if _group is None else _group.collective()


def whereabouts() -> str:
    """What each host is doing, or which are gone; nothing without a pod."""
    return "" if _group is None else _group.heartbeat.describe()


def note_place(place: str) -> None:
    """Note what this host is doing, to compare it with the others, and for their sentences."""
    if _group is not None:
        _group.heartbeat.place = place
