"""A pod's hosts: each runs the same script, in one process.

Each process sends its rows to its cores; everything else is equal on all hosts, because they start the same programs in
the same order. If something that only one host knows, such as a signal or the time, decides which program is next, all
hosts agree on it first. With one process nothing here has an effect.
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
from .heartbeat import Heartbeat, read_silence_limit

# How many times longer a host waits for a live host than for a silent one: the live host may be reading slow data, or
# writing a large checkpoint.
_PATIENCE = 30
# Errors that may be the first sign of a lost host, and the seconds to wait until the heartbeat confirms it.
_SIGNS_OF_A_LOST_HOST = (StateLostError, DeviceLostError)
_CONFIRMATION = 2.0
_GONE = "the other hosts don't answer: {}. Start all hosts again; fit(resume=True) resumes from the last checkpoint"


class Group:
    """A pod's hosts, as seen by host `index`, from 0, of `count`.

    They connect through a shared store, and the address of process 0.
    """

    def __init__(self, index: int, count: int, store: dist.Store, address: str) -> None:
        self.index = index
        self.count = count
        self._gloo: Any = dist.ProcessGroupGloo(
            dist.PrefixStore("tpufit/gloo", store), index, count, timedelta(seconds=_PATIENCE * read_silence_limit())
        )
        self.heartbeat = Heartbeat(index, count, store, address)
        self._depth = 0
        atexit.register(self.heartbeat.leave, "has ended")

    def all_reduce_max(self, values: Sequence[float]) -> list[float]:
        """Return the maximum of each value over all hosts, which must all be at the same `place` of the training."""
        # Also reduce the place, as a number and its negative: if two hosts differ, the maxima aren't opposite numbers.
        here = float(zlib.crc32(self.heartbeat.place.encode()))
        both = torch.tensor([here, -here, *values], dtype=torch.float64)
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        self._wait(lambda: self._gloo.allreduce([both], options))
        largest, smallest, *agreed = both.tolist()
        if largest != -smallest:
            places = self.all_gather(self.heartbeat.place)
            where = ", ".join(f"process {index} is at {place!r}" for index, place in enumerate(places))
            raise HostError(
                f"all hosts must run the same steps, but {where}: give each host the same script, data of the same "
                "length and the same number of steps"
            )
        return agreed

    def broadcast(self, value: Any) -> Any:
        """Return process 0's value on all hosts."""
        return pickle.loads(self._send(pickle.dumps(value) if self.index == 0 else b"", 0))

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all hosts, in order."""
        data = pickle.dumps(value)
        return [pickle.loads(self._send(data if self.index == root else b"", root)) for root in range(self.count)]

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Return a context in which this host needs all others. An error that escapes it ends the others, too."""
        self._depth += 1
        self.heartbeat.busy = True
        try:
            self._check()
            yield
            if self._depth == 1:  # no host leaves before all are done, including process 0's writing
                self.heartbeat.place = "the end"
                self.all_reduce_max([])
        except Exception as error:
            if self._depth == 1:
                if isinstance(error, _SIGNS_OF_A_LOST_HOST) and self.heartbeat.wait_for_lost_host(_CONFIRMATION):
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
        content = torch.frombuffer(bytearray(data), dtype=torch.uint8) if self.index == root else None
        sent = torch.empty(int(size), dtype=torch.uint8) if content is None else content
        self._wait(lambda: self._gloo.broadcast([sent], options))
        return sent.numpy().tobytes()

    def _wait(self, start: Any) -> None:
        self.heartbeat.waiting = True
        try:
            start().wait()
        except RuntimeError as error:
            self.heartbeat.wait_for_lost_host(_CONFIRMATION)  # until the heartbeat has found out which host is lost
            raise HostError(_GONE.format(self.heartbeat.describe())) from error
        finally:
            self.heartbeat.waiting = False


_group: Group | None = None
# For this process's children, such as data workers.
_VARIABLE = "TPUFIT_HOST"


def connect(index: int, count: int, store: dist.Store, address: str) -> None:
    """Connect to the other hosts, once; this waits for all of them. See `Group`."""
    global _group
    os.environ[_VARIABLE] = f"{index}/{count}"
    _group = Group(index, count, store, address)


def find_index_and_count() -> tuple[int, int] | None:
    """Return this host's index and the number of hosts, if known: in the process that connected, or in its workers."""
    if _group is not None:
        return _group.index, _group.count
    if _VARIABLE in os.environ:
        index, count = os.environ[_VARIABLE].split("/")
        return int(index), int(count)
    return None


def is_connected() -> bool:
    """True once this process is connected to other hosts."""
    return _group is not None


def is_first() -> bool:
    """True on the host that writes files and progress bars: process 0, also without a pod."""
    return _group is None or _group.index == 0


def all_reduce_max(value: Any) -> Any:
    """Return the maximum over all hosts of a value that decides which program runs next; with one host, the value.

    The value is a number, a flag, or a list of them. All hosts must call this at the same point.
    """
    if _group is None:
        return value
    agreed = _group.all_reduce_max(value if isinstance(value, list) else [value])
    return agreed if isinstance(value, list) else type(value)(agreed[0])


def broadcast(value: Any) -> Any:
    """Return process 0's value on all hosts."""
    return value if _group is None else _group.broadcast(value)


def all_gather(value: Any) -> list[Any]:
    """Return the values of all hosts, in order."""
    return [value] if _group is None else _group.all_gather(value)


def barrier() -> None:
    """Wait until all hosts have called this."""
    all_gather(None)


def collective() -> AbstractContextManager[None]:
    """Return a context in which this host needs all others; an error that escapes it ends the others, too."""
    return nullcontext() if _group is None else _group.collective()


def describe_hosts() -> str:
    """Describe what each host is doing, or which hosts are gone; "" without a pod."""
    return "" if _group is None else _group.heartbeat.describe()


def note_place(place: str) -> None:
    """Record what this host is doing, for comparison with the other hosts, and for their messages."""
    if _group is not None:
        _group.heartbeat.place = place
