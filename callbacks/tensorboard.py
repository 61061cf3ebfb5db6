"""`TensorBoard`: writes the logs of a training for TensorBoard."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from textwrap import indent
from typing import Any

from torch import Tensor

from ..errors import ArgumentError
from ..hosts import is_first
from ..runtime import to_host
from ..utils.failed_writes import FailedWrites
from ._support.event_files import EventFiles
from ._support.event_rewind import keep_until
from ._support.frequency import resolve_frequency
from ._support.profiled_steps import ProfiledSteps
from ._support.projector import Metadata, find_embedding_layers, find_metadata_files, write_embeddings
from ._support.scalars import extract_scalars
from ._support.step_speed import StepSpeed
from .base import Callback, Logs


class TensorBoard(Callback):
    """Writes logs for `tensorboard --logdir logs`, in Keras's layout.

    The run `train` gets `epoch_*` for each log and for `learning_rate`, `input_bound` (the share of time spent waiting
    for data), for texts `tokens_per_second`, and on a TPU `share_of_peak` and `memory_used` (bytes of a core, see
    `Model.memory_used`). It also gets the model's summary as text and, on request, `batch_*` with the step's rate,
    histograms and a profile. The run `validation` gets `epoch_*` without `val_`, so that both runs share a chart, and
    `evaluation_*_vs_iterations` for each validation or `evaluate`. `epoch_*` and histograms are by epoch, from 0, all
    others by training step.

    If the disk is full, a warning says so, and the points are written later; at the end of the third such epoch in a
    row it is an error.

    Writing an epoch's logs doesn't wait for the device again; each write of batch logs or histograms waits once.

    A resumed training removes the points after its checkpoint: see `load_state_dict`.

    Args:
        log_dir: The folder (default `"logs"`), or its URL. Use one folder per training.
        histogram_freq: Write histograms of the weights every `histogram_freq` epochs, beginning with the first (default
            0: never).
        write_graph: Write the model's summary as text, after the first epoch (default True). PyTorch has no graph of
            layers.
        write_images: Write weights that are matrices as images, together with histograms (default False).
        write_steps_per_second: Write the training speed, excluding validations (default False).
        update_freq: `"epoch"` (default), `"batch"`, or a number of batches after which to write the epoch's running
            means, too. Each of these writes waits for the device.
        profile_batch: The training step to profile, from 1, or the first and last of several (default 0: none). The
            profile is written to `train/plugins/profile`: TensorBoard shows it with its plugin (`pip install xprof`),
            and ui.perfetto.dev shows its `trace.json.gz`. It waits for the device twice.
        embeddings_freq: Write the embedding layers every `embeddings_freq` epochs, beginning with the first (default 0:
            never). TensorBoard's projector shows the last write after a restart.
        embeddings_metadata: A file with one label per line, for each row of an embedding: one file for all layers, or a
            dict by layer name (`"encoder.tokens"`). Paths are relative to `log_dir` (default: none).
        hparams: Hyperparameters by name (numbers, strings and bools) for TensorBoard's tab of that name, which compares
            the trainings under one `--logdir` (default: none).

    Raises:
        ArgumentError: An argument has a wrong type or value.

    Example:
        >>> import os, tempfile
        >>> from types import SimpleNamespace
        >>> folder = tempfile.mkdtemp()
        >>> board = TensorBoard(folder, write_graph=False)
        >>> shown = {"input_bound": None, "memory_used": None, "speed": lambda steps_per_second: {}}
        >>> board.set_model(SimpleNamespace(optimizer=None, steps_taken=0, **shown))
        >>> board.on_epoch_end(0, {"loss": 0.5, "val_loss": 0.6})
        >>> board.on_train_end()
        >>> sorted(os.listdir(folder))
        ['train', 'validation']

    Source: `keras.callbacks.TensorBoard`.
    """

    reads_weights = False
    only_writes = True

    def __init__(
        self,
        log_dir: str | os.PathLike[str] = "logs",
        histogram_freq: int = 0,
        write_graph: bool = True,
        write_images: bool = False,
        write_steps_per_second: bool = False,
        update_freq: str | int = "epoch",
        profile_batch: int | Sequence[int] = 0,
        embeddings_freq: int = 0,
        embeddings_metadata: Metadata = None,
        *,
        hparams: Mapping[str, bool | str | float] | None = None,
    ) -> None:
        for name, freq in (("histogram_freq", histogram_freq), ("embeddings_freq", embeddings_freq)):
            if isinstance(freq, bool) or not isinstance(freq, int) or freq < 0:
                raise ArgumentError(f"{name} must be a number of epochs, or 0 for none, got {freq!r}")
        for name, value in (hparams or {}).items():
            if not isinstance(name, str) or not isinstance(value, (bool, int, float, str)):
                raise ArgumentError(f"hparams must be numbers, texts or bools by name, got {name!r}: {value!r}")
        self.log_dir = os.fspath(log_dir)
        self.hparams = dict(hparams or {})
        self.write_graph = write_graph
        self.write_images = write_images
        self.histogram_freq = histogram_freq
        self.write_steps_per_second = write_steps_per_second
        self.embeddings_freq = embeddings_freq
        self.embeddings_metadata = embeddings_metadata
        self._every = resolve_frequency("update_freq", update_freq, {"epoch": 0, "batch": 1})
        self._profile = ProfiledSteps(profile_batch)
        self._steps_before = 0  # at the end of the last `fit`, or at the checkpoint resumed from
        self._steps_at_begin: int | None = None  # the model's count when this `fit` began; None outside `fit`
        self._epoch: int | None = None  # the current epoch; None between epochs
        self._rewinds = False  # rewind the files when the next epoch begins
        self._described = False  # the summary and the hyperparameters have been written
        self._speed = StepSpeed()
        self._compiles = False  # in the epoch's first step, which may be compiled
        self._files = EventFiles(self.log_dir)
        self._failed_writes = FailedWrites()

    @property
    def update_freq(self) -> str | int:
        """`"epoch"`, or a number of batches."""
        return self._every or "epoch"

    @property
    def steps(self) -> int:
        """The x-axis of the logs: training steps in all `fit` calls with this object, also before a resumption."""
        return self._steps_before + (
            0 if self._steps_at_begin is None else self.model.steps_taken - self._steps_at_begin
        )

    def writer(self, run: str = "train") -> Any:
        """Return PyTorch's `SummaryWriter` of a run, to write anything with. It is closed when training ends.

        Args:
            run: The name of the run (default `"train"`).

        Example:
            >>> import tempfile
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     board = TensorBoard(folder)
            ...     board.writer("train").add_scalar("temperature", 0.7, global_step=1)
            ...     board.writer("train").flush()
            ...     sorted(path.name for path in Path(folder).iterdir())
            ['train']

        Source: `torch.utils.tensorboard.SummaryWriter`.
        """
        return self._files.writer(run)

    def add_image(self, tag: str, image: Any, step: int | None = None, dataformats: str = "CHW") -> None:
        """Write an image.

        Args:
            tag: The name that TensorBoard shows.
            image: A tensor or array, of bytes or of floats from 0 to 1. For a tensor on the device this waits.
            step: The image's step (default: the current training step).
            dataformats: The order of its dimensions: `"CHW"` (default), `"HWC"` or `"HW"`, with a leading N for several
                images.

        Source: `torch.utils.tensorboard.SummaryWriter.add_image` and `add_images`.
        """
        if isinstance(image, Tensor):
            (image,) = to_host([image], "image")
        if not is_first():
            return
        write = self.writer().add_images if "N" in dataformats else self.writer().add_image
        write(tag, image, self._step_or_now(step), dataformats=dataformats)

    def add_text(self, tag: str, text: str, step: int | None = None) -> None:
        """Write a text, which TensorBoard renders as Markdown.

        Args:
            tag: The name that TensorBoard shows.
            text: The text.
            step: The step to show it at (default: the current training step).

        Source: `torch.utils.tensorboard.SummaryWriter.add_text`.
        """
        if is_first():
            self.writer().add_text(tag, text, self._step_or_now(step))

    def add_figure(self, tag: str, figure: Any, step: int | None = None) -> None:
        """Write a matplotlib figure as an image, and close it.

        Args:
            tag: The name that TensorBoard shows.
            figure: The figure.
            step: The step to show it at (default: the current training step).

        Source: `torch.utils.tensorboard.SummaryWriter.add_figure`.
        """
        if is_first():
            self.writer().add_figure(tag, figure, self._step_or_now(step))
            return
        from matplotlib import pyplot

        for each in figure if isinstance(figure, list) else [figure]:
            pyplot.close(each)

    def state_dict(self) -> dict[str, Any]:
        """Return the training steps of the logs, whose points reach the disk before the checkpoint does."""
        with suppress(OSError):  # the points stay in memory, and the epoch's end reports the error
            self._files.write()
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume after a checkpoint: later points are removed from the files, once the epoch is known.

        So no step appears twice, whatever the killed process had written. A step that you pass to `add_image` and the
        like is taken for a training step.

        Args:
            state: The dict that `state_dict` returned.
        """
        self._steps_before = state["steps"]
        self._described = False
        if self._steps_at_begin is not None:
            self._steps_at_begin = self.model.steps_taken
        if self._epoch is None:
            self._rewinds = True
        else:
            self._begin(self._epoch, rewinds=True, within=True)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Treat evaluations as validations from now on, and check `embeddings_metadata` before the first step."""
        if self.embeddings_freq:
            find_metadata_files(self.embeddings_metadata, find_embedding_layers(self.model.module), self._files.folder)
        self._steps_at_begin = self.model.steps_taken
        self._profile.update(self.steps, None, self._files.folder)

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Close the files."""
        self._profile.stop()
        self._steps_before = self.steps
        self._steps_at_begin = None
        self._epoch = None
        self._close()

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Start the clock; after `load_state_dict`, rewind the files to this epoch."""
        rewinds = self._rewinds
        self._rewinds = False
        self._epoch = epoch
        self._begin(epoch, rewinds)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Write the running means, if they are due."""
        steps = self.steps
        self._profile.update(steps, logs, self._files.folder)
        if self._compiles:
            self._compiles = False
            self._speed.mark("later", steps)
        if self._every and self._speed.has_passed_multiple("batch", self._every, steps):
            values = self._rate() | extract_scalars(logs)
            if self.write_steps_per_second:
                values["steps_per_second"] = self._speed.steps_per_second("batch", steps)
            self._write("train", "batch_{}", values, steps)
            self._speed.mark("batch", steps)

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Stop the clock: a validation isn't training."""
        self._speed.pause()

    def on_test_end(self, logs: Logs | None = None) -> None:
        """Write the evaluation, by training step."""
        self._write("validation", "evaluation_{}_vs_iterations", extract_scalars(logs), self.steps)
        self._speed.resume()
        if self._steps_at_begin is None:
            self._close()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Write the epoch."""
        values = extract_scalars(logs)
        self._epoch = None
        train = self._rate() | {name: value for name, value in values.items() if not name.startswith("val_")}
        validation = {name.removeprefix("val_"): value for name, value in values.items() if name.startswith("val_")}
        pace = self._speed.steps_per_second("epoch", self.steps)
        if self.model.input_bound is not None:
            train["input_bound"] = self.model.input_bound
        # Without the first step, like the progress bar.
        train |= self.model.speed(self._speed.steps_per_second("later", self.steps) or pace)
        if self.model.memory_used is not None:
            train["memory_used"] = self.model.memory_used
        if self.write_steps_per_second:
            train["steps_per_second"] = pace
        self._write("train", "epoch_{}", train, epoch)
        self._write("validation", "epoch_{}", validation, epoch)
        if not self._described:
            self._described = True
            self._describe()
        with self._failed_writes.tolerate(self.log_dir):
            self._write_weights(epoch)
            self._files.flush()  # so that an open TensorBoard shows the epoch now

    def _close(self) -> None:
        with self._failed_writes.tolerate(self.log_dir):
            self._files.close()

    def _rate(self) -> dict[str, float]:
        """Return the rate, for logs without it: an earlier callback may already have set the next rate."""
        return {} if self.model.optimizer is None else {"learning_rate": self.model.learning_rate}

    def _begin(self, epoch: int, rewinds: bool, within: bool = False) -> None:
        steps = self.steps
        if rewinds:
            self._files.rewind(keep_until(epoch, steps, within))
        self._speed.mark("epoch", steps)
        self._speed.mark("later", steps)
        self._compiles = True
        self._speed.mark("batch", steps)

    def _write(self, run: str, tag: str, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer(run).add_scalar(tag.format(name), value, step)

    def _describe(self) -> None:
        """Write the summary and the hyperparameters once, after the first epoch, when the layers' outputs are known."""
        if self.write_graph:
            # Text indented by four is code in Markdown, and keeps its columns.
            self.model.summary(lambda text: self.add_text("summary", indent(text, "    "), 0))
        if self.hparams:
            from torch.utils.tensorboard.summary import hparams

            _, *session = hparams(self.hparams, {})  # without a list of metrics TensorBoard shows all
            for part in session:
                self.writer(".").file_writer.add_summary(part)

    def _write_weights(self, epoch: int) -> None:
        """Write embeddings and histograms, if they are due."""
        embeddings, histograms = (f and epoch % f == 0 for f in (self.embeddings_freq, self.histogram_freq))
        weights = self.model.state_dict() if embeddings or histograms else {}
        layers = find_embedding_layers(self.model.module) if embeddings else {}
        if layers:  # before the run's first event: the projector reads a run once
            files = find_metadata_files(self.embeddings_metadata, layers, self._files.folder)
            tables = {name: weights[weight] for name, weight in layers.items()}
            write_embeddings(Path(self._files.folder, "train"), tables, files)
        if histograms:
            self._write_histograms(weights, epoch)

    def _write_histograms(self, weights: Mapping[str, Tensor], epoch: int) -> None:
        for name, tensor in weights.items():
            finite = tensor[tensor.isfinite()].float()
            if tensor.is_floating_point() and finite.numel():
                self.writer().add_histogram(f"weights/{name}", finite, epoch)
        for name, tensor in weights.items() if self.write_images else ():
            if tensor.dim() == 2:
                low, high = tensor.float().aminmax()
                image = (tensor.float() - low) / (high - low).clamp(min=1e-12)
                self.writer().add_image(f"weights/{name}", image, epoch, dataformats="HW")

    def _step_or_now(self, step: int | None) -> int:
        return self.steps if step is None else step
