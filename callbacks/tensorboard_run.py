"""`TensorBoardRun`: numbers as the files of one run that TensorBoard shows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardRun:
    """One run of TensorBoard's, under the names that the metrics have. It is a `Logger`.

    `TensorBoard`, the callback, lays logs out as Keras does; this is for numbers of your own, and for `Tracker`.

    Args:
        folder: The run's folder.

    Example:
        >>> import os, tempfile
        >>> run = TensorBoardRun(tempfile.mkdtemp())
        >>> run.log_metrics(10, {"loss": 0.5})
        >>> run.close()
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = os.fspath(folder)
        self._writer: SummaryWriter | None = None

    def log_hyperparameters(self, values: Mapping[str, Any]) -> None:
        """Show them in TensorBoard's tab HPARAMS.

        Args:
            values: Numbers, texts and truth values by name; what is none of these is shown as text.
        """
        from torch.utils.tensorboard.summary import hparams

        plain = {name: v if isinstance(v, (bool, int, float, str)) else str(v) for name, v in values.items()}
        file_writer = self._open().file_writer
        assert file_writer is not None
        for summary in hparams(plain, {}):
            file_writer.add_summary(summary)

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a point to the chart of each metric.

        Args:
            step: Where on the axis.
            metrics: Floats by name.
        """
        for name, value in metrics.items():
            self._open().add_scalar(name, value, step)

    def close(self) -> None:
        """Write all that is under way. What is logged later goes into another file of the same run."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self) -> SummaryWriter:
        if self._writer is None:
            # Imported here, and made only when there is something to show: it takes a second, and makes a file.
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(self._folder)
        return self._writer
