"""`CheckpointDirectory`: a run's folder of checkpoints, of which it keeps the newest and the best."""

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import CheckpointBusyError, CheckpointDamagedError, CheckpointError, CheckpointNotWrittenError
from ..hosts import is_first
from ..utils.files import DISK_FULL, HeldError
from ..utils.text import size
from ..utils.urls import Url
from ..utils.users_code import warn
from .format import Checkpoint, Score, read, read_manifest, write
from .store import name_of, step_of, store_at
from .weight_files import NotFiniteError

Check = Callable[[Checkpoint], None]


def _unchecked(checkpoint: Checkpoint) -> None:
    """Raise nothing."""


class CheckpointDirectory:
    """A run's folder of checkpoints; `open` makes it.

    It keeps the `keep_last` newest ones (None: all), and besides these the `keep_best` best by metric.

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

    def __init__(self, path: str | os.PathLike[str] | Url, keep_last: int | None = None, keep_best: int = 0) -> None:
        self._store = store_at(path)
        self.path = self._store.where
        self.keep_last = keep_last
        self.keep_best = keep_best
        self.opened = 0  # times, less those it was closed: a `fit` inside a `fit` may have the same callback

    def open(self) -> None:
        """Check, before hours of training, that checkpoints can be written here, and lock out other writers.

        Raises:
            CheckpointBusyError: Another process, or another callback of this one, writes into this folder.
            CheckpointNotWrittenError: Nothing can be written here.
        """
        if self.opened or not is_first():
            self.opened += 1
            return
        try:
            dropped = self._store.reserve()
        except HeldError as held:
            if held.here:
                raise CheckpointBusyError(
                    f"another callback of this process keeps checkpoints in {self.path.absolute()}: two in one folder "
                    "would overwrite each other. Give each a folder of its own"
                ) from None
            cure = "two runs in one folder would overwrite each other. Wait for its end, or pass another path"
            raise CheckpointBusyError(f"{held} trains into {self.path.absolute()}: {cure}") from None
        except OSError as error:
            # An error of another store, such as the Hub's of a repository that isn't there, has words of its own.
            said = error.strerror or str(error).rstrip(".")
            why = f"{said}. Pass a folder that exists or can be made, and may be written to"
            raise CheckpointNotWrittenError(f"checkpoints can't be written to {self.path.absolute()}: {why}") from error
        self.opened = 1
        if dropped:
            warn(
                f"dropped from {self.path}: {', '.join(dropped)}, which a process that was killed left unfinished",
            )

    def close(self) -> None:
        """Release the lock, so that others may write here, if it was closed as often as opened."""
        self.opened = max(0, self.opened - 1)
        if not self.opened:
            self._store.release()

    def clear(self) -> None:
        """Remove all checkpoints with a readable manifest, and the folder if only its lock is left: nothing else."""
        if not is_first():
            return
        for name in self._manifests():
            self._store.remove(name)
        self._store.discard()

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, whole or damaged, in ascending order."""
        return [step_of(name) for name in self._store.names()]

    def write(self, checkpoint: Checkpoint) -> Path | Url:
        """Write a checkpoint, then remove those that are no longer to be kept; return its folder.

        One of the same step is replaced. If the checkpoint is on the device, all hosts of a pod call this.

        Raises:
            CheckpointNotWrittenError: There is no room, the file system refused, or a weight isn't finite. Earlier
                checkpoints are untouched.
        """
        name = name_of(checkpoint.step)
        try:
            numbers = [manifest["number"] for manifest in self._manifests().values()]
            write(self._store, name, checkpoint, 1 + max(numbers, default=0))
        except NotFiniteError as error:
            raise self._not_written(checkpoint, f"{error} holds NaN or infinities") from error
        except OSError as error:
            why = self._no_room(checkpoint) if error.errno in DISK_FULL else str(error)
            raise self._not_written(checkpoint, why) from error
        if is_first():
            try:
                self._prune()  # only now: a failed write leaves the older ones
            except OSError as error:
                warn(f"a checkpoint that is no longer to be kept can't be removed from {self.path}: {error}")
        return self.path / name

    def newest(self, check: Check = _unchecked) -> Checkpoint | None:
        """Return the newest whole checkpoint; None if there has never been a checkpoint.

        Args:
            check: Called with each that is read, to raise a `CheckpointDamagedError` (default: nothing more is asked).

        Raises:
            CheckpointDamagedError: All checkpoints are damaged; the message says how each.
        """
        readable = self._manifests()
        unreadable = [name for name in self._store.names() if name not in readable]
        return self._first_whole([*readable, *unreadable][::-1], check)

    def best(self, check: Check = _unchecked) -> Checkpoint | None:
        """Return the best whole checkpoint by metric, see `newest`; None if there has never been one with a metric."""
        return self._first_whole(self._by_metric(), check, self._faults())

    def _first_whole(self, names: Sequence[str], check: Check, known: Sequence[str] = ()) -> Checkpoint | None:
        """Return the first that is whole, and warn of the faults of those before, and of others that are known."""
        faults = list(known)
        for name in names:
            try:
                found = read(self.path / name)
                check(found)
            except CheckpointDamagedError as error:
                faults.append(str(error))
                continue
            for fault in faults:
                warn(f"{fault}. Going on from {self.path / name}")
            return found
        if faults:
            how = "; ".join(faults)
            cure = "To start over, pass another folder or resume=False"
            raise CheckpointDamagedError(f"none of the checkpoints in {self.path} can be read: {how}. {cure}")
        return None

    def _manifests(self) -> dict[str, dict[str, Any]]:
        """Return the readable manifests by name, in order of writing: that of steps, unless training went back."""
        found = {}
        for name in self._store.names():
            with suppress(CheckpointError):  # damaged, or of a later version: reported when it is read
                found[name] = read_manifest(self.path / name)
        return dict(sorted(found.items(), key=lambda item: item[1]["number"]))

    def _faults(self) -> list[str]:
        """Say what is wrong with the manifests that can't be read, whose metrics nobody knows."""
        faults = []
        for name in self._store.names():
            try:
                read_manifest(self.path / name)
            except CheckpointError as error:
                faults.append(str(error))
        return faults

    def _by_metric(self) -> list[str]:
        """Return the names of the checkpoints with a metric, the best first; of equal ones the earlier first."""
        metrics = {name: manifest["metric"] for name, manifest in self._manifests().items() if manifest["metric"]}
        return sorted(metrics, key=lambda name: Score(**metrics[name]).order)

    def _prune(self) -> None:
        if self.keep_last is None:
            return
        names = list(self._manifests())
        kept = {*names[-self.keep_last :], *self._by_metric()[: self.keep_best]}
        for name in names:
            if name not in kept:
                self._store.remove(name)

    def _not_written(self, checkpoint: Checkpoint, why: str) -> CheckpointNotWrittenError:
        try:
            steps = self.steps()
            last = f"The last good one is that of step {steps[-1]}" if steps else "There is none yet"
        except OSError:
            last = f"{self.path} can't be listed either"
        return CheckpointNotWrittenError(f"the checkpoint of step {checkpoint.step} was not written: {why}. {last}")

    def _no_room(self, checkpoint: Checkpoint) -> str:
        need = sum(t.nbytes for t in (*checkpoint.weights.values(), *checkpoint.training.values()))
        need += len(json.dumps(checkpoint.state))
        free = self._store.free()
        return f"no room in {self.path} (need {size(need)}, free {'unknown' if free is None else size(free)})"
