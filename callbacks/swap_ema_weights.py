"""`SwapEMAWeights`: validation and prediction with the moving average of the weights."""

from .base import Callback, Logs


class SwapEMAWeights(Callback):
    """Puts the moving average of the weights (`compile(use_ema=True)`) in their place where they are judged.

    That is while `evaluate`, a validation or `predict` runs. Nothing is copied: the two change places.

    Args:
        swap_on_epoch: Leave the averages in place when an epoch ends too, so that callbacks which save weights save
            them (default False): put those after this one. Training goes on with the weights themselves.

    Raises:
        ArgumentError: No averages are kept; raised at the first use.

    Source: `keras.callbacks.SwapEMAWeights`.
    """

    reads_weights = False

    def __init__(self, swap_on_epoch: bool = False) -> None:
        self.swap_on_epoch = swap_on_epoch

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Train the weights themselves."""
        self.model.swap_ema_weights(False)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Leave the averages in place, if that is wanted."""
        if self.swap_on_epoch:
            self.model.swap_ema_weights(True)

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Evaluate the averages."""
        self.model.swap_ema_weights(True)

    def on_test_end(self, logs: Logs | None = None) -> None:
        """Go back to the weights themselves."""
        self.model.swap_ema_weights(False)

    def on_predict_begin(self, logs: Logs | None = None) -> None:
        """Predict with the averages."""
        self.model.swap_ema_weights(True)

    def on_predict_end(self, logs: Logs | None = None) -> None:
        """Go back to the weights themselves."""
        self.model.swap_ema_weights(False)
