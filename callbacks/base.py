"""`Callback`, and `TrainedModel`: the part of the model that a callback may touch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from ..checkpoint import AsyncCheckpointWriter, Score
    from ..diagnostics.report import Report

# Logs by name. A batch's logs are lazy: reading a value waits for the device, once for all values.
Logs = Mapping[str, Any]


class TrainedModel(Protocol):
    """The part of the model that a callback may touch. `tpufit.Model` has all of it, and more.

    Attributes:
        stop_training: Set it to True to end training after the current batch.
        out_of_time: True if the last `fit` ended because its `max_time` was over.
        optimizer: The optimizer.
        learning_rate: The actual learning rate, readable and settable; the first group's, if there are several.
        input_bound: The share of time in which the device waited for data, from 0 to 1, in the current epoch or,
            between two epochs, in the previous one.
        first_bad_step: The first training step known to have returned a scalar that is not finite.
        steps_taken: The number of training steps since the model was created.
        rows_seen: The number of rows trained on, evaluated or predicted since the model was created.
    """

    stop_training: bool
    out_of_time: bool
    optimizer: torch.optim.Optimizer | None
    learning_rate: float
    input_bound: float | None

    @property
    def module(self) -> nn.Module:
        """The user's own module."""

    def state_dict(self) -> dict[str, Tensor]:
        """The weights as host copies. This waits for the device, once."""

    def load_state_dict(self, state: Mapping[str, Tensor], /) -> None:
        """Put weights into the module, wherever it is."""

    @property
    def metrics_names(self) -> list[str]:
        """The names of the logs that `compile` requests."""

    @property
    def first_bad_step(self) -> int | None:
        """See the class."""

    @property
    def memory_used(self) -> int | None:
        """The bytes of a core's memory that are in use, or None where the runtime doesn't report it."""

    def speed(self, steps_per_second: float, /) -> dict[str, float]:
        """Convert a training speed to `tokens_per_second` and `share_of_peak`, where they are known."""

    @property
    def steps_taken(self) -> int:
        """See the class."""

    @property
    def rows_seen(self) -> int:
        """See the class."""

    def summary(self, print_fn: Callable[[str], object] | None = None, /) -> None:
        """Pass the table of layers to a function."""

    def save_weights(self, filepath: str | os.PathLike[str], /, *, finite_only: bool = False) -> None:
        """Write the weights to a `.safetensors` file, atomically; `finite_only` refuses NaN and infinity."""

    def save_checkpoint(self, writer: AsyncCheckpointWriter, metric: Score | None = None, /) -> None:
        """Request a checkpoint of the whole training. It is taken after all callbacks have run."""

    def swap_ema_weights(self, to: bool | None = None, /) -> None:
        """Swap the weights and their moving averages."""

    def higher_is_better(self, name: str, /) -> bool | None:
        """True if a higher value of a log is better, False if a lower one is, None if its metric doesn't say."""

    def report(self, verbose: bool = False) -> Report:
        """The graphs, waits and times of the steps since `fit` began, and their problems."""


