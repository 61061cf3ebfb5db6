"""`PredictionWriter`: predictions go to disk batch by batch, so that they need not fit in memory."""

from __future__ import annotations

import os
import sys
from collections import deque
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

from ..errors import ArgumentError
from ..step import fetch
from ..utils.files import replacing
from ..utils.npy_file import NpyFile
from .base import Callback, Logs

# Outputs that may wait on the device before they are fetched: enough to keep it busy, few enough to fit.
_IN_FLIGHT = 2


class PredictionWriter(Callback):
    """Writes what `predict` predicts into `.npy` files, a batch at a time; `predict` keeps nothing and returns None.

    The file of a module with one output is `outputs.npy`, with the rows of all batches in their order; of several
    `outputs.logits.npy` or `outputs.0.npy`, by their place in the nest. `numpy.load("outputs.npy", mmap_mode="r")`
    reads a file that is larger than memory. The files appear when all is predicted, and none does after an error.
    bfloat16, which NumPy lacks, becomes float32.

    Callbacks before it find the `"outputs"` in the logs of a batch, those after it don't.

    Args:
        folder: Where to. Missing folders are made, and files of the same names replaced.

    Raises:
        ArgumentError: An output is no tensor. (When it is used.)
        DataError: Batches whose rows differ in shape. (When it is used.)

    Example:
        >>> import tempfile, tpufit
        >>> model = tpufit.Model(torch.nn.Linear(4, 2))
        >>> folder = Path(tempfile.mkdtemp())
        >>> model.predict(torch.zeros(100, 4), callbacks=[PredictionWriter(folder)], verbose=0)
        >>> np.load(folder / "outputs.npy").shape
        (100, 2)
    """

    reads_weights = False

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._drafts = ExitStack()
        self._files: dict[str, NpyFile] = {}
        self._flying: deque[Any] = deque()
        self._handled: BaseException | None = None

    def on_predict_begin(self, logs: Logs | None = None) -> None:
        """Begin anew."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._drafts, self._files = ExitStack(), {}
        self._flying.clear()
        self._handled = sys.exc_info()[1]

    def on_predict_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Take the outputs, and write those of an earlier batch."""
        self._flying.append(cast("dict[str, Any]", logs).pop("outputs"))
        if len(self._flying) > _IN_FLIGHT:
            self._write_oldest()

    def on_predict_end(self, logs: Logs | None = None) -> None:
        """Write the rest, and let the files appear; or drop them, if it ends because of an error."""
        error = sys.exc_info()[1]
        if error is not self._handled:
            self._drop()
            return
        while self._flying:
            self._write_oldest()
        self._drafts.close()

    def _write_oldest(self) -> None:
        try:
            paths, _ = tree_flatten_with_path(fetch(self._flying.popleft(), "outputs"))
            for path, output in paths:
                name = ".".join(["outputs", *map(_part, path), "npy"])
                if name not in self._files:
                    file = NpyFile(self._drafts.enter_context(replacing(self.folder / name)))
                    self._drafts.callback(file.close)  # before it takes its place, or goes
                    self._files[name] = file
                self._files[name].append(_as_rows(output, name))
        except BaseException:
            self._drop()  # a callback that raised isn't ended later
            raise

    def _drop(self) -> None:
        self._flying.clear()
        self._drafts.__exit__(*sys.exc_info())


def _part(key: Any) -> str:
    """One step of a path in a nest, as a part of a file's name."""
    name = str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))))
    if not name.replace("_", "").replace("-", "").isalnum():
        raise ArgumentError(
            f"an output's name becomes part of a file's, and {keystr((key,))} can't: use letters, digits, - and _"
        )
    return name


def _as_rows(output: Any, name: str) -> np.ndarray[Any, Any]:
    if not isinstance(output, torch.Tensor):
        raise ArgumentError(f"PredictionWriter writes tensors only, and {name} would hold {output!r}")
    output = output.float() if output.dtype is torch.bfloat16 else output
    array: np.ndarray[Any, Any] = (output if output.dim() else output[None]).numpy()
    return array
