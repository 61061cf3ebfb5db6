"""What a loader's workers draw and count: told with each batch, and given back to workers that go on.

A worker has its own random generators and its own copy of the data set. Batch b is worker b % n's. So a pass is gone on
with at a whole round of batches; those of the round that were done are read again, with what they drew, and dropped.
"""

import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, get_worker_info

from ..utils.kept import Kept
from ..utils.random import RNGState

# In a worker process: what its copies of the user's objects keep.
_WORKER = types.SimpleNamespace(kept=None)


class WorkerBatch(NamedTuple):
    """A batch, with its worker's number and state after it."""

    batch: Any
    worker: int
    state: dict[str, Any]


class _CollateWithState:
    """A loader's `collate_fn`, which tells the worker's state too."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> WorkerBatch:
        batch = self.collate(samples)
        worker = get_worker_info()
        assert worker is not None
        return WorkerBatch(batch, worker.id, {"draws": RNGState.now().state_dict(), "kept": _WORKER.kept.state_dict()})


class _InitWithState:
    """A loader's `worker_init_fn`, which gives a worker the state that it goes on from."""

    def __init__(self, own: Callable[[int], None] | None, collate: Callable[[Any], Any]) -> None:
        self.own = own
        self.collate = collate
        self.states: Mapping[str, Any] = {}

    def __call__(self, number: int) -> None:
        if self.own is not None:
            self.own(number)
        worker = get_worker_info()
        assert worker is not None
        _WORKER.kept = Kept({"dataset": worker.dataset, "collate_fn": self.collate})
        given = self.states.get(str(number))
        if given is not None:
            _WORKER.kept.load_state_dict(given["kept"])
            RNGState.of(given["draws"]).restore()


class WorkerStates:
    """The states of a loader's workers, as they come with its batches."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.count = loader.num_workers
        self._stay = loader.persistent_workers
        self.ahead = self.count * (loader.prefetch_factor or 2)  # batches that they are asked for ahead
        self._begin = _InitWithState(loader.worker_init_fn, loader.collate_fn)
        # The arguments of a loader whose workers tell their states.
        self.options: dict[str, Any] = {
            "collate_fn": _CollateWithState(loader.collate_fn),
            "worker_init_fn": self._begin,
        }
        self._last: dict[str, Any] = {}
        self._round: dict[str, Any] = {}  # after the last whole round of batches
        self._done = 0
        self._inside = self._started = False
        self._later = False  # this pass is not the first of these workers, if they stay

    def whole(self, done: int) -> int:
        """The number of batches in whole rounds, of so many that are done."""
        return done // self.count * self.count

    def begin(self, done: int) -> bool:
        """Begin a pass, or go on with one, of whose batches so many are done, in whole rounds.

        Returns:
            True if workers that stay are started anew in a later pass, for which PyTorch draws once more.
        """
        if not self._stay and not done:
            self._last = {}
        self._begin.states = dict(self._last)
        self._round = dict(self._last)
        self._done = done
        self._inside = True
        again = self._stay and self._later and not self._started
        self._started = True
        return again

    def note(self, came: WorkerBatch) -> Any:
        """Note the state that came with a batch, and return the batch."""
        self._last[str(came.worker)] = came.state
        self._done += 1
        if self._done % self.count == 0:
            self._round = dict(self._last)
        return came.batch

    def end(self) -> None:
        """Note that the pass is over."""
        self._inside = False
        self._later = True

    def state_dict(self) -> dict[str, Any] | None:
        """Return the states to go on from; None if workers begin anew in each pass, and none is under way."""
        if self._inside or self._stay:
            states = self._round if self._inside else dict(self._last)
            return {"workers": states, "count": self.count, "later": self._later}
        return None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass go on from states, which `state_dict` returned of as many workers."""
        self._last = dict(state["workers"])
        self._later = state["later"]