class Callback:
    """Runs your code at fixed points of `fit`, `evaluate` and `predict`: subclass it and override what you need.

    A hook that isn't overridden costs nothing. A batch's logs are the running means since the epoch's start; they stay
    on the device until you read a value, which waits for the device. An epoch's logs are plain floats.

    Attributes:
        model: The model, set when `fit`, `evaluate` or `predict` starts; None before.
        params: None before, then `"epochs"`, `"steps"` (batches per epoch, None if unknown) and `"verbose"` (0, 1 or
            2). `fit` adds `"updates"` and `"total_steps"` (the optimizer's steps per epoch and in total, None if
            unknown), `"max_steps"`, and `"validates"` (True if an epoch will validate).
        reads_weights: True (default) puts the weights back into the module before each hook of the callback. Set it to
            False to save that time, if the callback doesn't touch the module, or only uses the model's methods
            (`state_dict`, `save_weights`, ...) and the optimizer.
        measures_time: True measures the host's time of steps and callbacks for `model.report()` (default False).
        checkpoint_writer: The writer of the callback's run directory, passed to `model.save_checkpoint`. `fit` resumes
            from the checkpoints there, and writes a last checkpoint before a signal ends it. Default: None.
        only_writes: True for a callback that only writes files or lines and doesn't affect training: on a pod its hooks
            run on process 0 only (default False: on every host).
        always_resumes: True makes every `fit` resume from the newest checkpoint, as with `resume=True` (default False).
        loads_before_train_begin: True calls `load_state_dict` before `on_train_begin` (default False: after it), for a
            callback that continues something outside this process.
        save_on_exception: True makes `fit` write a checkpoint after an error between two steps, too (default False).

    Example:
        >>> class Losses(Callback):
        ...     def on_epoch_end(self, epoch, logs=None):
        ...         print(f"epoch {epoch}: {logs['loss']}")
        >>> Losses().on_epoch_end(0, {"loss": 0.5})
        epoch 0: 0.5

    Source: `keras.callbacks.Callback`.
    """

    model: TrainedModel = None  # type: ignore[assignment] # so that hooks need no None check
    params: dict[str, Any] = None  # type: ignore[assignment]
    reads_weights: bool = True
    measures_time: bool = False
    checkpoint_writer: AsyncCheckpointWriter | None = None
    only_writes: bool = False
    always_resumes: bool = False
    loads_before_train_begin: bool = False
    save_on_exception: bool = False

    def set_params(self, params: dict[str, Any]) -> None:
        """Receive the run's parameters, before its first hook.

        Args:
            params: See the class; one dict for all callbacks.
        """
        self.params = params

    def set_model(self, model: TrainedModel) -> None:
        """Receive the model, before the first hook.

        Args:
            model: The model that is about to be trained or used.
        """
        self.model = model

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """`fit` begins.

        Args:
            logs: Empty.
        """

    def on_train_end(self, logs: Logs | None = None) -> None:
        """`fit` ends, even if it was stopped or an error was raised.

        After an error, Ctrl-C or SIGTERM it follows `on_exception`, and all checkpoints have been written. Keras
        doesn't call it in that case.

        Args:
            logs: The last epoch's; empty after an error, Ctrl-C or SIGTERM.
        """

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """An epoch of training begins.

        Args:
            epoch: The epoch's number, from 0.
            logs: Empty.
        """

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """An epoch of training and its validation end.

        Args:
            epoch: The epoch's number, from 0.
            logs: The means over the epoch, and the validation's with the prefix `val_`.
        """

    def on_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """An alias of `on_train_batch_begin`.

        Args:
            batch: See there.
            logs: See there.
        """

    def on_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """An alias of `on_train_batch_end`.

        Args:
            batch: See there.
            logs: See there.
        """

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """A training step is about to start.

        Args:
            batch: The batch's number in the epoch, from 0.
            logs: Empty.
        """
        self.on_batch_begin(batch, logs)

    def on_train_step_begin(self, batch: int, logs: Logs | None = None) -> None:
        """A training step is about to start: the place to set its learning rate.

        With `steps_per_execution=k` the batch hooks run once for k steps, and this hook k times, right after
        `on_train_batch_begin`, so each step has its rate. Keras has no such hook.

        Args:
            batch: The batch's number in the epoch, from 0.
            logs: `"iterations"`: the number of optimizer steps before this one. With `accumulate_steps=n` it is the
                same for n batches.
        """

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """A training step has been started; the device may still be running it.

        Args:
            batch: The batch's number in the epoch, from 0.
            logs: The running means of the epoch; reading a value waits for the device.
        """
        self.on_batch_end(batch, logs)

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """`evaluate`, or a validation inside `fit`, begins.

        Args:
            logs: Empty.
        """

    def on_test_end(self, logs: Logs | None = None) -> None:
        """`evaluate`, or a validation inside `fit`, ends.

        Args:
            logs: The means over the data; empty if `evaluate` raised an error.
        """

    def on_test_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """A batch is about to be evaluated.

        Args:
            batch: The batch's number, from 0.
            logs: Empty.
        """

    def on_test_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """The evaluation of a batch has been started.

        Args:
            batch: The batch's number, from 0.
            logs: The running means; reading a value waits for the device.
        """

    def on_predict_begin(self, logs: Logs | None = None) -> None:
        """`predict` begins.

        Args:
            logs: Empty.
        """

    def on_predict_end(self, logs: Logs | None = None) -> None:
        """`predict` ends.

        Args:
            logs: Empty.
        """

    def on_predict_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """A batch is about to be predicted.

        Args:
            batch: The batch's number, from 0.
            logs: Empty.
        """

    def on_predict_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """The prediction of a batch has been started. It runs for every batch, even with `steps_per_execution=k`.

        Args:
            batch: The batch's number, from 0.
            logs: `"outputs"`: the module's outputs, still on the device.
        """

    def on_save(self, step: int, logs: Logs | None = None) -> None:
        """A checkpoint of the whole training has been written; training may have taken more steps by then.

        Args:
            step: The number of training steps at the checkpoint.
            logs: `"path"`: the checkpoint's folder.
        """

    def on_exception(self, exception: BaseException, logs: Logs | None = None) -> None:
        """An exception ends `fit`, `evaluate` or `predict`; the end hook follows.

        Args:
            exception: The cause: an error, `KeyboardInterrupt`, or after SIGTERM `SystemExit`.
            logs: Empty.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed `fit` needs: counters, the best value so far. Called between two steps.

        If a class doesn't override this method, the attributes that change after `on_train_begin` are saved.

        Returns:
            Numbers, strings, tensors and arrays, in lists and dicts (default: an empty dict, for which
            `load_state_dict` isn't called).
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state: called after `on_train_begin`, and in the middle of an epoch after `on_epoch_begin`.

        With `loads_before_train_begin` it is called before both.

        Args:
            state: The dict that `state_dict` returned; tuples have become lists.
        """


class RateCallback(Callback):
    """A callback that sets the learning rate, and like Keras's adds the epoch's rate to the epoch's logs.

    In `fit` the rate is in the logs before any callback gets them, so the order of callbacks doesn't matter.

    Attributes:
        sets_each_step: True if it sets every step's rate, whatever the rate was before; `fit` accepts only one such
            callback.
    """

    reads_weights = False
    sets_each_step = False

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Add `learning_rate` to the logs; a subclass that sets the next epoch's rate does so afterwards."""
        if logs is not None:
            cast("dict[str, Any]", logs).setdefault("learning_rate", self.model.learning_rate)
