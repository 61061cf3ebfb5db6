"""`run_script`: runs a user's unchanged training script, and compiles each `fit` for a TPU instead of running it."""

from __future__ import annotations

import ast
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
from ..errors import PreflightError, join_few
from ..utils.terminal import say
from .copied_folder import NOT_REDIRECTED, copied_folder


class _NotTrained(dict[str, Any]):
    """The logs of epochs that weren't run: every value is NaN."""

    def __init__(self, epochs: int) -> None:
        super().__init__()
        self._epochs = epochs

    def __missing__(self, name: str) -> list[float]:
        return [math.nan] * self._epochs


def run_script(
    path: Path, words: Sequence[str], model: type, options: dict[str, Any], on_report: Callable[[Any], None]
) -> list[Any]:
    """Run a script, and compile each `fit` for a TPU instead of running it.

    `fit` returns a history and `evaluate` logs in which every value is NaN. Everything else runs unchanged, on
    untrained weights. An error after the first `fit` is printed and ends the script, because it may miss files that a
    training would have written. The script runs in a copy of its folder, which is deleted afterwards, see
    `copied_folder`.

    Args:
        path: The script.
        words: Its command-line arguments.
        model: The class whose methods are replaced.
        options: Further arguments of `Model.preflight`.
        on_report: Called with each report as soon as it is complete.

    Returns:
        The reports, one for each `fit`.

    Raises:
        PreflightError: The script has called no `fit`.
        TpufitError: A `fit` can't be compiled.
    """
    reports: list[Any] = []
    fit_of = inspect.signature(model.fit)  # type: ignore[attr-defined]

    def fit(self: Any, *args: Any, **kwargs: Any) -> History:
        bound = fit_of.bind(self, *args, **kwargs)
        bound.apply_defaults()
        arguments = {name: value for name, value in bound.arguments.items() if name != "self"}
        reports.append(self.preflight(**arguments | options))
        on_report(reports[-1])
        history = History()
        epochs = max(1, (bound.arguments["epochs"] or 1) - bound.arguments["initial_epoch"])
        for epoch in range(epochs):
            history.on_epoch_end(epoch, {"loss": math.nan})
        logs = _NotTrained(epochs)
        logs.update(history.history)  # `|` would return a plain dict
        history.history = logs
        self.history = history
        return history

    def evaluate(self: Any, *args: Any, return_dict: bool = False, **kwargs: Any) -> Any:
        names = self.metrics_names
        if return_dict:
            return dict.fromkeys(names, math.nan)
        return math.nan if len(names) == 1 else [math.nan] * len(names)

    os.environ["PJRT_DEVICE"] = "CPU"  # the script's own computations must not use a TPU
    say(f"{path.name} runs in a copy of its folder, which is deleted afterwards with all files that it writes")
    named = find_absolute_paths(path.read_text(errors="replace"))
    if named:
        say(
            f"{path.name} names {join_few(named)}: files that Python's own functions write there are deleted too, but "
            "a library in C++ or Rust, such as polars or pyarrow, does write there. Relative paths are safe"
        )
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
            _print_error(path, error)
    if not reports:
        raise PreflightError(f"{path} hasn't called fit, so there was nothing to compile")
    return reports


def find_absolute_paths(source: str) -> list[str]:
    """Return the absolute paths in a script's text that could be written to.

    Example:
        >>> find_absolute_paths("frame.write_csv('/tmp/a.csv'); open('/dev/null'), open('b.csv')")
        ['/tmp/a.csv']
    """
    try:
        nodes = ast.walk(ast.parse(source))
    except SyntaxError:  # raised again when the script runs
        return []
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    paths = [
        text for text in texts if text.startswith("/") and "\0" not in text and not text.startswith(NOT_REDIRECTED)
    ]
    return [p for p in dict.fromkeys(paths) if os.path.dirname(p) != "/" and os.access(os.path.dirname(p), os.W_OK)]


@contextmanager
def _as_main(path: Path, words: Sequence[str]) -> Any:
    """A context in which `sys.argv` and `sys.path` are as in a process that was started with the script."""
    before = sys.argv
    folders = sys.path.copy()
    sys.argv = [str(path), *words]
    sys.path[0] = str(path.resolve().parent)
    try:
        yield
    finally:
        sys.argv = before
        sys.path[:] = folders


def _print_error(path: Path, error: Exception) -> None:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).name == path.name]
    line = f":{frames[-1].lineno}" if frames else ""
    say(
        f"{path.name}{line} ended the script with {type(error).__name__}: {error}. Nothing was trained, so results of "
        "a training may be missing"
    )
