"""`CometLogger`: logs a training as a Comet experiment."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from ..errors import TrackerError
from .tracker_callback import TrackerCallback, first_line, require_reachable


class CometLogger(TrackerCallback):
    """Sends a training to Comet: hyperparameters, the logs of each epoch, pictures and checkpoints.

    One object is one experiment: each `fit` with it continues the experiment, and so does a resumed training. An
    experiment that `comet_ml.start` has started is used, and stays open. Logs are by training steps, and include
    `epoch`, from 0. On a pod only the first host writes. Comet's automatic logging works only if Comet is imported
    before torch; this callback doesn't need that.

    Args:
        project: The project (default: Comet's default).
        name: The experiment's name (default: chosen by Comet).
        config: Hyperparameters by name, in addition to the model's and its optimizer's (default: none).
        online: False writes an archive, for `comet upload` later (default True).
        offline_directory: The archive's folder (default: Comet's default).
        update_freq: `"epoch"` (default), `"batch"`, or a number of batches after which to log the epoch's running
            means, too, as `batch_loss`. Each of these logs waits for the device.
        log_checkpoints: True uploads each checkpoint that a `ModelCheckpoint` writes to a run directory, as the model
            `step-0000000010` (default False).
        start: Further arguments of `comet_ml.start`: `workspace`, `api_key`, ...

    Raises:
        ArgumentError: comet_ml isn't installed, or an unknown frequency.

    Example:
        >>> logger = CometLogger("digits", online=False, offline_directory="runs")  # doctest: +SKIP
        >>> model.fit(x, y, callbacks=[logger])  # doctest: +SKIP

    Source: `comet_ml.start`, `comet_ml.CometExperiment`.
    """

    def __init__(
        self,
        project: str | None = None,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        *,
        online: bool = True,
        offline_directory: str | None = None,
        update_freq: str | int = "epoch",
        log_checkpoints: bool = False,
        **start: Any,
    ) -> None:
        super().__init__("comet_ml", config, update_freq, log_checkpoints)
        self.online = online
        self._start = {"project_name": project, "online": online, **start}
        self._settings: dict[str, Any] = {"offline_directory": offline_directory, "name": name}
        self._owns_run = True
        self._experiment: Any = None
        self._copies: list[TemporaryDirectory[str]] = []

    def open_run(self, run_id: str | None) -> str:
        """Start or continue an experiment; see `TrackerCallback`."""
        comet_ml = self.library
        running = comet_ml.get_running_experiment()
        self._owns_run = running is None or running.ended
        if not self._owns_run:
            self._experiment = running
            return str(running.get_key())
        offline = "online=False writes an archive, for `comet upload` later"
        if self.online:
            require_reachable(comet_ml.config.get_backend_address(), "Comet", offline)
        resume_options = {} if run_id is None else {"experiment_key": run_id, "mode": "get"}
        settings = comet_ml.ExperimentConfig(**self._settings)
        try:
            self._experiment = comet_ml.start(experiment_config=settings, **{**self._start, **resume_options})
        except (ValueError, comet_ml.exceptions.CometException) as error:
            raise TrackerError(f"Comet can't start an experiment: {first_line(error)}. {offline}") from error
        return str(self._experiment.get_key())

    def write_config(self, values: Mapping[str, Any]) -> None:
        """Log hyperparameters."""
        self._experiment.log_parameters(dict(values))

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Log numbers."""
        self._experiment.log_metrics(dict(values), step=step)

    def write_image(self, tag: str, image: np.ndarray[Any, Any], step: int) -> None:
        """Log a picture."""
        self._experiment.log_image(image, name=tag, step=step)

    def write_folder(self, folder: Path, name: str, step: int) -> None:
        """Log a checkpoint."""
        copy = TemporaryDirectory(prefix="tpufit-")  # Comet reads the files later
        self._copies.append(copy)
        files = shutil.copytree(folder, Path(copy.name, name))
        self._experiment.log_model(name, str(files), prepend_folder_name=False)

    def close_run(self, failed: bool) -> None:
        """End the experiment, unless the user started it."""
        experiment = self._experiment
        self._experiment = None
        if self._owns_run:
            experiment.end()  # waits until all is sent
            for copy in self._copies:
                copy.cleanup()
            self._copies.clear()
