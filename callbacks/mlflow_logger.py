"""`MLflowLogger`: logs a training as an MLflow run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import TrackerError
from ..utils.user_code import warn
from .tracker_callback import TrackerCallback, first_line, require_reachable


class MLflowLogger(TrackerCallback):
    """Sends a training to MLflow: parameters, the logs of each epoch, pictures and checkpoints.

    One object is one run: each `fit` with it continues the run, and so does a resumed training. A run that
    `mlflow.start_run` has started is used, and stays open. Logs are by training steps, and include `epoch`, from 0. On
    a pod only the first host writes. If the connection to the server is lost during training, there is one warning, and
    training continues.

    Args:
        experiment: The experiment, created if it doesn't exist (default: MLflow's default).
        name: The run's name (default: chosen by MLflow).
        config: Parameters by name, in addition to the model's and its optimizer's (default: none).
        tracking_uri: The server or database, e.g. `"http://localhost:5000"` or `"sqlite:///mlflow.db"` (default: set by
            `mlflow.set_tracking_uri`).
        update_freq: `"epoch"` (default), `"batch"`, or a number of batches after which to log the epoch's running
            means, too, as `batch_loss`. Each of these logs waits for the device.
        log_checkpoints: True uploads each checkpoint that a `ModelCheckpoint` writes to a run directory, to
            `checkpoints/` in the run's artifacts (default False).
        tags: Tags of the run by name (default: none).

    Raises:
        ArgumentError: mlflow isn't installed, or an unknown frequency.

    Example:
        >>> import tempfile
        >>> logger = MLflowLogger("digits", tracking_uri=f"sqlite:///{tempfile.mkdtemp()}/mlflow.db")
        >>> print(logger.run_id)
        None

    Source: `mlflow.MlflowClient`.
    """

    def __init__(
        self,
        experiment: str | None = None,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        *,
        tracking_uri: str | None = None,
        update_freq: str | int = "epoch",
        log_checkpoints: bool = False,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__("mlflow", config, update_freq, log_checkpoints)
        self.experiment = experiment
        self.name = name
        self.tracking_uri = tracking_uri
        self.tags = dict(tags or {})
        self._owns_run = True
        self._lost = False
        self._client: Any = None

    def open_run(self, run_id: str | None) -> str:
        """Start or continue a run; see `TrackerCallback`."""
        mlflow = self.library
        uri = self.tracking_uri or mlflow.get_tracking_uri()
        if uri.startswith("http"):
            require_reachable(uri, "MLflow", "tracking_uri='sqlite:///mlflow.db' needs no server")
        active = mlflow.active_run() if run_id is None and self.tracking_uri is None else None
        self._owns_run = active is None
        self._client = mlflow.MlflowClient(uri)
        try:
            if active is not None:
                return str(active.info.run_id)
            if run_id is not None:
                self._client.update_run(run_id, status="RUNNING")
                return run_id
            return str(self._client.create_run(self._experiment_id(), tags=self.tags, run_name=self.name).info.run_id)
        except mlflow.MlflowException as error:
            raise TrackerError(f"MLflow can't start a run at {uri}: {first_line(error)}") from error

    def _experiment_id(self) -> str:
        if self.experiment is None:
            return "0"
        known = self._client.get_experiment_by_name(self.experiment)
        return str(self._client.create_experiment(self.experiment) if known is None else known.experiment_id)

    def write_config(self, values: Mapping[str, Any]) -> None:
        """Log parameters, as strings."""
        known = self._client.get_run(self.run_id).data.params
        new = [self.library.entities.Param(name, str(value)) for name, value in values.items() if name not in known]
        self._try(self._client.log_batch, self.run_id, params=new)

    def last_steps(self) -> dict[str, int]:
        """Return the last step of each of the run's logs."""
        steps: dict[str, int] = {}
        for name in self._client.get_run(self.run_id).data.metrics:
            steps[name] = max(point.step for point in self._client.get_metric_history(self.run_id, name))
        return steps

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Log numbers."""
        now = int(time.time() * 1000)
        metrics = [self.library.entities.Metric(name, value, now, step) for name, value in values.items()]
        self._try(self._client.log_batch, self.run_id, metrics)

    def write_image(self, tag: str, image: np.ndarray[Any, Any], step: int) -> None:
        """Log a picture."""
        self._try(self._client.log_image, self.run_id, image, key=tag, step=step)

    def write_folder(self, folder: Path, name: str, step: int) -> None:
        """Log a checkpoint."""
        self._try(self._client.log_artifacts, self.run_id, str(folder), f"checkpoints/{name}")

    def close_run(self, failed: bool) -> None:
        """End the run, unless the user started it."""
        if self._owns_run:
            self._try(self._client.set_terminated, self.run_id, "FAILED" if failed else "FINISHED")
        self._client = None

    def _try(self, call: Any, *args: Any, **named: Any) -> None:
        """Call the server, and warn once if it no longer answers."""
        try:
            call(*args, **named)
        except (self.library.MlflowException, OSError) as error:
            if not self._lost:
                self._lost = True
                warn(
                    f"MLflowLogger could not log to run {self.run_id}: {first_line(error)}. Training continues "
                    "without MLflow"
                )
