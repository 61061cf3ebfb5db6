"""`fit(batch_size="auto")`: the largest batch whose training step fits into a core's memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from torch.utils.data import IterableDataset

from ..backend import Cores, Placement
from ..data.forms import brings_batches
from ..data.stream import DEFAULT_BATCH_SIZE
from ..errors import ArgumentError, OutOfMemoryError, PreflightError, StateLostError
from ..runtime import device_memory, fetch, translate
from ..step import Engine, StepRunner, joined
from . import consistency
from .arguments import TrainingData

AUTO = "auto"
# What finds the largest batch by the TPU's compiler: it takes the engine, the data, the cores and a core's bytes, and
# returns None where the compiler is missing.
ByCompiler: TypeAlias = Callable[[Engine, TrainingData, Cores, int], "int | None"]
_NEAR = 8  # the search ends when the size that doesn't fit is larger by less than this share


@dataclass(frozen=True)
class BatchSize:
    """A batch size that was chosen."""

    rows: int  # per core
    why: str  # how it was chosen, in words


def require_rows(data: Any) -> None:
    """Check that data have rows to make batches of any size of, for `batch_size="auto"`.

    Raises:
        ArgumentError: They bring their own batches, or can be read only once.
    """
    if brings_batches(data) or isinstance(data, IterableDataset):
        own = "reads its rows in one go" if isinstance(data, IterableDataset) else "brings its own batches"
        raise ArgumentError(
            f"batch_size='auto' goes with arrays and map-style datasets: this {type(data).__name__} {own}. Pass its "
            "dataset, or choose the size of its batches yourself"
        )


def choose(
    engine: Engine, train: TrainingData, placement: Placement, cores: Cores, seed: int, by_compiler: ByCompiler
) -> BatchSize:
    """Choose the batch size of a `fit` with `batch_size="auto"`: by the TPU's compiler, or by trial.

    Raises:
        ArgumentError: It would have to be tried on several hosts.
        OutOfMemoryError: Not even one row a core fits.
    """
    memory = None if placement.on_host else device_memory()
    if memory is None:
        why = "as usual, since only a TPU says how much memory there is"
        return BatchSize(DEFAULT_BATCH_SIZE, f"{DEFAULT_BATCH_SIZE} rows a core, {why}")
    failed = "there is no compiler for this TPU"
    try:
        rows = by_compiler(engine, train, cores, memory)
        if rows is not None:
            return BatchSize(rows, f"{rows} rows a core, the most that fit by the TPU's compiler")
    except PreflightError as error:
        failed = str(error)
    if cores.hosts > 1:
        raise ArgumentError(
            f"batch_size='auto' asks the TPU's compiler on several hosts, where it can't try sizes out, but {failed}: "
            "pip install 'tpufit[preflight]' on each, or give a number"
        )
    return _Trial(engine, train, placement, cores, seed).choice()


class _Trial:
    """Trains a step at several sizes, and puts everything back."""

    def __init__(self, engine: Engine, train: TrainingData, placement: Placement, cores: Cores, seed: int) -> None:
        self._engine = engine
        self._train = replace(train, steps_per_epoch=None)
        self._where = placement, cores, seed
        self._full: Exception | None = None

    def choice(self) -> BatchSize:
        """The largest size that fits, which steps of other sizes are tried for."""
        consistency.move(self._engine, self._where[0])
        rows, tried = largest(self._fits, self._most())
        if rows is None:
            raise OutOfMemoryError(f"not even one row a core fits: {self._full}") from self._full
        said = ", ".join(map(str, tried))
        return BatchSize(rows, f"{rows} rows a core, the most that fit of those that were tried ({said})")

    def _most(self) -> int:
        """The rows per core if all of them are in one batch."""
        data = replace(self._train, batch_size=1).stream(*self._where)
        assert data.steps is not None
        return data.steps

    def _fits(self, rows: int) -> bool:
        """Take one step, or those of one graph. **This waits** for the device."""
        engine = self._engine
        placement, cores, seed = self._where
        data = replace(self._train, batch_size=rows * cores.count).stream(placement, cores, seed)
        batch = data.first()  # of the rows of one core, as far as data go
        try:
            with engine.trial(), engine.noticing_loss():
                run = StepRunner(engine, "train", data.device_transform)
                engine.note_modes()
                engine.train_mode()
                size = run.group_size
                for group in joined(run.send([batch] * size), size):
                    run(group)
                fetch(run.pop_sums()[0], "batch_size")
        except (OutOfMemoryError, StateLostError) as error:
            cause = error.__cause__ if isinstance(error, StateLostError) else error
            full = cause if isinstance(cause, OutOfMemoryError) else cause and translate(cause)
            if not isinstance(full, OutOfMemoryError):
                raise
            self._full = full
            return False
        return True


def largest(fits: Callable[[int], bool], most: int) -> tuple[int | None, list[int]]:
    """Find the largest size that fits, or one that is smaller by less than an eighth; None if not even 1 fits.

    With it come the sizes that were tried.

    Example:
        >>> largest(lambda size: size <= 100, 1000), largest(lambda size: size <= 3, 1000), largest(bool, 50)
        ((96, [32, 64, 128, 96, 112, 104]), (3, [32, 16, 8, 4, 2, 3]), (50, [32, 50]))
    """
    tried: list[int] = []
    low = 0  # what fits
    high = most + 1  # what doesn't
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
