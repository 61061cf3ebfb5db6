"""`fit(dry_run=True)`: all that a training will do, tried on a few batches, and undone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from . import loop
from .callbacks import Callback, History
from .callbacks.base import duplicate
from .callbacks.dispatch import CallbackList
from .data import Stream
from .loop import Trainee, Validation
from .snapshot import Snapshot
from .step import Steps


def rehearse(
    model: Trainee,
    train: Stream,
    validation: Validation | None,
    callbacks: Sequence[Any],
    batches: int,
    fit: Callable[[Validation | None, list[Any]], History],
) -> tuple[History, str]:
    """Train, validate, save and predict on a few batches, and put everything back as it was.

    Args:
        model: What to train; it is where it shall be trained.
        train: The training data.
        validation: What to validate on, if anything.
        callbacks: The user's; others stand in for them, see `Callback.for_dry_run`.
        batches: How many of each data set.
        fit: Trains one epoch with a validation and callbacks.

    Returns:
        What `fit` returned, and what has been tried, in a line.
    """
    before = Snapshot(model)
    try:
        train.limit(batches)
        if validation is not None:
            validation.stream.limit(batches)
            validation = replace(validation, due=1, every=validation.every and min(validation.every, batches))
        with TemporaryDirectory(prefix="tpufit-dry-run-") as folder:
            places = [Path(folder, str(number)) for number in range(len(callbacks))]
            pairs = [(_stand_in(own, place), place) for own, place in zip(callbacks, places, strict=True)]
            history = fit(validation, [stand_in for stand_in, _ in pairs if stand_in is not None])
            predicts = _predicts(model)
            if predicts:
                data = train if validation is None else validation.stream
                loop.predict(model, data, CallbackList(None, None, {}), lambda outputs: None)
            told = ", ".join(_told(stand_in, place) for stand_in, place in pairs if stand_in is not None)
    finally:
        before.put_back()
    *passes, last = ["trained", *["validated"] * (validation is not None), *["predicted"] * predicts]
    tried = f"{', '.join(passes)} and {last}" if passes else last
    size = f"{batches} batch{'es' * (batches != 1)}"
    return history, f"{tried} on {size}{told and f' with {told}'}. Everything is as it was"


def _stand_in(callback: Any, folder: Path) -> Any:
    if isinstance(callback, Callback):
        return callback.for_dry_run(folder)
    return callback if isinstance(callback, type) else duplicate(callback)  # a class is refused later, with an error


def _predicts(model: Steps) -> bool:
    """Whether the module's output is meant to be predicted: a train_step of one's own may use only parts of it."""
    return type(model).train_step is Steps.train_step or type(model).predict_step is not Steps.predict_step


def _told(callback: Any, folder: Path) -> str:
    """A callback's name, and how many files it has written."""
    files = sum(path.is_file() for path in folder.rglob("*"))
    return type(callback).__name__ + (f" ({files} file{'s' * (files != 1)})" if files else "")
