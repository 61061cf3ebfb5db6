"""`WandbLogger`: logs a training as a Weights & Biases run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import TrackerError
from .tracker_callback import TrackerCallback, first_line, require_reachable


class WandbLogger(TrackerCallback):
    """Sends a training to Weights & Biases: hyperparameters, the logs of each epoch, pictures and checkpoints.

    One object is one run: each `fit` with it continues the run, and so does a resumed training. A run that `wandb.init`
    has started, as in a sweep, is used, and stays open. Logs are by training steps, and include `epoch`, from 0. On a
    pod only the first host writes.

    Args:
        project: The project (default: W&B's default).
        name: The run's name (default: chosen by W&B).
        config: Hyperparameters by name, in addition to the model's and its optimizer's (default: none).
        update_freq: `"epoch"` (default), `"batch"`, or a number of batches after which to log the epoch's running
            means, too, as `batch_loss`. Each of these logs waits for the device.
        log_checkpoints: True uploads each checkpoint that a `ModelCheckpoint` writes to a run directory, as versions of
            one artifact (default False).
        init: Further arguments of `wandb.init`: `mode="offline"`, `entity`, `tags`, `dir`, ...

    Raises:
        ArgumentError: wandb isn't installed, or an unknown frequency.

    Example: `mode="offline"` writes to `./wandb`, for `wandb sync` later.
        >>> logger = WandbLogger("digits", config={"width": 64}, mode="offline")  # doctest: +SKIP
        >>> model.fit(x, y, callbacks=[logger])  # doctest: +SKIP

    Source: `wandb.init`, `wandb.Run.log`.
    """

    def __init__(
        self,
        project: str | None = None,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        *,
        update_freq: str | int = "epoch",
        log_checkpoints: bool = False,
        **init: Any,
    ) -> None:
        super().__init__("wandb", config, update_freq, log_checkpoints)
        self._init = {"project": project, "name": name, **init}
        self._owns_run = True
        self._run: Any = None

    def open_run(self, run_id: str | None) -> str:
        """Start or continue a run; see `TrackerCallback`."""
        wandb = self.library
        self._owns_run = wandb.run is None
        if not self._owns_run:
            self._run = wandb.run
        else:
            offline = "mode='offline' writes to ./wandb, for `wandb sync` later"
            settings = wandb.setup().settings.model_copy()
            given = self._init.get("settings") or {}
            (settings.update_from_dict if isinstance(given, dict) else settings.update_from_settings)(given)
            if self._init.get("mode", settings.mode) in (None, "online"):
                require_reachable(settings.base_url, "Weights & Biases", offline)
                if run_id is not None:
                    self._init["resume"] = "allow"
            try:
                self._run = wandb.init(**{**self._init, **({} if run_id is None else {"id": run_id})})
            except wandb.errors.Error as error:
                raise TrackerError(f"Weights & Biases can't start a run: {first_line(error)}. {offline}") from error
        self._run.define_metric("*", step_metric="step")
        return str(self._run.id)

    def write_config(self, values: Mapping[str, Any]) -> None:
        """Log hyperparameters."""
        self._run.config.setdefaults(dict(values))

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Log numbers."""
        self._run.log({**values, "step": step})

    def write_image(self, tag: str, image: np.ndarray[Any, Any], step: int) -> None:
        """Log a picture."""
        self._run.log({tag: self.library.Image(image), "step": step})

    def write_folder(self, folder: Path, name: str, step: int) -> None:
        """Log a checkpoint."""
        artifact = self.library.Artifact(f"checkpoint-{self._run.id}", "model", metadata={"step": step})
        artifact.add_dir(str(folder))
        self._run.log_artifact(artifact, aliases=["latest", name])

    def close_run(self, failed: bool) -> None:
        """End the run, unless the user started it."""
        run = self._run
        self._run = None
        if self._owns_run:
            run.finish(exit_code=int(failed))
