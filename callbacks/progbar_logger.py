"""`ProgbarLogger`: the progress bar, or plain lines where there is no terminal."""

import time
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from ..errors import ArgumentError
from ..runtime import tracing_since
from ..utils.terminal import can_draw, standard_output
from ._support.clock import Clock
from ._support.progress_line import ProgressLine
from ._support.redrawn_line import Canvas, open_canvas, print_line
from ._support.scalars import extract_scalars
from .base import Callback, Logs

# Seconds between two updates. Each reads logs, so this also limits how often the bar waits for the device.
_INTERVAL = 0.25


def resolve_verbose(verbose: str | int) -> int:
    """Turn `verbose` into a number: 0 shows nothing, 1 a progress bar, 2 a line per epoch.

    Args:
        verbose: 0, 1, 2 or `"auto"`: 1 in a terminal or a notebook, else 2.

    Raises:
        ArgumentError: Another value.

    Example:
        >>> resolve_verbose(2)
        2
    """
    if isinstance(verbose, str) and verbose == "auto":
        return 1 if can_draw(standard_output()) else 2
    if not isinstance(verbose, (int, float, np.number)) or verbose not in (0, 1, 2):
        raise ArgumentError(
            f"verbose must be 'auto', 0 (silent), 1 (a progress bar) or 2 (a line per epoch), got {verbose!r}"
        )
    return int(verbose)


