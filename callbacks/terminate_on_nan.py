"""`TerminateOnNaN`: ends training when a loss is not a finite number."""

from ..utils.terminal import say
from .base import Callback, Logs


class TerminateOnNaN(Callback):
    """Ends training when a step returns a loss, or another scalar, that is NaN or infinite, and says which step it was.

    It costs nothing: the device notes the step, and this is read where something waits for the device anyway. Training
    ends at most 64 graphs (as many steps, or k times as many with `steps_per_execution=k`) after that step, mostly
    within a tenth of a second, and never after the end of its epoch. The weights are then those of the later step:
    go on from a checkpoint.

    Args:
        raise_error: End it with an error, a `CallbackError`, instead of `stop_training` (default False).

    Raises:
        RuntimeError: With `raise_error`, at such a step.

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
        """Look at the steps that the device is known to have done, without waiting."""
        self._look()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Look at the whole epoch, which has been waited for."""
        if not self.model.stop_training:
            self._look()

    def _look(self) -> None:
        step = self.model.first_bad_step
        if step is not None:
            message = f"step {step} returned a loss that is not finite"
            if self.raise_error:
                raise RuntimeError(message)
            say(f"{message}: training ends")
            self.model.stop_training = True
