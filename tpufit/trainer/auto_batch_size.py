"""`fit(batch_size="auto")`: the largest batch whose training step fits into a core's memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from ..backend import Cores, Placement
from ..data.stream import DEFAULT_BATCH_SIZE
from ..data.user_data import UserData
from ..errors import ArgumentError, OutOfMemoryError, PreflightError, StateLostError
from ..runtime import device_memory, fetch, translate
from ..step import Engine, StepRunner, join_groups
from . import host_consistency
from .fit_arguments import TrainingData

# A function that finds the largest batch by the TPU's compiler, from the engine, the data, the cores and the bytes of a
# core; it returns None if the compiler is missing.
ByCompiler: TypeAlias = Callable[[Engine, TrainingData, Cores, int], "int | None"]
_NEAR = 8  # the search ends when the smallest size that doesn't fit is larger than the best by less than 1 / _NEAR


@dataclass(frozen=True)
class BatchSize:
    """A chosen batch size."""

    rows: int  # per core
    why: str  # how it was chosen, as a sentence


def require_rows(data: UserData) -> None:
    """Check that data are rows, of which batches of any size can be made, for `batch_size="auto"`.

    Raises:
        ArgumentError: The data have batches already, or can be read only once.
    """
    if not data.has_rows:
        reason = "has batches already" if data.has_batches else "is an IterableDataset"
        raise ArgumentError(
            f"batch_size='auto' needs arrays or a map-style dataset: this {type(data.x).__name__} {reason}. Pass its "
            "dataset, or choose the batch size yourself"
        )


def choose(
    engine: Engine, train: TrainingData, placement: Placement, cores: Cores, seed: int, by_compiler: ByCompiler
) -> BatchSize:
    """Choose the batch size of a `fit` with `batch_size="auto"`: by the TPU's compiler, or by trial.

    Raises:
        ArgumentError: There is no compiler, and trials on several hosts aren't possible.
        OutOfMemoryError: Not even one row per core fits.
    """
    memory = None if placement.on_host else device_memory()
    if memory is None:
        why = "the default, because only a TPU reports its memory"
        return BatchSize(DEFAULT_BATCH_SIZE, f"{DEFAULT_BATCH_SIZE} rows per core, {why}")
    failed = "there is no compiler for this TPU"
    try:
        rows = None if placement.eager else by_compiler(engine, train, cores, memory)
        if rows is not None:
            return BatchSize(rows, f"{rows} rows per core, the most that fit according to the TPU's compiler")
    except PreflightError as error:
        failed = str(error)
    if cores.hosts > 1:
        raise ArgumentError(
            f"batch_size='auto' needs the TPU's compiler on several hosts, where it can't try sizes, but {failed}: "
            "pip install 'tpufit[preflight]' on each host, or give a number"
        )
    return _Trial(engine, train, placement, cores, seed).choose()


class _Trial:
    """Trains a step at several sizes, and puts everything back."""

    def __init__(self, engine: Engine, train: TrainingData, placement: Placement, cores: Cores, seed: int) -> None:
        self._engine = engine
        self._train = replace(train, steps_per_epoch=None)
        self._where = placement, cores, seed
        self._full: Exception | None = None

    def choose(self) -> BatchSize:
        """Find the largest size that fits, by running a step at several sizes."""
        host_consistency.move_model(self._engine, self._where[0])
        rows, tried = find_largest(self._fits, self._count_rows())
        if rows is None:
            raise OutOfMemoryError(f"not even one row per core fits: {self._full}") from self._full
        sizes = ", ".join(map(str, tried))
        return BatchSize(rows, f"{rows} rows per core, the largest tried size that fits ({sizes})")

    def _count_rows(self) -> int:
        """Return the rows per core of a batch with all rows."""
        data = replace(self._train, batch_size=1).stream(*self._where)
        assert data.steps is not None
        return data.steps

    def _fits(self, rows: int) -> bool:
        """True if a step fits, or the steps of one graph. **This waits** for the device."""
        engine = self._engine
        placement, cores, seed = self._where
        data = replace(self._train, batch_size=rows * cores.count).stream(placement, cores, seed)
        batch = data.read_first()  # large enough for one core, or all rows
        try:
            with engine.trial(), engine.translating_device_errors():
                runner = StepRunner(engine, "train", data.device_transform)
                engine.note_modes()
                engine.train_mode()
                size = runner.group_size
                for group in join_groups(runner.send([batch] * size), size):
                    runner(group)
                fetch(runner.pop_sums()[0], "batch_size")
        except (OutOfMemoryError, StateLostError) as error:
            cause = error.__cause__ if isinstance(error, StateLostError) else error
            full = cause if isinstance(cause, OutOfMemoryError) else cause and translate(cause)
            if not isinstance(full, OutOfMemoryError):
                raise
            self._full = full
            return False
        return True


def find_largest(fits: Callable[[int], bool], most: int) -> tuple[int | None, list[int]]:
    """Find the largest size that fits, or a size smaller by less than an eighth; None if not even 1 fits.

    The second result is the list of tried sizes.

    Example:
        >>> find_largest(lambda size: size <= 100, 1000), find_largest(bool, 50)
        ((96, [32, 64, 128, 96, 112, 104]), (50, [32, 50]))
    """
    tried: list[int] = []
    low = 0  # fits
    high = most + 1  # doesn't fit
    size = min(DEFAULT_BATCH_SIZE, most)
    while True:
        tried.append(size)
        if fits(size):
            low = size
        else:
            high = size
        if high - low <= max(1, low // _NEAR) and (high <= most or low == most):
            return low or None, tried
        if high > most:
            size = min(2 * low, most)
        elif not low:
            size = high // 2
        else:
            middle = (low + high) // 2
            size = middle // 8 * 8 if middle // 8 * 8 > low else middle
        if not size:
            return None, tried
