"""`Profiler`: a trace of some steps, and a table of the host's time."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import ArgumentError
from ..runtime import start_profile, stop_profile
from .base import Callback, Logs
from .scalars import scalars


class Profiler(Callback):
    """Writes what the host and the device did in some steps of training, and where the host's time went.

    `log_dir` gets a trace by the device's own profiler, for TensorBoard's profile plugin (`pip install
    tensorboard-plugin-profile`) or, its `.trace.json.gz`, for ui.perfetto.dev; and at the end of `fit` `host_time.txt`,
    the host's time by phase: waiting for data, tracing, compiling, starting graphs, waiting for the device and why,
    callbacks. A trace slows its steps down, so that a few say most.

    Args:
        log_dir: The folder (default `"profile"`).
        steps: The first and the last step to trace, from 0, over all epochs (default `(10, 20)`: when all has been
            compiled); None for the table alone. With `steps_per_execution=k` k steps count as one.

    Raises:
        ArgumentError: `steps` are not two numbers in their order.

    Example:
        >>> Profiler(steps=(5, 3))
        Traceback (most recent call last):
        ...
        tpufit.errors.ArgumentError: steps must be the first and the last step to trace, such as (10, 20), or None; \
got (5, 3)

    Source: `torch_xla.debug.profiler.start_trace`.
    """

    reads_weights = False
    measures_time = True

    def __init__(self, log_dir: str | os.PathLike[str] = "profile", steps: tuple[int, int] | None = (10, 20)) -> None:
        if steps is not None and not (len(steps) == 2 and 0 <= steps[0] <= steps[1]):
            raise ArgumentError(
                f"steps must be the first and the last step to trace, such as (10, 20), or None; got {steps!r}"
            )
        self.log_dir = os.fspath(log_dir)
        self._steps = steps
        self._done = 0
        self._tracing = False

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Count the steps from here."""
        self._done = 0

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Begin the trace, if it is time to."""
        if self._steps is not None and self._done == self._steps[0]:
            os.makedirs(self.log_dir, exist_ok=True)
            start_profile(self.log_dir)
            self._tracing = True

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """End it; the device has done the steps by then."""
        self._done += 1
        if self._steps is not None and self._done == self._steps[1] + 1:
            self._stop(logs)

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Write the table, and end a trace that is still under way."""
        self._stop()
        Path(self.log_dir).mkdir(parents=True, exist_ok=True)
        (Path(self.log_dir) / "host_time.txt").write_text(self.model.report().host_time + "\n")

    def _stop(self, logs: Logs | None = None) -> None:
        if self._tracing:
            scalars(logs)  # waits for the device, so that its part of the last steps is in the trace too
            self._tracing = False
            stop_profile()
