"""The random and counter states of a loader's workers: sent with each batch, and restored on resumption.

This resumes a `DataLoader` with random augmentation in its workers to the last bit.

Each of n workers has its own random generators and its own copy of the data set; batch b comes from worker b % n. A
pass therefore resumes at the beginning of a round of n batches. Batches of this round that were already used are read
again, with the same draws, and dropped.
"""

import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, get_worker_info

from ..utils.random import RNGState
from ..utils.saved_attributes import SavedAttributes

# In a worker process: the state of its copies of the user's objects.
_WORKER = types.SimpleNamespace(attributes=None)


class WorkerBatch(NamedTuple):
    """A batch, with its worker's number and state after it."""

    batch: Any
    worker: int
    state: dict[str, Any]


class _CollateWithState:
    """A loader's `collate_fn` that also returns the worker's state."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> WorkerBatch:
        batch = self.collate(samples)
        worker = get_worker_info()
        assert worker is not None
        return WorkerBatch(
            batch, worker.id, {"draws": RNGState.now().state_dict(), "objects": _WORKER.attributes.state_dict()}
        )


class _InitWithState:
    """A loader's `worker_init_fn` that restores the worker's state."""

    def __init__(self, user_function: Callable[[int], None] | None, collate: Callable[[Any], Any]) -> None:
        self.user_function = user_function
        self.collate = collate
        self.states: Mapping[str, Any] = {}

    def __call__(self, number: int) -> None:
        if self.user_function is not None:
            self.user_function(number)
        worker = get_worker_info()
        assert worker is not None
        _WORKER.attributes = SavedAttributes({"dataset": worker.dataset, "collate_fn": self.collate})
        given = self.states.get(str(number))
        if given is not None:
            _WORKER.attributes.load_state_dict(given["objects"])
            RNGState.of(given["draws"]).restore()


class WorkerStates:
    """The states of a loader's workers, which arrive with its batches."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.count = loader.num_workers
        self._persistent = loader.persistent_workers
        self.ahead = self.count * (loader.prefetch_factor or 2)  # batches requested ahead
        self._begin = _InitWithState(loader.worker_init_fn, loader.collate_fn)
        # The arguments of a loader whose workers report their states.
        self.options: dict[str, Any] = {
            "collate_fn": _CollateWithState(loader.collate_fn),
            "worker_init_fn": self._begin,
        }
        self._last: dict[str, Any] = {}
        self._round: dict[str, Any] = {}  # after the last whole round of batches
        self._done = 0
        self._inside = self._started = False
        self._passed = False  # a pass is over, so persistent workers exist

    def count_whole_rounds(self, done: int) -> int:
        """Return the number of batches in whole rounds, of `done` batches."""
        return done // self.count * self.count

    def begin(self, done: int) -> bool:
        """Begin or resume a pass, after `done` batches in whole rounds.

        Returns:
            True if persistent workers are restarted in a later pass, for which PyTorch draws once more.
        """
        if not self._persistent and not done:
            self._last = {}
        self._begin.states = dict(self._last)
        self._round = dict(self._last)
        self._done = done
        self._inside = True
        again = self._persistent and self._passed and not self._started
        self._started = True
        return again

    def record(self, received: WorkerBatch) -> Any:
        """Record the state that came with a batch, and return the batch."""
        self._last[str(received.worker)] = received.state
        self._done += 1
        if self._done % self.count == 0:
            self._round = dict(self._last)
        return received.batch

    def end(self) -> None:
        """Record that the pass is over."""
        self._inside = False
        self._passed = True

    def state_dict(self) -> dict[str, Any] | None:
        """Return the states to resume from; None between passes if each pass starts new workers."""
        if self._inside or self._persistent:
            states = self._round if self._inside else dict(self._last)
            return {"workers": states, "count": self.count, "passed": self._passed}
        return None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next pass resume from states that `state_dict` returned for as many workers."""
        self._last = dict(state["workers"])
        self._passed = state["passed"]
