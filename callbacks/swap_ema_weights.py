"""`SwapEMAWeights`: validates and predicts with the moving average of the weights."""

from collections.abc import Sequence
from typing import Any

from ..utils.user_code import warn
from .base import Callback, Logs


class SwapEMAWeights(Callback):
    """Replaces the weights by their moving average (`compile(use_ema=True)`) for evaluation and prediction.

    The average is in place while `evaluate`, a validation or `predict` runs. The two are swapped, not copied.

    Args:
        swap_on_epoch: Keep the averages in place when an epoch ends, too, so that callbacks after this one save them,
            or restore them, as `EarlyStopping` does (default False). The next epoch trains the weights themselves.

    Raises:
        ArgumentError: There are no averages; raised at the first use.

    Example:
        >>> import torch, tpufit
        >>> model = tpufit.Model(torch.nn.Linear(1, 1))
        >>> model.compile("sgd", "mse", use_ema=True)
        >>> x = torch.ones(8, 1)
        >>> history = model.fit(x, x, validation_data=(x, x), verbose=0, callbacks=[SwapEMAWeights()])
        >>> sorted(history.history)  # val_loss is the averaged weights' loss
        ['loss', 'val_loss']

    Source: `keras.callbacks.SwapEMAWeights`.
    """

    reads_weights = False

    def __init__(self, swap_on_epoch: bool = False) -> None:
        self.swap_on_epoch = swap_on_epoch
        self._misled: list[str] = []  # callbacks that keep an epoch's weights, but rate it by its averages

    def set_callbacks(self, callbacks: Sequence[Any]) -> None:
        """Find the callbacks that choose an epoch by the averages, but would restore its trained weights."""
        later = callbacks[callbacks.index(self) :] if self.swap_on_epoch else ()
        self._misled = [
            type(callback).__name__
            for callback in callbacks
            if getattr(callback, "restore_best_weights", False)
            and str(getattr(callback, "monitor", "")).startswith("val_")
            and callback not in later
        ]

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Warn about callbacks that keep an epoch's weights, but rate the epoch by its averages."""
        for name in self._misled:
            warn(
                f"{name}(restore_best_weights=True) chooses the best epoch by the averaged weights' validation, but "
                f"restores the trained weights: pass SwapEMAWeights(swap_on_epoch=True) before {name}, which then "
                "restores the averaged weights"
            )

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Train the weights themselves."""
        self.model.swap_ema_weights(False)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Put the averages in place, with `swap_on_epoch`."""
        if self.swap_on_epoch:
            self.model.swap_ema_weights(True)

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Evaluate the averages."""
        self.model.swap_ema_weights(True)

    def on_test_end(self, logs: Logs | None = None) -> None:
        """Put the weights back."""
        self.model.swap_ema_weights(False)

    def on_predict_begin(self, logs: Logs | None = None) -> None:
        """Predict with the averages."""
        self.model.swap_ema_weights(True)

    def on_predict_end(self, logs: Logs | None = None) -> None:
        """Put the weights back."""
        self.model.swap_ema_weights(False)
