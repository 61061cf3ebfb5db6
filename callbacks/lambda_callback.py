"""`LambdaCallback`: a callback made of functions."""

from collections.abc import Callable
from typing import Any

from ..errors import ArgumentError, UnknownNameError
from .base import Callback

_Hook = Callable[..., object]


class LambdaCallback(Callback):
    """A callback made of functions, where a class would be too much.

    Args:
        on_epoch_begin: Called with the arguments of the hook of that name: `(epoch, logs)`. Likewise for the other
            arguments. None (default) costs nothing.
        on_epoch_end: `(epoch, logs)`.
        on_train_begin: `(logs)`.
        on_train_end: `(logs)`.
        on_train_batch_begin: `(batch, logs)`.
        on_train_batch_end: `(batch, logs)`.
        kwargs: Any other hook of `Callback` by its name, and any other attribute, such as `reads_weights=False`.

    Raises:
        UnknownNameError: A name that begins with `on_` and isn't a hook.
        ArgumentError: A hook isn't a function.

    Example:
        >>> printing = LambdaCallback(on_epoch_end=lambda epoch, logs: print(epoch, logs["loss"]))
        >>> printing.on_epoch_end(0, {"loss": 0.5})
        0 0.5

    Source: `keras.callbacks.LambdaCallback`.
    """

    def __init__(
        self,
        on_epoch_begin: _Hook | None = None,
        on_epoch_end: _Hook | None = None,
        on_train_begin: _Hook | None = None,
        on_train_end: _Hook | None = None,
        on_train_batch_begin: _Hook | None = None,
        on_train_batch_end: _Hook | None = None,
        **kwargs: Any,
    ) -> None:
        hooks = {
            "on_epoch_begin": on_epoch_begin,
            "on_epoch_end": on_epoch_end,
            "on_train_begin": on_train_begin,
            "on_train_end": on_train_end,
            "on_train_batch_begin": on_train_batch_begin,
            "on_train_batch_end": on_train_batch_end,
        }
        for name, value in (hooks | kwargs).items():
            if not name.startswith("on_"):
                setattr(self, name, value)
                continue
            if not hasattr(Callback, name):
                raise UnknownNameError("hook", name, [hook for hook in dir(Callback) if hook.startswith("on_")])
            if value is not None and not callable(value):
                raise ArgumentError(f"{name} must be a function, got {value!r}")
            if value is not None:
                setattr(self, name, value)
