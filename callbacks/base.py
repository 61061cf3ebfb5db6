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

# Logs by name. Those of a batch are lazy: reading a value waits for the device, once for all of them.
Logs = Mapping[str, Any]


class TrainedModel(Protocol):
    """The part of the model that a callback may touch. `tpufit.Model` has all of it, and more.

    Attributes:
        stop_training: Set it to True to end training after the current batch.
        out_of_time: True if the last `fit` has ended because its `max_time` was over.
        optimizer: The optimizer.
        learning_rate: The actual learning rate, to be read and set; that of the first group, if there are several.
        input_bound: The share of time in which the device waited for data, from 0 to 1, in the epoch under way or, if
            there is none, in the last one.
        first_bad_step: The first training step known to have returned a scalar that is not finite.
        steps_taken: The number of training steps since the model was made.
        rows_seen: The number of rows that it has trained on, evaluated or predicted since it was made.
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
        """The names of the logs that `compile` asks for."""

    @property
    def first_bad_step(self) -> int | None:
        """See the class."""

    @property
    def memory_used(self) -> int | None:
        """The bytes of a core's memory that are in use, or None where the runtime doesn't tell."""

    def speed(self, steps_per_second: float, /) -> dict[str, float]:
        """What training steps at some pace come to: `tokens_per_second` and `share_of_peak`, if they are known."""

    @property
    def steps_taken(self) -> int:
        """See the class."""

    @property
    def rows_seen(self) -> int:
        """See the class."""

    def summary(self, print_fn: Callable[[str], object] | None = None, /) -> None:
        """Give the table of the layers to a function."""

    def save_weights(self, filepath: str | os.PathLike[str], /, *, finite_only: bool = False) -> None:
        """Write the weights to a `.safetensors` file, whole or not at all; only if they are finite, if asked to."""

    def save_checkpoint(self, writer: AsyncCheckpointWriter, metric: Score | None = None, /) -> None:
        """Ask for a checkpoint of the whole training. It is taken once all callbacks have had their turn."""

    def swap_ema_weights(self, to: bool | None = None, /) -> None:
        """Let the weights and their moving averages change places."""

    def higher_is_better(self, name: str, /) -> bool | None:
        """True if a log gets better as it rises, False if as it falls; None if its metric doesn't say."""

    def report(self, verbose: bool = False) -> Report:
        """The graphs, waits and times of the steps since `fit` began, and their problems."""


