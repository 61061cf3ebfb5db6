"""`TensorBoard`: the logs of a training, as files that TensorBoard shows."""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from textwrap import indent
from typing import Any

from torch import Tensor

from ..errors import ArgumentError
from ..hosts import is_first
from ..runtime import start_profile, stop_profile, to_host
from ._support.event_files import EventFiles
from ._support.failed_writes import FailedWrites
from ._support.frequency import batches
from ._support.projector import Metadata, embedding_layers, metadata_files, write_embeddings
from ._support.scalars import scalars
from .base import Callback, Logs

# These tags are by epoch, all others by training step.
_BY_EPOCH = ("epoch_", "weights/")
# These are written at the end of the first epoch, also of a resumed training.
_SAID_ONCE = ("summary/text_summary", "_hparams_/")


class TensorBoard(Callback):
    """Writes logs for `tensorboard --logdir logs`, as Keras lays them out.

    The run `train` gets `epoch_loss`, the other logs likewise, `epoch_learning_rate`, `epoch_input_bound` (the share of
    the time in which data were waited for), `epoch_tokens_per_second` for texts, on a TPU `epoch_share_of_peak` and
    `epoch_memory_used` (bytes of a core, where the runtime tells), the model's summary as text and, if asked, `batch_*`
    with the rate of the step, histograms and a profile. The run `validation` gets `epoch_*` without `val_`, so that
    both are in one chart, and `evaluation_*_vs_iterations` for each validation or `evaluate`. `epoch_*` and histograms
    are by epoch, from 0, the others by training steps.

    A full disk is a warning, and the points are written later; an error at the end of the third epoch in a row.

    An epoch costs no wait beside the one for its logs; each write of batch logs and of histograms costs one.

    A training that is resumed takes its points back to where it goes on: see `load_state_dict`.

    Args:
        log_dir: The folder (default `"logs"`), or its URL; keep it to one training.
        histogram_freq: The number of epochs from one histogram of the weights to the next, from the first (default 0:
            never).
        write_graph: Write the model's summary as text, after the first epoch (default True). PyTorch has no graph of
            layers to show.
        write_images: Write weights that are matrices as images, along with histograms (default False).
        write_steps_per_second: Write the speed of training, without validations (default False).
        update_freq: `"epoch"` (default), `"batch"`, or a number of batches after which to write the running means of
            the epoch as well. Each time waits for the device.
        profile_batch: A training step, or the first and last of several, from 1, to record a profile of (default 0:
            none). It is written to `train/plugins/profile`: TensorBoard shows it with its plugin (`pip install xprof`),
            and ui.perfetto.dev shows its `trace.json.gz`. It waits for the device twice.
        embeddings_freq: The number of epochs from one writing of the embedding layers to the next, from the first
            (default 0: never). TensorBoard's projector shows the last one, once it is started again.
        embeddings_metadata: The file with a label on each line for each row of an embedding, for all layers or by the
            layer's name (`"encoder.tokens"`); a relative path begins in `log_dir` (default: none).
        hparams: Hyperparameters by name, numbers, texts and bools, for TensorBoard's tab of that name, which compares
            the trainings below one `--logdir` (default: none).

    Raises:
        ArgumentError: An argument that is none of these.

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
        self._every = batches("update_freq", update_freq, {"epoch": 0, "batch": 1})
        self._profile = _Profile(profile_batch)
        self._steps_before = 0  # when the last `fit` ended, or of the checkpoint to go on from
        self._begun: int | None = None  # the model's own count when this `fit` began; None outside of `fit`
        self._epoch: int | None = None  # the one under way; None between epochs
        self._rewinds = False  # the files are to be taken back when the next epoch begins
        self._described = False  # the summary and the hyperparameters have been written
        self._speed = _Speed()
        self._files = EventFiles(self.log_dir)
        self._failed = FailedWrites()

    @property
    def update_freq(self) -> str | int:
        """`"epoch"`, or a number of batches."""
        return self._every or "epoch"

    @property
    def steps(self) -> int:
        """The training steps that the logs are by: those of all `fit` calls this object saw, or was resumed after."""
        return self._steps_before + (0 if self._begun is None else self.model.steps_taken - self._begun)

    def writer(self, run: str = "train") -> Any:
        """PyTorch's `SummaryWriter` of a run, for whatever it can write. It is closed when training ends.

        Args:
            run: The name of the run (default `"train"`).

        Source: `torch.utils.tensorboard.SummaryWriter`.
        """
        return self._files.writer(run)

    def add_image(self, tag: str, image: Any, step: int | None = None, dataformats: str = "CHW") -> None:
        """Write an image.

        Args:
            tag: The name that TensorBoard shows.
            image: A tensor or array, of bytes or of floats from 0 to 1. One on the device is waited for.
            step: The step it belongs to (default: that of training).
            dataformats: The order of its dimensions: `"CHW"` (default), `"HWC"` or `"HW"`; several have an N in front.

        Source: `torch.utils.tensorboard.SummaryWriter.add_image` and `add_images`.
        """
        if isinstance(image, Tensor):
            (image,) = to_host([image], "image")
        if not is_first():
            return
        write = self.writer().add_images if "N" in dataformats else self.writer().add_image
        write(tag, image, self._or_now(step), dataformats=dataformats)

    def add_text(self, tag: str, text: str, step: int | None = None) -> None:
        """Write a text, which TensorBoard takes for Markdown.

        Args:
            tag: The name that TensorBoard shows.
            text: The text.
            step: The step it belongs to (default: that of training).

        Source: `torch.utils.tensorboard.SummaryWriter.add_text`.
        """
        if is_first():
            self.writer().add_text(tag, text, self._or_now(step))

    def add_figure(self, tag: str, figure: Any, step: int | None = None) -> None:
        """Write a figure of matplotlib's as an image, and close it.

        Args:
            tag: The name that TensorBoard shows.
            figure: The figure.
            step: The step it belongs to (default: that of training).

        Source: `torch.utils.tensorboard.SummaryWriter.add_figure`.
        """
        if is_first():
            self.writer().add_figure(tag, figure, self._or_now(step))
            return
        from matplotlib import pyplot

        for one in figure if isinstance(figure, list) else [figure]:
            pyplot.close(one)

    def state_dict(self) -> dict[str, Any]:
        """The training steps that the logs are of. Their points are on the disk before the checkpoint is."""
        with suppress(OSError):  # they stay in memory, and the epoch's end says why
            self._files.write()
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after a checkpoint: later points are taken out of the files, once the epoch is known.

        So no step is there twice, whatever had been written when the earlier process was killed. A point with a step of
        your own, given to `add_image` and the like, counts as one of training's.

        Args:
            state: The dict that `state_dict` returned.
        """
        self._steps_before = state["steps"]
        self._described = False
        if self._begun is not None:
            self._begun = self.model.steps_taken
        if self._epoch is None:
            self._rewinds = True
        else:
            self._begin(self._epoch, rewinds=True, within=True)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """From now on an evaluation is a validation. A wrong `embeddings_metadata` is found before the first step."""
        if self.embeddings_freq:
            metadata_files(self.embeddings_metadata, embedding_layers(self.model.module), self._files.folder)
        self._begun = self.model.steps_taken
        self._profile.look(self.steps, None, self._files.folder)

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Close the files."""
        self._profile.stop()
        self._steps_before = self.steps
        self._begun = None
        self._epoch = None
        self._close()

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Start the clock; after `load_state_dict`, take the files back to here."""
        rewinds = self._rewinds
        self._rewinds = False
        self._epoch = epoch
        self._begin(epoch, rewinds)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Write the running means, if it is time to."""
        steps = self.steps
        self._profile.look(steps, logs, self._files.folder)
        if self._every and self._speed.passed_multiple("batch", self._every, steps):
            values = self._rate() | scalars(logs)
            if self.write_steps_per_second:
                values["steps_per_second"] = self._speed.steps_per_second("batch", steps)
            self._write("train", "batch_{}", values, steps)
            self._speed.mark("batch", steps)

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Stop the clock: a validation is no training."""
        self._speed.pause()

    def on_test_end(self, logs: Logs | None = None) -> None:
        """Write the evaluation by training steps."""
        self._write("validation", "evaluation_{}_vs_iterations", scalars(logs), self.steps)
        self._speed.go_on()
        if self._begun is None:
            self._close()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Write the epoch."""
        values = scalars(logs)
        self._epoch = None
        train = self._rate() | {name: value for name, value in values.items() if not name.startswith("val_")}
        validation = {name.removeprefix("val_"): value for name, value in values.items() if name.startswith("val_")}
        if self.model.input_bound is not None:
            train["input_bound"] = self.model.input_bound
        pace = self._speed.steps_per_second("epoch", self.steps)
        train |= self.model.speed(pace)
        if self.model.memory_used is not None:
            train["memory_used"] = self.model.memory_used
        if self.write_steps_per_second:
            train["steps_per_second"] = pace
        self._write("train", "epoch_{}", train, epoch)
        self._write("validation", "epoch_{}", validation, epoch)
        if not self._described:
            self._described = True
            self._describe()
        with self._failed.tolerated(self.log_dir):
            self._write_weights(epoch)
            self._files.flush()  # so that a TensorBoard that is open shows the epoch now

    def _close(self) -> None:
        with self._failed.tolerated(self.log_dir):
            self._files.close()

    def _rate(self) -> dict[str, float]:
        """The rate, for logs that don't have it: a schedule before this callback may have set the next one already."""
        return {} if self.model.optimizer is None else {"learning_rate": self.model.learning_rate}

    def _begin(self, epoch: int, rewinds: bool, within: bool = False) -> None:
        steps = self.steps
        if rewinds:
            self._rewind(epoch, within)
        self._speed.mark("epoch", steps)
        self._speed.mark("batch", steps)

    def _write(self, run: str, tag: str, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer(run).add_scalar(tag.format(name), value, step)

    def _describe(self) -> None:
        """Write the summary and the hyperparameters, once: before an epoch has ended, no layer's output is known."""
        if self.write_graph:
            # Indented by four, text is code in Markdown, and keeps its columns.
            self.model.summary(lambda text: self.add_text("summary", indent(text, "    "), 0))
        if self.hparams:
            from torch.utils.tensorboard.summary import hparams

            _, *session = hparams(self.hparams, {})  # without a list of metrics TensorBoard shows all there are
            for part in session:
                self.writer(".").file_writer.add_summary(part)

    def _write_weights(self, epoch: int) -> None:
        """Write embeddings and histograms, if it is time to."""
        embeddings, histograms = (f and epoch % f == 0 for f in (self.embeddings_freq, self.histogram_freq))
        weights = self.model.state_dict() if embeddings or histograms else {}
        layers = embedding_layers(self.model.module) if embeddings else {}
        if layers:  # before the run's first event: the projector looks at a run once
            files = metadata_files(self.embeddings_metadata, layers, self._files.folder)
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

    def _rewind(self, epoch: int, within: bool) -> None:
        steps = self.steps

        def keep(tag: str, step: int) -> bool:
            if tag.startswith(_SAID_ONCE):
                return False
            if tag.startswith(_BY_EPOCH):
                return step < epoch
            # In the middle of an epoch its validation is still to come, also if it is due right now.
            again = within and tag.startswith("evaluation_")
            return step < steps if again else step <= steps

        self._files.rewind(keep)

    def _or_now(self, step: int | None) -> int:
        return self.steps if step is None else step


class _Speed:
    """The speed of training, without validations."""

    def __init__(self) -> None:
        # The steps and the time at which an epoch, and the batches since the last point, began.
        self._marks = {"epoch": (0, 0.0), "batch": (0, 0.0)}
        self._paused = 0.0

    def mark(self, name: str, steps: int) -> None:
        """Measure the speed from here."""
        self._marks[name] = (steps, time.perf_counter())

    def pause(self) -> None:
        """A validation begins."""
        self._paused = time.perf_counter()

    def go_on(self) -> None:
        """Leave the validation's time out."""
        took = time.perf_counter() - self._paused
        self._marks = {name: (steps, began + took) for name, (steps, began) in self._marks.items()}

    def passed_multiple(self, name: str, every: int, steps: int) -> bool:
        """True if a multiple of `every` steps was reached since a mark."""
        return steps // every > self._marks[name][0] // every

    def steps_per_second(self, name: str, steps: int) -> float:
        """The speed since a mark."""
        before, began = self._marks[name]
        return (steps - before) / max(time.perf_counter() - began, 1e-9)


class _Profile:
    """A profile of some training steps.

    Args:
        profile_batch: See `TensorBoard`.

    Raises:
        ArgumentError: `profile_batch` is neither 0, nor a step, nor a first and a last step.
    """

    def __init__(self, profile_batch: int | Sequence[int]) -> None:
        pair = tuple(profile_batch) if isinstance(profile_batch, Sequence) else (profile_batch, profile_batch)
        whole = len(pair) == 2 and all(isinstance(step, int) and not isinstance(step, bool) for step in pair)
        if not whole or (not 1 <= pair[0] <= pair[1] and profile_batch != 0):
            raise ArgumentError(
                f"profile_batch must be a step from 1, or the first and the last of several, e.g. (10, 12), got "
                f"{profile_batch!r}"
            )
        self._due = pair if profile_batch else None
        self._runs = False

    def look(self, steps: int, logs: Logs | None, folder: str) -> None:
        """Begin before the first of the steps, and end after the last. To read logs is to wait for the device."""
        if self._due is None:
            return
        first, last = self._due
        if not self._runs and first - 1 <= steps < last:
            scalars(logs)  # else steps that were started before would be in the profile too
            start_profile(os.path.join(folder, "train"))
            self._runs = True
        elif self._runs and steps >= last:
            scalars(logs)  # else the profile would end before the device has done the last step
            self.stop()

    def stop(self) -> None:
        """End the profile, if one is under way."""
        if self._runs:
            self._runs = False
            self._due = None
            stop_profile()
