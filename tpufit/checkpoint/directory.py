"""`CheckpointDirectory`: a run's folder of checkpoints, of which it keeps the newest and the best."""

import json
import math
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ..errors import CheckpointBusyError, CheckpointDamagedError, CheckpointNotWrittenError
from ..utils.files import DISK_FULL, LOCK, HeldError, Lock
from ..utils.text import size
from ..utils.users_code import warn
from .format import Checkpoint, Score, read, read_manifest, write
from .store import LocalStore, name_of, step_of
from .weights import first_broken


class CheckpointDirectory:
    """A run's folder of checkpoints.

    Args:
        path: The folder; `open` makes it.
        keep_last: The number of newest checkpoints to keep (default: all).
        keep_best: The number of best ones by metric to keep besides (default 0).

    Example:
        >>> import tempfile, torch
        >>> place = tempfile.TemporaryDirectory()
        >>> run = CheckpointDirectory(place.name, keep_last=2)
        >>> for step in (10, 20, 30):
        ...     _ = run.write(Checkpoint(step, {"weight": torch.ones(2)}, {}, {"epoch": step // 10}))
        >>> run.steps()
        [20, 30]
        >>> run.newest().state
        {'epoch': 3}
        >>> place.cleanup()
    """

    def __init__(self, path: str | os.PathLike[str], keep_last: int | None = None, keep_best: int = 0) -> None:
        self.path, self.keep_last, self.keep_best = Path(path), keep_last, keep_best
        self._store = LocalStore(path)
        self._lock: Lock | None = None

    def open(self) -> None:
        """Check, before hours of training, that checkpoints can be written here, and lock out other writers.

        Raises:
            CheckpointBusyError: Another process trains into this folder.
            CheckpointNotWrittenError: Nothing can be written here.
        """
        if self._lock is not None:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = Lock(self.path)
            dropped = self._store.clean()  # under the lock: else the drafts may be those of a live run
        except HeldError as held:
            raise CheckpointBusyError(
                f"{held} trains into {self.path.absolute()}: two runs in one folder would overwrite each other. Wait "
                "for its end, or pass another path"
            ) from None
        except OSError as error:
            raise CheckpointNotWrittenError(
                f"checkpoints can't be written to {self.path.absolute()}: {error.strerror}. Pass a folder that exists "
                "or can be made, and may be written to"
            ) from error
        if dropped:
            warn(
                f"dropped from {self.path}: {', '.join(dropped)}, which a process that was killed left unfinished",
            )

    def close(self) -> None:
        """Release the lock, so that others may write here."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def clear(self) -> None:
        """Remove all checkpoints with a readable manifest, and the folder if only its lock is left: nothing else."""
        for name in self._numbers():
            self._store.remove(name)
        with suppress(OSError):  # a link to a folder stays, and one that is gone is gone
            if [entry.name for entry in self.path.iterdir()] == [LOCK]:
                shutil.rmtree(self.path)

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, whole or damaged, in ascending order."""
        return [step_of(name) for name in self._store.names()]

    def write(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint, then remove those that are no longer to be kept.

        Args:
            checkpoint: The checkpoint; one of the same step is replaced.

        Returns:
            The checkpoint's folder.

        Raises:
            CheckpointNotWrittenError: There is no room, the file system refused, or a weight isn't finite. Earlier
                checkpoints are untouched.
        """
        name = name_of(checkpoint.step)
        bad = first_broken(checkpoint.weights, checkpoint.learned)
        if bad is not None:
            raise CheckpointNotWrittenError(
                f"the checkpoint of step {checkpoint.step} was not written: {bad} holds NaN or infinities. "
                f"{self._last_good()}"
            )
        try:
            write(self._store, name, checkpoint, 1 + max(self._numbers().values(), default=0))
        except OSError as error:
            raise CheckpointNotWrittenError(self._refused(checkpoint, error)) from error
        self._prune()  # only now: a failed write leaves the older ones
        return self._store.folder(name)

    def newest(self) -> Checkpoint | None:
        """Return the newest whole checkpoint; None if there has never been a checkpoint.

        Raises:
            CheckpointDamagedError: All checkpoints are damaged; the message says how each.
        """
        numbers = self._numbers()
        return self._first_whole(
            sorted(self._store.names(), key=lambda name: (numbers.get(name, math.inf), step_of(name)), reverse=True)
        )

    def best(self) -> Checkpoint | None:
        """Return the best whole checkpoint by metric; None if there has never been one with a metric."""
        return self._first_whole(self._by_metric())

    def _first_whole(self, names: Sequence[str]) -> Checkpoint | None:
        faults = []
        for name in names:
            try:
                found = read(self._store.folder(name))
            except CheckpointDamagedError as error:
                faults.append(str(error))
                continue
            for fault in faults:
                warn(f"{fault}. Going on from {self.path / name}")
            return found
        if faults:
            raise CheckpointDamagedError(
                f"none of the checkpoints in {self.path} can be read: {'; '.join(faults)}. To start over, pass another "
                "folder or resume=False"
            )
        return None

    def _numbers(self) -> dict[str, int]:
        """Return the readable checkpoints' numbers in order of writing: that of steps, unless training went back."""
        numbers = {}
        for name in self._store.names():
            with suppress(CheckpointDamagedError):  # reported when it is read
                numbers[name] = read_manifest(self._store.folder(name))["number"]
        return numbers

    def _by_metric(self) -> list[str]:
        """Return the names of the checkpoints with a metric, the best first; of equal ones the earlier first."""
        rated = []
        for name in self._store.names():
            with suppress(CheckpointDamagedError):
                manifest = read_manifest(self._store.folder(name))
                if manifest["metric"] is not None:
                    rated.append((Score(**manifest["metric"]).order, manifest["number"], name))
        return [name for *_, name in sorted(rated)]

    def _prune(self) -> None:
        if self.keep_last is None:
            return
        numbers = self._numbers()
        names = sorted(numbers, key=lambda name: numbers[name])
        kept = {*names[-self.keep_last :], *(self._by_metric()[: self.keep_best] if self.keep_best else ())}
        for name in names:
            if name not in kept:
                self._store.remove(name)

    def _last_good(self) -> str:
        steps = self.steps()
        return f"The last good one is that of step {steps[-1]}" if steps else "There is none yet"

    def _refused(self, checkpoint: Checkpoint, error: OSError) -> str:
        head = f"the checkpoint of step {checkpoint.step} was not written: "
        if error.errno in DISK_FULL:
            need = sum(t.nbytes for t in (*checkpoint.weights.values(), *checkpoint.training.values()))
            need += len(json.dumps(checkpoint.state))
            free = shutil.disk_usage(self.path).free
            return f"{head}no room in {self.path} (need {size(need)}, free {size(free)}). {self._last_good()}"
        return f"{head}{error}. {self._last_good()}"
