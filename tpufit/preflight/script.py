"""`run_script`: a user's training script as it is, of which each `fit` is compiled for a TPU instead of run."""

from __future__ import annotations

import inspect
import math
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ..callbacks import History
from ..errors import PreflightError
from ..utils.terminal import say
from .copied_folder import copied_folder


class _NotTrained(dict[str, Any]):
    """The logs of epochs that were not run: each that is asked for is not a number."""

    def __init__(self, epochs: int) -> None:
        super().__init__()
        self._epochs = epochs

    def __missing__(self, name: str) -> list[float]:
        return [math.nan] * self._epochs


def run_script(
    path: Path, words: Sequence[str], model: type, options: dict[str, Any], told: Callable[[Any], None]
) -> list[Any]:
    """Run a script, and compile each of its fits for a TPU instead of running it: a report for each, told at once.

    `fit` returns a history, and `evaluate` logs, of which every value is NaN. All else runs as it is, on untrained
    weights. An error of the script after its first `fit` is told, and ends it: it may miss what a training would have
    left. It runs in a copy of its folder, and what it writes goes nowhere, see `copied_folder`. The model is the class
    whose methods are replaced, the options further arguments of `Model.preflight`.

    Raises:
        PreflightError: The script has called no `fit`.
        TpufitError: A `fit` can't be compiled.
    """
    reports: list[Any] = []
    fit_of = inspect.signature(model.fit)  # type: ignore[attr-defined]

    def fit(self: Any, *args: Any, **kwargs: Any) -> History:
        bound = fit_of.bind(self, *args, **kwargs)
        bound.apply_defaults()
        given = {name: value for name, value in bound.arguments.items() if name != "self"}
        reports.append(self.preflight(**given | options))
        told(reports[-1])
        history = History()
        epochs = max(1, (bound.arguments["epochs"] or 1) - bound.arguments["initial_epoch"])
        for epoch in range(epochs):
            history.on_epoch_end(epoch, {"loss": math.nan})
        logs = _NotTrained(epochs)
        logs.update(history.history)  # `|` would make a plain dict
        history.history = logs
        self.history = history
        return history

    def evaluate(self: Any, *args: Any, return_dict: bool = False, **kwargs: Any) -> Any:
        names = self.metrics_names
        if return_dict:
            return dict.fromkeys(names, math.nan)
        return math.nan if len(names) == 1 else [math.nan] * len(names)

    os.environ["PJRT_DEVICE"] = "CPU"  # whatever the script runs itself must not take a TPU
    say(f"{path.name} runs in a copy of its folder, which is deleted afterwards: what it writes goes nowhere")
    with copied_folder(path) as copy, _as_main(copy, words), ExitStack() as stack:
        for name, method in (("fit", fit), ("evaluate", evaluate)):
            stack.callback(setattr, model, name, getattr(model, name))
            setattr(model, name, method)
        try:
            runpy.run_path(str(copy), run_name="__main__")
        except SystemExit as end:
            if end.code and not reports:
                raise PreflightError(f"{path} ended before its first fit, with {end.code!r}") from None
        except Exception as error:
            if not reports or isinstance(error, PreflightError):
                raise
            _tell(path, error)
    if not reports:
        raise PreflightError(f"{path} has called no fit, so that there was nothing to compile")
    return reports


@contextmanager
def _as_main(path: Path, words: Sequence[str]) -> Any:
    """A context in which the process looks as if it had been started with a script."""
    before = sys.argv
    folders = sys.path.copy()
    sys.argv = [str(path), *words]
    sys.path[0] = str(path.resolve().parent)
    try:
        yield
    finally:
        sys.argv = before
        sys.path[:] = folders


def _tell(path: Path, error: Exception) -> None:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).name == path.name]
    line = f":{frames[-1].lineno}" if frames else ""
    say(
        f"{path.name}{line} ended the script with {type(error).__name__}: {error}. Nothing was trained, so that it may "
        "miss what a training leaves"
    )
