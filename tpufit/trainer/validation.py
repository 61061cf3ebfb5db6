"""When `fit` validates, as `validation_step_freq` says (Lightning's `val_check_interval`), and what runs it."""

from collections.abc import Container
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from ..callbacks.callback_list import CallbackList
from ..data import Stream
from ..errors import ArgumentError, BatchError, say_count
from ..step import Engine, find_fault
from ..utils.random import RNGState
from .interruption import Interruption
from .passes import evaluate


@dataclass(frozen=True)
class Validation:
    """The validation data, and when to validate."""

    stream: Stream
    due: int | Container[int]  # the epochs, from 1, that end with a validation; or n for every n-th epoch
    every: int | None = None  # steps between two validations inside an epoch; None: no validation inside

    def is_due(self, epoch: int) -> bool:
        """True if an epoch (from 0) ends with a validation."""
        return (epoch + 1) % self.due == 0 if isinstance(self.due, int) else epoch + 1 in self.due


def steps_between_validations(freq: int | float, steps: int | None) -> int:
    """Return the number of steps between two validations inside an epoch; a float `freq` is a share of the epoch.

    Raises:
        ArgumentError: The number is never reached, or the share can't be computed.
    """
    if isinstance(freq, float):
        if steps is None:
            raise ArgumentError(
                f"validation_step_freq={freq}: the number of batches is unknown, so give a number of steps, not a share"
            )
        return max(1, round(freq * steps))
    if steps is not None and freq > steps:
        raise ArgumentError(
            f"validation_step_freq={freq} is never reached: an epoch has {say_count(steps, 'step')}. Use "
            "validation_freq to validate at the end of every n-th epoch"
        )
    return freq


def check_first(engine: Engine, held_out: Stream, train: Stream) -> None:
    """Check before the first epoch that the first batch of the validation data fits the model.

    Data that can be read only once, such as an iterator, aren't checked. An error that the training data also cause
    isn't raised here, because the training will raise it.

    Raises:
        TpufitError: The error that the validation would raise, with `validation_data` in its message.
    """
    batch = held_out.read_first()
    fault = None if batch is None else find_fault(engine, batch, held_out.device_transform)
    if fault is None:
        return
    other = train.read_first()
    # A module that can't be tried fails on any data. Without a training batch to compare with, a `BatchError` may come
    # from such a module, so it is ignored.
    both_fail = isinstance(fault, BatchError) if other is None else find_fault(engine, other, train.device_transform)
    if not both_fail:
        raise type(fault)(f"validation_data: {fault}") from fault


def rehearse(engine: Engine, validation: Validation | None, prints: bool) -> None:
    """Validate over a few batches before training, without callbacks, and undo it; with `prints`, print the logs.

    **This waits** for the device, and copies the whole state to the host and back.
    """
    assert validation is not None  # `ValidationData.with_limit_of` checks this
    data = validation.stream
    data.track_objects()
    position = data.state_dict(None)
    try:
        with engine.trial("eval"):
            logs = evaluate(engine, data, CallbackList())
    finally:
        data.load_state_dict(position)
    if prints:
        batches = say_count(engine.log.passes[-1].steps, "batch")
        values = ", ".join(f"val_{name} {value:.4g}" for name, value in logs.items() if isinstance(value, float))
        print(f"sanity check over {batches}: {values}", flush=True)


_NOT_YET: dict[str, Any] = {"batches": 0, "logs": {}}


class Validations:
    """Runs the validations of all epochs.

    A validation that is interrupted by a signal counts as not started: a resumed run repeats it.
    """

    def __init__(
        self, engine: Engine, validation: Validation, callbacks: CallbackList, interruption: Interruption
    ) -> None:
        self._engine = engine
        self._validation = validation
        self._callbacks = callbacks
        self._interruption = interruption
        # The epoch's last validation: its logs, and the number of the epoch's batches before it.
        self.last: dict[str, Any] = _NOT_YET

    def is_due_inside(self, batches: int) -> bool:
        """True if a validation is due after a number of the epoch's batches; a group may add several at once."""
        every = self._validation.every
        return every is not None and self.last["batches"] // every < batches // every

    def run(self, batches: int) -> float:
        """Validate after a number of the epoch's batches, and return the seconds that this took."""
        began = perf_counter()
        data = self._validation.stream
        random = RNGState.now()
        position = data.state_dict(None)
        logs = evaluate(self._engine, data, self._callbacks, self._interruption)
        if self._interruption.wanted:  # a resumed run repeats the validation from the same state
            data.load_state_dict(position)
            random.restore()
        else:
            self.last = {"batches": batches, "logs": {f"val_{name}": value for name, value in logs.items()}}
        return perf_counter() - began

    def close(self, epoch: int, batches: int) -> dict[str, Any]:
        """Validate if due at the end of the epoch, and return the logs of its last validation; empty without one."""
        if self._validation.is_due(epoch) and self.last["batches"] != batches:
            self.run(batches)
        logs = self.last["logs"]
        self.last = _NOT_YET
        return dict(logs)
