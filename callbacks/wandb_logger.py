"""`WandbLogger`: a training as a run of Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import TrackerError
from .tracker_callback import TrackerCallback, in_short, require_reachable


class WandbLogger(TrackerCallback):
    """Sends a training to Weights & Biases: hyperparameters, the logs of each epoch, pictures and checkpoints.

    The object is one run: each `fit` with it goes on in that run, and so does a training that is resumed. A run that
    `wandb.init` has begun, as in a sweep, is used, and left open. Logs are by training steps; `epoch` is among them,
    from 0. On a pod only the first host writes.

    Args:
        project: The project (default: W&B's own).
        name: The run's name (default: W&B makes one).
        config: Hyperparameters by name, beside those that the model and its optimizer tell (default: none).
        update_freq: `"epoch"` (default), `"batch"`, or a number of batches after which to log the running means of
            the epoch as well, as `batch_loss`. Each time waits for the device.
        log_checkpoints: True to send each checkpoint that a `ModelCheckpoint` writes into a run directory, as a version
            of one artifact (default False).
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
        self._owned = True
        self._run: Any = None

    def open_run(self, run_id: str | None) -> str:
        """Begin a run, or go on with one; see `TrackerCallback`."""
        wandb = self.library
        self._owned = wandb.run is None
        if not self._owned:
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
                raise TrackerError(f"Weights & Biases begins no run: {in_short(error)}. {offline}") from error
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
        """End the run, unless it is the user's own."""
        run = self._run
        self._run = None
        if self._owned:
            run.finish(exit_code=int(failed))
