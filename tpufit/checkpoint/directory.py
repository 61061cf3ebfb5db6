"""`CheckpointDirectory`: a run's folder of checkpoints, which keeps the newest and the best."""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..errors import CheckpointBusyError, CheckpointDamagedError, CheckpointError, CheckpointNotWrittenError
from ..hosts import is_first
from ..utils.files import DISK_FULL, LockedError
from ..utils.text import format_bytes
from ..utils.urls import Url
from ..utils.user_code import warn
from .format import Checkpoint, read, read_manifest, write
from .retention import list_superseded, sort_by_metric
from .store import checkpoint_name, open_store, parse_step
from .weight_files import NotFiniteError

Check = Callable[[Checkpoint], None]


def _accept(checkpoint: Checkpoint) -> None:
    """Accept any checkpoint."""


class CheckpointDirectory:
    """A run's folder of checkpoints; `open` creates it.

    It keeps the `keep_last` newest checkpoints (None: all), and in addition the `keep_best` best by metric.

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
        self._store = open_store(path)
        self.path = self._store.where
        self.keep_last = keep_last
        self.keep_best = keep_best
        self.opened = 0  # opens minus closes: a nested `fit` may have the same callback

    def open(self) -> None:
        """Check before training that checkpoints can be written here, and lock out other writers.

        Raises:
            CheckpointBusyError: Another process, or another callback of this process, writes to this folder.
            CheckpointNotWrittenError: The folder can't be written to.
        """
        if self.opened or not is_first():
            self.opened += 1
            return
        try:
            dropped = self._store.reserve()
        except LockedError as held:
            if held.here:
                raise CheckpointBusyError(
                    f"another callback of this process writes checkpoints to {self.path.absolute()}. Two callbacks "
                    "would overwrite each other's checkpoints: give each a separate folder"
                ) from None
            cure = "two runs in one folder would overwrite each other. Wait until it ends, or pass another path"
            raise CheckpointBusyError(f"{held} trains into {self.path.absolute()}: {cure}") from None
        except OSError as error:
            # Other stores' errors, such as the Hub's for a missing repository, have their own messages.
            reason = error.strerror or str(error).rstrip(".")
            why = f"{reason}. Pass a folder that exists or can be created, and is writable"
            raise CheckpointNotWrittenError(f"checkpoints can't be written to {self.path.absolute()}: {why}") from error
        self.opened = 1
        if dropped:
            warn(
                f"dropped from {self.path}: {', '.join(dropped)}, which a killed process left unfinished",
            )

    def close(self) -> None:
        """Release the lock, once the folder has been closed as often as opened."""
        self.opened = max(0, self.opened - 1)
        if not self.opened:
            self._store.release()

    def clear(self) -> None:
        """Remove all checkpoints with a readable manifest, and the folder if only its lock remains; nothing else."""
        if not is_first():
            return
        readable, _ = self._scan()
        for name in readable:
            self._store.remove(name)
        self._store.discard()

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, intact or damaged, in ascending order."""
        return [parse_step(name) for name in self._store.names()]

    def write(self, checkpoint: Checkpoint) -> Path | Url:
        """Write a checkpoint, then remove the checkpoints that are no longer kept; return the folder.

        A checkpoint of the same step is replaced. If the checkpoint is on the device, all hosts of a pod must call
        this.

        Raises:
            CheckpointNotWrittenError: The disk is full, the write failed, or a weight isn't finite. Earlier checkpoints
                are untouched.
        """
        name = checkpoint_name(checkpoint.step)
        try:
            readable, _ = self._scan()
            numbers = [manifest["number"] for manifest in readable.values()]
            write(self._store, name, checkpoint, 1 + max(numbers, default=0))
        except NotFiniteError as error:
            raise self._explain_not_written(checkpoint, str(error)) from error
        except OSError as error:
            why = self._explain_full_disk(checkpoint) if error.errno in DISK_FULL else str(error)
            raise self._explain_not_written(checkpoint, why) from error
        if is_first():
            try:
                self._prune()  # only now, so that a failed write keeps the older checkpoints
            except OSError as error:
                warn(f"an old checkpoint can't be removed from {self.path}: {error}")
        return self.path / name

    def newest(self, check: Check = _accept) -> Checkpoint | None:
        """Return the newest intact checkpoint; None if there are no checkpoints.

        Args:
            check: Called with each checkpoint read, to raise a `CheckpointDamagedError` (default: no further checks).

        Raises:
            CheckpointDamagedError: All checkpoints are damaged; the message lists the faults.
        """
        readable, faults = self._scan()
        return self._find_first_intact([*readable, *faults][::-1], check)

    def best(self, check: Check = _accept) -> Checkpoint | None:
        """Return the best intact checkpoint by metric, see `newest`; None if no checkpoint has a metric."""
        readable, faults = self._scan()
        return self._find_first_intact(sort_by_metric(readable), check, list(faults.values()))

    def _find_first_intact(self, names: Sequence[str], check: Check, known: Sequence[str] = ()) -> Checkpoint | None:
        """Return the first intact checkpoint; warn about the faults of checkpoints before it, and `known` faults."""
        faults = list(known)
        for name in names:
            try:
                checkpoint = read(self.path / name)
                check(checkpoint)
            except CheckpointDamagedError as error:
                faults.append(str(error))
                continue
            for fault in faults:
                warn(f"{fault}. Resuming from {self.path / name}")
            return checkpoint
        if faults:
            how = "; ".join(faults)
            cure = "To start over, pass another folder or resume=False"
            raise CheckpointDamagedError(f"none of the checkpoints in {self.path} can be read: {how}. {cure}")
        return None

    def _scan(self) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
        """Return the manifests by name, in order of writing, and the faults of unreadable manifests.

        The order of writing is by step, unless training went back.
        """
        readable = {}
        faults = {}
        for name in self._store.names():
            try:
                readable[name] = read_manifest(self.path / name)
            except CheckpointError as error:  # damaged, or from a later version
                faults[name] = str(error)
        return dict(sorted(readable.items(), key=lambda item: item[1]["number"])), faults

    def _prune(self) -> None:
        if self.keep_last is None:
            return
        readable, _ = self._scan()
        for name in list_superseded(readable, self.keep_last, self.keep_best):
            self._store.remove(name)

    def _explain_not_written(self, checkpoint: Checkpoint, why: str) -> CheckpointNotWrittenError:
        try:
            steps = self.steps()
            last = f"The last good checkpoint is of step {steps[-1]}" if steps else "There is none yet"
        except OSError:
            last = f"{self.path} can't be listed, either"
        return CheckpointNotWrittenError(f"the checkpoint of step {checkpoint.step} was not written: {why}. {last}")

    def _explain_full_disk(self, checkpoint: Checkpoint) -> str:
        need = sum(t.nbytes for t in (*checkpoint.weights.values(), *checkpoint.training.values()))
        need += len(json.dumps(checkpoint.state))
        free = self._store.free()
        available = "unknown" if free is None else format_bytes(free)
        return f"no room in {self.path} (need {format_bytes(need)}, free {available})"
