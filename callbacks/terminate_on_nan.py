"""`TerminateOnNaN`: ends training when a loss is NaN or infinite."""

from ..utils.terminal import say
from .base import Callback, Logs


class TerminateOnNaN(Callback):
    """Ends training when a step returns a loss, or another scalar, that is NaN or infinite, and names the step.

    It costs nothing: the device records the step, and the host reads it where it waits for the device anyway. Training
    ends at most 64 graphs (64 steps, or 64k with `steps_per_execution=k`) after that step, usually within a tenth of a
    second, and never after the end of its epoch. By then later steps have updated the weights, so resume from a
    checkpoint.

    Args:
        raise_error: Raise an error, which `fit` wraps in a `CallbackError`, instead of setting `stop_training` (default
            False).

    Raises:
        RuntimeError: With `raise_error`, if a scalar isn't finite.

    Example:
        >>> from types import SimpleNamespace
        >>> guard = TerminateOnNaN()
        >>> guard.set_model(SimpleNamespace(stop_training=False, first_bad_step=7))
        >>> guard.on_train_batch_end(9)
        step 7 returned a loss that is not finite: training ends
        >>> guard.model.stop_training
        True

    Source: `keras.callbacks.TerminateOnNaN`.
    """

    reads_weights = False

    def __init__(self, raise_error: bool = False) -> None:
        self.raise_error = raise_error

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Check the steps that the device is known to have finished, without waiting."""
        self._check()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Check the whole epoch, which the device has finished."""
        if not self.model.stop_training:
            self._check()

    def _check(self) -> None:
        step = self.model.first_bad_step
        if step is not None:
            message = f"step {step} returned a loss that is not finite"
            if self.raise_error:
                raise RuntimeError(message)
            say(f"{message}: training ends")
            self.model.stop_training = True