class ProgbarLogger(Callback):
    """Shows the progress of `fit`, `evaluate` or `predict`, which create it themselves.

    With `verbose=1` in a terminal or a notebook it draws a bar for each epoch, at most four times a second, and reads
    the logs only then; during a compilation it shows the time so far. Otherwise it prints one line when the epoch ends,
    and reads nothing before. A validation inside `fit` appears in its epoch's line. Samples per second are measured in
    training, without the first step.

    Args:
        console: Where to write (default: standard output).

    Attributes:
        verbose: 0, 1 or 2: nothing, a bar, or a line.
        epochs: The number of epochs.
        target: The steps of the pass; None until it is known.
        seen: The steps of the pass so far.

    Example:
        >>> from types import SimpleNamespace
        >>> progress = ProgbarLogger()
        >>> progress.set_model(SimpleNamespace(input_bound=0.25, rows_seen=0, speed=lambda pace: {}))
        >>> progress.set_params({"epochs": 10, "steps": 23, "verbose": 2})
        >>> progress.on_epoch_begin(2)
        >>> for batch in range(23):
        ...     progress.on_train_batch_end(batch, {"loss": 0.5})
        >>> progress.on_epoch_end(2, {"loss": 0.1234, "val_loss": 0.2})
        Epoch 3/10 - 0.0s - 23 steps - loss: 0.1234 - val_loss: 0.2000 - waited for data: 25%

    Source: `keras.callbacks.ProgbarLogger`.
    """

    reads_weights = False
    only_writes = True

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or standard_output()
        self.verbose = 1
        self.epochs = 1
        self.target: int | None = None
        self.seen = 0
        self._in_fit = False
        self._line: ProgressLine | None = None
        self._canvas: Canvas | None = None
        self._rows_before = 0
        self._validation = (0.0, 0)  # when it began: the time, and the rows that the model had seen
        self._previous: Logs | None = None
        self._drawn = 0.0

    def set_params(self, params: dict[str, Any]) -> None:
        """Receive the run's parameters."""
        super().set_params(params)
        self.verbose = params["verbose"]
        self.epochs = params["epochs"]
        self.target = params["steps"]

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Show validations as parts of an epoch from now on."""
        self._in_fit = True

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Leave a clean terminal, even after an error."""
        self._in_fit = False
        self._break_off()

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Begin a line."""
        self._begin(f"Epoch {epoch + 1}/{self.epochs}")
        if self._line is not None:
            self._line.speed = self.model.speed

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Draw, if an update is due."""
        self._advance(batch + 1, logs)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Finish the line."""
        self.target = self.params["steps"] or self.seen
        if self._line is not None:
            self._line.input_bound = self.model.input_bound
        self._finish(logs)

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Begin a line, for `evaluate` alone."""
        if not self._in_fit:
            self._begin("Evaluate")
        elif self._line is not None:
            now = time.perf_counter()
            self._validation = (now, self.model.rows_seen)
            self._line.stop(now)
            if self._canvas is not None:
                self._draw(now)  # else the bar would stay incomplete during the validation

    def on_test_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Draw, if an update is due, for `evaluate` alone."""
        if not self._in_fit:
            self._advance(batch + 1, logs)

    def on_test_end(self, logs: Logs | None = None) -> None:
        """Finish the line, for `evaluate` alone."""
        if not self._in_fit:
            if logs:
                self._finish(logs)
            else:
                self._break_off()
        elif self._line is not None:
            began, rows = self._validation
            self._rows_before += self.model.rows_seen - rows
            self._line.exclude(time.perf_counter() - began)

    def on_predict_begin(self, logs: Logs | None = None) -> None:
        """Begin a line."""
        self._begin("Predict")

    def on_predict_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Draw, if an update is due."""
        self._advance(batch + 1, None)

    def on_predict_end(self, logs: Logs | None = None) -> None:
        """Finish the line."""
        self._finish(None)

    def _begin(self, title: str) -> None:
        self.seen = 0
        if not self.verbose:
            return
        now = self._drawn = time.perf_counter()
        self._line = ProgressLine(title, self.target, now)
        self._rows_before = self.model.rows_seen
        self._previous = None
        # Inside another bar (a callback of fit calls evaluate) there is no canvas, only a plain line at the end.
        if self.verbose == 1 and self._canvas is None:
            self._canvas = open_canvas(self._console)
            if self._canvas is not None:
                self._canvas.draw(self._bar(now, ended=False))
                self._clock = Clock(self._draw_clock, _INTERVAL)

    def _advance(self, done: int, logs: Logs | None) -> None:
        self.seen = done
        if self._line is None:
            return
        now = time.perf_counter()
        self._line.advance(done, now, self.model.rows_seen - self._rows_before)
        if self._canvas is None:
            return
        if now - self._drawn >= _INTERVAL:
            try:
                # The previous step's logs: reading the current step's would leave the device idle.
                if self._previous is not None:
                    self._line.values = extract_scalars(self._previous)
                self._draw(now)
            except Exception:
                self._break_off()  # reading logs may raise a device's error; a raising callback gets no end hook
                raise
        self._previous = logs

    def _draw(self, now: float) -> None:
        assert self._canvas is not None and self._line is not None
        if self._in_fit:
            self._line.input_bound = self.model.input_bound
        self._canvas.draw(self._bar(now, ended=False))
        self._drawn = time.perf_counter()

    def _draw_clock(self) -> None:
        """Update the clock, in a thread, during a compilation: nothing else takes so long."""
        since = tracing_since()
        if since is not None and self._canvas is not None:
            self._canvas.draw(self._bar(time.perf_counter(), ended=False, compiling_since=since))

    def _finish(self, logs: Logs | None) -> None:
        if self._line is None:
            return
        now = time.perf_counter()
        self._line.stop(now)
        self._line.values = extract_scalars(logs)
        if self._canvas is None:
            print_line(self._line.summary(now), self._console)
        else:
            self._line.total = self._line.total or self._line.done
            self._stop_drawing(now)
        self._line = None

    def _break_off(self) -> None:
        if self._canvas is not None:
            self._stop_drawing(time.perf_counter())
        self._line = None

    def _stop_drawing(self, now: float) -> None:
        assert self._canvas is not None
        self._clock.stop()
        canvas = self._canvas
        self._canvas = None
        self._previous = None
        canvas.end(self._bar(now, ended=True))

    def _bar(self, now: float, ended: bool, compiling_since: float | None = None) -> Text:
        assert self._line is not None
        return self._line.bar(now, ended, self._console.options.ascii_only, compiling_since)
