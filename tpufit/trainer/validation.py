"""`Validations`: runs the validations of a `fit`."""

from time import perf_counter
from typing import Any

from ..callbacks.callback_list import CallbackList
from ..data import Stream
from ..errors import BatchError
from ..step import Engine, fault_of
from ..utils.random import RNGState
from .arguments import Validation
from .interruption import Interruption
from .passes import evaluate


def check_first(engine: Engine, held_out: Stream, train: Stream) -> None:
    """Refuse validation data whose first batch is no batch for the model, before the first epoch.

    Data that only a pass can read, such as an iterator, are left alone. An error that the training data have too is
    theirs.

    Raises:
        TpufitError: The error that the validation would raise, with the data's name.
    """
    batch = held_out.first()
    fault = None if batch is None else fault_of(engine, batch, held_out.device_transform)
    if fault is None:
        return
    other = train.first()
    # A module that can't be tried fails on any data; if these can't be looked at, shapes prove nothing.
    of_both = isinstance(fault, BatchError) if other is None else fault_of(engine, other, train.device_transform)
    if not of_both:
        raise type(fault)(f"validation_data: {fault}") from fault


_NOT_YET: dict[str, Any] = {"batches": 0, "logs": {}}


class Validations:
    """Runs the validations of one epoch after another.

    A signal breaks a validation off; it then counts as never begun.
    """

    def __init__(
        self, engine: Engine, validation: Validation, callbacks: CallbackList, interruption: Interruption
    ) -> None:
        self._engine = engine
        self._validation = validation
        self._callbacks = callbacks
        self._interruption = interruption
        # The epoch's last validation: the number of the epoch's batches before it, and its logs.
        self.last: dict[str, Any] = _NOT_YET
        self._seconds = 0.0

    def is_due_inside(self, batches: int) -> bool:
        """True if a validation is due after so many of the epoch's batches; several may have come at once."""
        every = self._validation.every
        return every is not None and self.last["batches"] // every < batches // every

    def run(self, batches: int) -> None:
        """Validate, after so many batches of the epoch."""
        began = perf_counter()
        data = self._validation.stream
        draws = RNGState.now()
        place = data.state_dict(None)
        logs = evaluate(self._engine, data, self._callbacks, self._interruption)
        if self._interruption.wanted:  # what it has drawn and counted is drawn and counted again
            data.load_state_dict(place)
            draws.restore()
        else:
            self.last = {"batches": batches, "logs": {f"val_{name}": value for name, value in logs.items()}}
        self._seconds += perf_counter() - began

    def take_seconds(self) -> float:
        """Return the time of the validations inside the epoch, in seconds, and begin at 0 again."""
        seconds = self._seconds
        self._seconds = 0.0
        return seconds

    def close(self, epoch: int, batches: int) -> dict[str, Any]:
        """Validate if that is due, and return the logs of the epoch's last validation; empty if there was none."""
        if self._validation.is_due(epoch) and self.last["batches"] != batches:
            self.run(batches)
        logs = self.last["logs"]
        self.last = _NOT_YET
        self._seconds = 0.0
        return dict(logs)