class Callback:
    """Runs your code at fixed points of `fit`, `evaluate` and `predict`: subclass it and override what you need.

    A hook that isn't overridden costs nothing. The logs of a batch are the running means since the epoch's start; they
    stay on the device until you read one, which waits for it. The logs of an epoch are plain floats.

    Attributes:
        model: The model, from the start of `fit`, `evaluate` or `predict` on; None before.
        params: None before, then `"epochs"`, `"steps"` (batches an epoch, None if unknown) and `"verbose"` (0, 1 or 2);
            in `fit` also the numbers of the optimizer's steps in an epoch, `"updates"`, and in all, `"total_steps"`
            (None if unknown), and `"max_steps"`; and `"validates"`, True if an epoch will validate.
        reads_weights: True (default) puts the weights back into the module before each of its hooks. A callback that
            leaves the module alone, or only uses the model's own methods (`state_dict`, `save_weights`, ...) and the
            optimizer, may say False, and save that time.
        measures_time: True measures the host's time of steps and callbacks for `model.report()` (default False).
        checkpoints: The writer of the run directory that the callback keeps, given to `model.save_checkpoint`. `fit`
            then finds checkpoints there to resume from, and writes a last one before a signal ends it. Default: None.
        only_writes: True for one that writes files or lines and does nothing to training: on a pod its hooks are called
            on process 0 only (default False: on every host).
        restores: True lets every `fit` go on from the newest of `checkpoints`, as with `resume=True` (default False).
        loads_first: True has `load_state_dict` called before `on_train_begin` (default False: after it), for one that
            goes on with something outside of this process.
        save_on_exception: True has `fit` write a checkpoint also after an error between two steps (default False).

    Example:
        >>> class Losses(Callback):
        ...     def on_epoch_end(self, epoch, logs=None):
        ...         print(f"epoch {epoch}: {logs['loss']}")
        >>> Losses().on_epoch_end(0, {"loss": 0.5})
        epoch 0: 0.5

    Source: `keras.callbacks.Callback`.
    """

    model: TrainedModel = None  # type: ignore[assignment] # so that a hook need not ask
    params: dict[str, Any] = None  # type: ignore[assignment]
    reads_weights: bool = True
    measures_time: bool = False
    checkpoints: AsyncCheckpointWriter | None = None
    only_writes: bool = False
    restores: bool = False
    loads_first: bool = False
    save_on_exception: bool = False

    def set_params(self, params: dict[str, Any]) -> None:
        """Take the parameters of the run, before its first hook.

        Args:
            params: See the class; one dict for all callbacks.
        """
        self.params = params

    def set_model(self, model: TrainedModel) -> None:
        """Take the model, before the first hook.

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
        """`fit` ends, also when it was stopped or something raised.

        Args:
            logs: The last epoch's; empty after an error.
        """

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """An epoch of training begins.

        Args:
            epoch: The epoch's number, from 0.
            logs: Empty.
        """

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """An epoch of training and its validation are over.

        Args:
            epoch: The epoch's number, from 0.
            logs: The means over the epoch, and those of validation with `val_` before their names.
        """

    def on_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Another name of `on_train_batch_begin`.

        Args:
            batch: See there.
            logs: See there.
        """

    def on_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Another name of `on_train_batch_end`.

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
        """A training step is about to start: the place for a rate of its own.

        With `steps_per_execution=k` the batch hooks come once for k steps, and this one k times, right after
        `on_train_batch_begin`: each of the steps then has the rate that was set for it. Keras has no such hook.

        Args:
            batch: The batch's number in the epoch, from 0.
            logs: `"iterations"`: the number of steps that the optimizer has taken before this one. With
                `accumulate_steps=n` it is the same for n batches.
        """

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """A training step has been started; the device may still be at it.

        Args:
            batch: The batch's number in the epoch, from 0.
            logs: The running means of the epoch; reading one waits for the device.
        """
        self.on_batch_end(batch, logs)

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """`evaluate`, or a validation inside `fit`, begins.

        Args:
            logs: Empty.
        """

    def on_test_end(self, logs: Logs | None = None) -> None:
        """`evaluate`, or a validation inside `fit`, is over.

        Args:
            logs: The means over the data; empty if `evaluate` broke off with an error.
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
            logs: The running means; reading one waits for the device.
        """

    def on_predict_begin(self, logs: Logs | None = None) -> None:
        """`predict` begins.

        Args:
            logs: Empty.
        """

    def on_predict_end(self, logs: Logs | None = None) -> None:
        """`predict` is over.

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
        """The prediction of a batch has been started. It comes for every batch, with `steps_per_execution=k` too.

        Args:
            batch: The batch's number, from 0.
            logs: `"outputs"`: the module's outputs, still on the device.
        """

    def on_save(self, step: int, logs: Logs | None = None) -> None:
        """A checkpoint of the whole training has been written; training may be some steps further by now.

        Args:
            step: The number of training steps that it is of.
            logs: `"path"`: the checkpoint's folder.
        """

    def on_exception(self, exception: BaseException, logs: Logs | None = None) -> None:
        """`fit`, `evaluate` or `predict` breaks off; its end hook follows.

        Args:
            exception: The cause: an error, `KeyboardInterrupt`, or after SIGTERM `SystemExit`.
            logs: Empty.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed `fit` needs: counters, the best so far. It is asked for between two steps.

        A class that leaves this method alone has its attributes saved, as far as they change after `on_train_begin`.

        Returns:
            Numbers, strings, tensors and arrays, in lists and dicts; by default nothing. A callback that returns
            nothing gets no call of `load_state_dict`.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state: called after `on_train_begin`, and in the middle of an epoch after `on_epoch_begin`.

        With `loads_first` it is called before them.

        Args:
            state: The dict that `state_dict` returned; tuples have become lists.
        """


class RateCallback(Callback):
    """A callback that sets the learning rate. It adds the epoch's rate to the epoch's logs, as Keras's do.

    Attributes:
        sets_each_step: True if it gives each step a rate of its own, whatever it was: of these `fit` takes only one.
    """

    reads_weights = False
    sets_each_step = False

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Add `learning_rate` to the logs; a subclass that sets the next epoch's rate does so afterwards."""
        if logs is not None:
            cast("dict[str, Any]", logs)["learning_rate"] = self.model.learning_rate
