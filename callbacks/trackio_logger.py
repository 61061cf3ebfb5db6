"""`TrackioLogger`: logs a training as a Trackio run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import TrackerError
from .tracker_callback import TrackerCallback, first_line, require_reachable


class TrackioLogger(TrackerCallback):
    """Sends a training to Trackio, which stores it on this machine: hyperparameters, logs, pictures and checkpoints.

    One object is one run: each `fit` with it continues the run, and so does a resumed training. Logs are by training
    steps, and include `epoch`, from 0. On a pod only the first host writes. `trackio show` opens the dashboard.

    Args:
        project: The project (default `"tpufit"`).
        name: The run's name, unique in the project (default: chosen by Trackio).
        config: Hyperparameters by name, in addition to the model's and its optimizer's (default: none).
        update_freq: `"epoch"` (default), `"batch"`, or a number of batches after which to log the epoch's running
            means, too, as `batch_loss`. Each of these logs waits for the device.
        log_checkpoints: True stores each checkpoint that a `ModelCheckpoint` writes to a run directory, as versions of
            one artifact (default False).
        init: Further arguments of `trackio.init`: `space_id`, `server_url`, `group`, ...

    Raises:
        ArgumentError: trackio isn't installed, or an unknown frequency.

    Example:
        >>> logger = TrackioLogger("digits", config={"width": 64})  # doctest: +SKIP
        >>> model.fit(x, y, callbacks=[logger])  # doctest: +SKIP

    Source: `trackio.init`, `trackio.log`.
    """

    def __init__(
        self,
        project: str = "tpufit",
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        *,
        update_freq: str | int = "epoch",
        log_checkpoints: bool = False,
        **init: Any,
    ) -> None:
        super().__init__("trackio", config, update_freq, log_checkpoints)
        self._init = {"project": project, "name": name, **init}
        self._run: Any = None

    def open_run(self, run_id: str | None) -> str:
        """Start or continue a run; see `TrackerCallback`. Trackio identifies runs by name."""
        server = self._init.get("server_url")
        if server is not None:
            require_reachable(server, "Trackio", "Without server_url it logs on this machine")
        elif self._init.get("space_id") or os.environ.get("TRACKIO_SPACE_ID"):
            hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
            require_reachable(hub, "Trackio's space", "Without space_id it logs on this machine")
        resume_options = {} if run_id is None else {"name": run_id, "resume": "allow"}
        try:
            self._run = self.library.init(**{**self._init, **resume_options})
        except (ValueError, OSError) as error:
            raise TrackerError(f"Trackio can't start a run: {first_line(error)}") from error
        return str(self._run.name)

    def write_config(self, values: Mapping[str, Any]) -> None:
        """Log hyperparameters, which are sent with the first numbers."""
        self._run.config.update({**values, **self._run.config})

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Log numbers."""
        self._run.log(dict(values), step=step)

    def write_image(self, tag: str, image: np.ndarray[Any, Any], step: int) -> None:
        """Log a picture."""
        self._run.log({tag: self.library.Image(image)}, step=step)

    def write_folder(self, folder: Path, name: str, step: int) -> None:
        """Log a checkpoint."""
        self._run.log_artifact(folder, f"checkpoint-{self._run.name}", "model", aliases=[name])

    def close_run(self, failed: bool) -> None:
        """End the run."""
        run = self._run
        self._run = None
        run.finish()
