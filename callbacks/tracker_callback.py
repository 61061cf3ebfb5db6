"""`TrackerCallback`: what the callbacks share that send a training to an experiment tracker."""

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
from ._support.frequency import batches
from ._support.pictures import drawn, pixels
from ._support.scalars import scalars
from .base import Callback, Logs

_TIMEOUT = 10.0  # seconds, to reach a server


class TrackerCallback(Callback):
    """Sends a training to one run of a tracker; a subclass says how. It is one run for the life of the object.

    Args:
        package: The tracker's Python package.
        config: Hyperparameters by name, beside those that the model tells.
        update_freq: `"epoch"`, `"batch"`, or a number of batches after which to log the running means as well.
        log_checkpoints: True to send each checkpoint that a `ModelCheckpoint` writes into a run directory.

    Raises:
        ArgumentError: An unknown frequency, or the package isn't installed.

    Attributes:
        run_id: The run's name in the tracker; None before it has begun.
    """

    reads_weights = False
    only_writes = True
    loads_first = True

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
        self._every = batches("update_freq", update_freq, {"epoch": 0, "batch": 1})
        self._known: dict[str, Any] = {}  # what is told of the last `fit`
        self._before = 0  # the steps before the batch under way
        self._open = self._trains = self._failed = self._resumes = False
        self._logged: dict[str, int] = {}  # the last step of each log in the resumed run, by name

    @property
    def library(self) -> Any:
        """The tracker's package, imported at the first need."""
        return importlib.import_module(self._package)

    # What a subclass says

    def open_run(self, run_id: str | None) -> str:
        """Begin a run, or go on with one, and return its id.

        Args:
            run_id: The run to go on with; None for a new one.

        Raises:
            TrackerError: The tracker can't be reached, or refuses.
        """
        raise NotImplementedError

    def write_config(self, values: Mapping[str, Any]) -> None:
        """Log hyperparameters, whenever the run has been opened.

        Args:
            values: Numbers, bools and texts by name.
        """
        raise NotImplementedError

    def last_steps(self) -> dict[str, int]:
        """The last step of each log in the run that has been opened, by name; none if the tracker doesn't tell.

        A training that is resumed has them from before it was broken off: they may be further than its checkpoint.
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
            folder: The files; they may be gone once this returns.
            name: The checkpoint's name.
            step: The training steps that it is of.
        """
        raise NotImplementedError

    def close_run(self, failed: bool) -> None:
        """End the run, until `open_run` goes on with it.

        Args:
            failed: True if training broke off.
        """
        raise NotImplementedError

    # For the user's own code, which may run on every host: the first one writes

    def add_image(self, tag: str, image: Any, step: int | None = None, dataformats: str = "CHW") -> None:
        """Log a picture.

        Args:
            tag: Its name in the tracker.
            image: A tensor or array, of bytes or of floats from 0 to 1. One on the device is waited for.
            step: The step it belongs to (default: the training steps so far).
            dataformats: The order of its dimensions: `"CHW"` (default), `"HWC"` or `"HW"`; several, shown side by side,
                have an N in front.
        """
        if isinstance(image, Tensor):
            (image,) = to_host([image], "image")
        if not is_first():
            return
        with self._opened():
            self.write_image(tag, pixels(image, dataformats), self._or_now(step))

    def add_figure(self, tag: str, figure: Any, step: int | None = None) -> None:
        """Log a figure of matplotlib's as a picture.

        Args:
            tag: Its name in the tracker.
            figure: The figure.
            step: The step it belongs to (default: the training steps so far).
        """
        if not is_first():
            return
        with self._opened():
            self.write_image(tag, drawn(figure), self._or_now(step))

    # Hooks

    def state_dict(self) -> dict[str, Any]:
        """The run's id."""
        return {"run_id": self.run_id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on in the run of a training that is resumed.

        Args:
            state: The dict that `state_dict` returned.
        """
        self.run_id = state["run_id"] or self.run_id
        self._resumes = state["run_id"] is not None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Begin the run, or go on with it: nothing is compiled yet."""
        self._failed = False
        self._trains = True
        self._known = self._described()
        self._begin()
        self._logged = self.last_steps() if self._resumes else {}

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Note the steps so far."""
        self._before = self.model.steps_taken

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Log the running means, if it is time to."""
        steps = self.model.steps_taken
        if self._every and steps // self._every > self._before // self._every:
            self._write_new({f"batch_{name}": value for name, value in (scalars(logs) | self._rate()).items()}, steps)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Log the epoch."""
        self._write_new(self._rate() | scalars(logs) | {"epoch": epoch}, self.model.steps_taken)

    def on_test_end(self, logs: Logs | None = None) -> None:
        """Log an `evaluate` outside of `fit`, as `test_loss` and so on."""
        if not self._trains:
            with self._opened():
                self.write({f"test_{name}": value for name, value in scalars(logs).items()}, self.model.steps_taken)

    def on_save(self, step: int, logs: Logs | None = None) -> None:
        """Log a checkpoint, if it is wanted."""
        if self.log_checkpoints:
            copy = Mirror((logs or {})["path"])
            copy.pull()
            self.write_folder(copy.path, Path(copy.path).name, step)

    def on_exception(self, exception: BaseException, logs: Logs | None = None) -> None:
        """Note that the run has failed."""
        self._failed = True

    def on_train_end(self, logs: Logs | None = None) -> None:
        """End the run."""
        self._trains = self._resumes = False
        self._logged = {}
        self._end()

    def _write_new(self, values: Mapping[str, float], step: int) -> None:
        """Log the numbers that the run doesn't have yet."""
        new = {name: value for name, value in values.items() if self._logged.get(name, -1) < step}
        if new:
            self.write(new, step)

    def _begin(self) -> None:
        with _draws_of_its_own():
            self.run_id = self.open_run(self.run_id)
        self._open = True
        self.write_config((self._known or self._described()) | self.config)

    def _end(self) -> None:
        if self._open:
            self._open = False
            with _draws_of_its_own():
                self.close_run(self._failed)

    @contextmanager
    def _opened(self) -> Iterator[None]:
        """A context in which the run is open: outside of `fit` only for as long as it takes."""
        if self._open:
            yield
            return
        if self.model is None:
            raise ArgumentError(
                f"this {type(self).__name__} has no run yet: a fit or evaluate that is given it begins one"
            )
        self._begin()
        try:
            yield
        finally:
            self._end()

    def _rate(self) -> dict[str, float]:
        return {} if self.model.optimizer is None else {"learning_rate": self.model.learning_rate}

    def _or_now(self, step: int | None) -> int:
        return self.model.steps_taken if step is None else step

    def _described(self) -> dict[str, Any]:
        """What the model tells of itself: its kind and size, and the options of its optimizer."""
        own = self.model
        known: dict[str, Any] = {
            "module": type(own.module).__name__,
            "parameters": sum(parameter.numel() for parameter in own.module.parameters()),
        }
        if own.optimizer is not None:
            group = own.optimizer.param_groups[0]
            options = {name: group[name] for name in own.optimizer.defaults if name in group}
            known |= {"optimizer": type(own.optimizer).__name__}
            known |= {name: value for name, value in options.items() if isinstance(value, (bool, int, float, str))}
        fit = ("epochs", "steps") if self._trains else ()
        return known | {name: self.params[name] for name in fit if self.params[name] is not None}


@contextmanager
def _draws_of_its_own() -> Iterator[None]:
    """A context for a tracker that draws names: other ones in each run of the same seed, and the user's draws go on."""
    before = RNGState.now()
    random.seed()
    try:
        yield
    finally:
        before.restore()


def require_reachable(url: str, tracker: str, cure: str) -> None:
    """Raise a `TrackerError` if a server can't be reached: its own client would try for minutes.

    Args:
        url: The server's address.
        tracker: The tracker's name.
        cure: What to do without it.
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


def in_short(error: BaseException) -> str:
    """The first line of a tracker's error."""
    return str(error).strip().partition(os.linesep)[0].rstrip(".") or type(error).__name__
