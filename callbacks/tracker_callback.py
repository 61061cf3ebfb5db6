"""`TrackerCallback`: the base of callbacks that send a training to an experiment tracker."""

from __future__ import annotations

import importlib
import importlib.util
import os
import random
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ..errors import ArgumentError, TrackerError
from ..hosts import is_first
from ..runtime import to_host
from ..utils.random import RNGState
from ..utils.urls import Mirror
from ._support.frequency import resolve_frequency
from ._support.pictures import draw_figure, to_pixels
from ._support.scalars import extract_scalars
from .base import Callback, Logs

_TIMEOUT = 10.0  # seconds, to reach a server


class TrackerCallback(Callback):
    """Sends a training to a tracker's run; subclasses implement how. The run lasts as long as the object.

    Args:
        package: The tracker's Python package.
        config: Hyperparameters by name, in addition to the model's.
        update_freq: `"epoch"`, `"batch"`, or a number of batches after which to log the running means, too.
        log_checkpoints: True uploads each checkpoint that a `ModelCheckpoint` writes to a run directory.

    Raises:
        ArgumentError: An unknown frequency, or the package isn't installed.

    Attributes:
        run_id: The run's id in the tracker; None before it starts.
    """

    reads_weights = False
    only_writes = True
    loads_before_train_begin = True

    def __init__(
        self, package: str, config: Mapping[str, Any] | None, update_freq: str | int, log_checkpoints: bool
    ) -> None:
        if importlib.util.find_spec(package) is None:
            cure = f"pip install {package.replace('_', '-')}"
            raise ArgumentError(f"{type(self).__name__} needs the package {package}, which isn't installed: {cure}")
        if config is not None and not isinstance(config, Mapping):
            raise ArgumentError(f"config must be a dict of hyperparameters by name, got {config!r}")
        self._package = package
        self.config = dict(config or {})
        self.log_checkpoints = log_checkpoints
        self.run_id: str | None = None
        self._every = resolve_frequency("update_freq", update_freq, {"epoch": 0, "batch": 1})
        self._model_config: dict[str, Any] = {}  # the model's hyperparameters, at the last `fit`
        self._steps_before = 0  # steps before the current batch
        self._is_open = self._in_fit = self._failed = self._resumes = False
        self._steps_in_run: dict[str, int] = {}  # the last step of each log in the resumed run, by name

    @property
    def library(self) -> Any:
        """The tracker's package, imported on first use."""
        return importlib.import_module(self._package)

    # For subclasses to implement

    def open_run(self, run_id: str | None) -> str:
        """Start or continue a run, and return its id.

        Args:
            run_id: The run to continue; None for a new run.

        Raises:
            TrackerError: The tracker can't be reached, or refuses.
        """
        raise NotImplementedError

    def write_config(self, values: Mapping[str, Any]) -> None:
        """Log hyperparameters, each time the run has been opened.

        Args:
            values: Numbers, bools and strings by name.
        """
        raise NotImplementedError

    def last_steps(self) -> dict[str, int]:
        """Return the last step of each log in the open run, by name; empty if the tracker doesn't report them.

        In a resumed training these may be later than its checkpoint.
        """
        return {}

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Log numbers.

        Args:
            values: The numbers by name.
            step: The training steps so far.
        """
        raise NotImplementedError

    def write_image(self, tag: str, image: np.ndarray[Any, Any], step: int) -> None:
        """Log a picture.

        Args:
            tag: Its name.
            image: Its bytes, (height, width, 3).
            step: The training steps so far.
        """
        raise NotImplementedError

    def write_folder(self, folder: Path, name: str, step: int) -> None:
        """Log the files of a checkpoint as one version of an artifact.

        Args:
            folder: The folder; it may be deleted once this returns.
            name: The checkpoint's name.
            step: The number of training steps at the checkpoint.
        """
        raise NotImplementedError

    def close_run(self, failed: bool) -> None:
        """End the run; `open_run` may continue it.

        Args:
            failed: True if training ended with an error.
        """
        raise NotImplementedError

    # For user code, which may run on every host: only the first host writes

    def add_image(self, tag: str, image: Any, step: int | None = None, dataformats: str = "CHW") -> None:
        """Log a picture.

        Args:
            tag: Its name in the tracker.
            image: A tensor or array, of bytes or of floats from 0 to 1. For a tensor on the device this waits.
            step: The step it belongs to (default: the training steps so far).
            dataformats: The order of its dimensions: `"CHW"` (default), `"HWC"` or `"HW"`, with a leading N for several
                images, which are shown side by side.
        """
        if isinstance(image, Tensor):
            (image,) = to_host([image], "image")
        if not is_first():
            return
        with self._ensure_open():
            self.write_image(tag, to_pixels(image, dataformats), self._step_or_now(step))

    def add_figure(self, tag: str, figure: Any, step: int | None = None) -> None:
        """Log a matplotlib figure as a picture.

        Args:
            tag: Its name in the tracker.
            figure: The figure.
            step: The step it belongs to (default: the training steps so far).
        """
        if not is_first():
            return
        with self._ensure_open():
            self.write_image(tag, draw_figure(figure), self._step_or_now(step))

    # Hooks

    def state_dict(self) -> dict[str, Any]:
        """Return the run's id."""
        return {"run_id": self.run_id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the run of a resumed training.

        Args:
            state: The dict that `state_dict` returned.
        """
        self.run_id = state["run_id"] or self.run_id
        self._resumes = state["run_id"] is not None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Start or continue the run, before anything is compiled."""
        self._failed = False
        self._in_fit = True
        self._model_config = self._describe_model()
        self._begin()
        self._steps_in_run = self.last_steps() if self._resumes else {}

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Record the steps so far."""
        self._steps_before = self.model.steps_taken

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Log the running means, if they are due."""
        steps = self.model.steps_taken
        if self._every and steps // self._every > self._steps_before // self._every:
            values = extract_scalars(logs) | self._rate()
            self._write_new({f"batch_{name}": value for name, value in values.items()}, steps)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Log the epoch."""
        self._write_new(self._rate() | extract_scalars(logs) | {"epoch": epoch}, self.model.steps_taken)

    def on_test_end(self, logs: Logs | None = None) -> None:
        """Log an `evaluate` outside `fit`, as `test_loss` and so on."""
        if not self._in_fit:
            values = {f"test_{name}": value for name, value in extract_scalars(logs).items()}
            with self._ensure_open():
                self.write(values, self.model.steps_taken)

    def on_save(self, step: int, logs: Logs | None = None) -> None:
        """Log a checkpoint, with `log_checkpoints`."""
        if self.log_checkpoints:
            copy = Mirror((logs or {})["path"])
            copy.pull()
            self.write_folder(copy.path, Path(copy.path).name, step)

    def on_exception(self, exception: BaseException, logs: Logs | None = None) -> None:
        """Record that the run has failed."""
        self._failed = True

    def on_train_end(self, logs: Logs | None = None) -> None:
        """End the run."""
        self._in_fit = self._resumes = False
        self._steps_in_run = {}
        self._end()

    def _write_new(self, values: Mapping[str, float], step: int) -> None:
        """Log the numbers that the run doesn't have yet."""
        new = {name: value for name, value in values.items() if self._steps_in_run.get(name, -1) < step}
        if new:
            self.write(new, step)

    def _begin(self) -> None:
        with _fresh_random_state():
            self.run_id = self.open_run(self.run_id)
        self._is_open = True
        self.write_config((self._model_config or self._describe_model()) | self.config)

    def _end(self) -> None:
        if self._is_open:
            self._is_open = False
            with _fresh_random_state():
                self.close_run(self._failed)

    @contextmanager
    def _ensure_open(self) -> Iterator[None]:
        """Return a context in which the run is open; outside `fit` the run is closed again after it."""
        if self._is_open:
            yield
            return
        if self.model is None:
            raise ArgumentError(
                f"this {type(self).__name__} has no run yet: pass it to fit or evaluate, which start a run"
            )
        self._begin()
        try:
            yield
        finally:
            self._end()

    def _rate(self) -> dict[str, float]:
        return {} if self.model.optimizer is None else {"learning_rate": self.model.learning_rate}

    def _step_or_now(self, step: int | None) -> int:
        return self.model.steps_taken if step is None else step

    def _describe_model(self) -> dict[str, Any]:
        """Return the model's class and size, and its optimizer's options."""
        model = self.model
        known: dict[str, Any] = {
            "module": type(model.module).__name__,
            "parameters": sum(parameter.numel() for parameter in model.module.parameters()),
        }
        if model.optimizer is not None:
            group = model.optimizer.param_groups[0]
            options = {name: group[name] for name in model.optimizer.defaults if name in group}
            known |= {"optimizer": type(model.optimizer).__name__}
            known |= {name: value for name, value in options.items() if isinstance(value, (bool, int, float, str))}
        fit = ("epochs", "steps") if self._in_fit else ()
        return known | {name: self.params[name] for name in fit if self.params[name] is not None}


@contextmanager
def _fresh_random_state() -> Iterator[None]:
    """Seed randomly while a tracker draws a name, so that runs of one seed differ; then restore the user's state."""
    before = RNGState.now()
    random.seed()
    try:
        yield
    finally:
        before.restore()


def require_reachable(url: str, tracker: str, cure: str) -> None:
    """Raise a `TrackerError` if a server can't be reached: the tracker's client would retry for minutes.

    Args:
        url: The server's address.
        tracker: The tracker's name.
        cure: What to do without the server.
    """
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT):
            return
    except urllib.error.HTTPError:
        return  # it has answered
    except OSError as error:
        cause = getattr(error, "reason", error)
        if isinstance(cause, ssl.SSLError):  # it has answered, and its client may know the certificate
            return
        raise TrackerError(f"{tracker} can't be reached at {url}: {cause}. {cure}") from error


def first_line(error: BaseException) -> str:
    """Return the first line of a tracker's error."""
    return str(error).strip().partition(os.linesep)[0].rstrip(".") or type(error).__name__
