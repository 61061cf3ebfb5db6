"""`CallbackList`: calls the hooks that callbacks override, and ends all callbacks when something raises."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ..errors import ArgumentError, CallbackError
from ..hosts import is_first
from ..step import warn_of_uncalled_hooks
from ..utils.counters import time_function
from ..utils.user_code import warn
from .base import Callback, RateCallback, TrainedModel
from .history import History
from .progbar_logger import ProgbarLogger

# The hooks that a loop calls, each with the number of arguments before `logs`.
_HOOKS = {
    "on_train_begin": 0,
    "on_train_end": 0,
    "on_epoch_begin": 1,
    "on_epoch_end": 1,
    "on_train_batch_begin": 1,
    "on_train_step_begin": 1,
    "on_train_batch_end": 1,
    "on_test_begin": 0,
    "on_test_end": 0,
    "on_test_batch_begin": 1,
    "on_test_batch_end": 1,
    "on_predict_begin": 0,
    "on_predict_end": 0,
    "on_predict_batch_begin": 1,
    "on_predict_batch_end": 1,
    "on_save": 1,
    "on_exception": 1,
}
_ALIASES = {"on_train_batch_begin": "on_batch_begin", "on_train_batch_end": "on_batch_end"}
_EACH_BATCH = {hook for hook in _HOOKS if "_batch_" in hook or "_step_" in hook}
_ENDS = {"on_train_begin": "on_train_end", "on_test_begin": "on_test_end", "on_predict_begin": "on_predict_end"}

_Hook = Callable[..., object]


class CallbackList(Callback):
    """Callbacks in order. Each is asked once which hooks it overrides, so the other hooks cost nothing.

    It has all hooks of `Callback` as methods, for your own training loop. `fit` accepts it in place of a list of
    callbacks, and then adds no progress bar.

    Args:
        callbacks: A callback, a list or tuple of callbacks, possibly nested, or None (default). A callback can be of
            any class that has at least one hook as a method.
        add_history: Add a `History` if there is none (default False).
        add_progbar: Add a `ProgbarLogger` if there is none (default False).
        model: The callbacks' `self.model` (default: set by `set_model`).
        params: The callbacks' `self.params`, one shared dict: `epochs=3, steps=10, verbose=1`.

    Attributes:
        callbacks: The callbacks, as a list.
        measures: True if a callback measures the host's time (`Callback.measures_time`).
        expose: Called before the hooks of callbacks that may read the weights (`Callback.reads_weights`).
        note_user_code: Called after a hook has run the user's code; with True if the hook runs at each batch.

    Raises:
        ArgumentError: An object is not a callback; raised before any callback's methods run.
        CallbackError: A callback's `set_params` or `set_model` raised an error.

    Example:
        >>> class Greeting(Callback):
        ...     def on_epoch_begin(self, epoch, logs=None):
        ...         print("epoch", epoch, "of", self.params["epochs"])
        >>> hooks = CallbackList([Greeting()], epochs=3)
        >>> hooks.has("on_epoch_begin"), hooks.has("on_train_batch_end")
        (True, False)
        >>> hooks.on_epoch_begin(0)
        epoch 0 of 3

    Source: `keras.callbacks.CallbackList`.
    """

    def __init__(
        self,
        callbacks: object = None,
        add_history: bool = False,
        add_progbar: bool = False,
        model: TrainedModel | None = None,
        **params: Any,
    ) -> None:
        self.callbacks = [] if callbacks is None else _flatten(callbacks)
        for callback in self.callbacks:
            _check(callback)
        for kind, wanted in ((History, add_history), (ProgbarLogger, add_progbar)):
            if wanted and not any(isinstance(callback, kind) for callback in self.callbacks):
                self.callbacks.append(kind())
        self.expose: Callable[[], None] = lambda: None
        self.note_user_code: Callable[[bool], None] = lambda every_batch: None
        self._pending_end_hook: str | None = None  # of the current training, evaluation or prediction
        self._failed: object = None
        self.set_params(params)
        self.set_model(model)

    def append(self, callback: object) -> None:
        """Add a callback at the end.

        Args:
            callback: The callback.

        Raises:
            ArgumentError: It is not a callback.
        """
        _check(callback)
        self.callbacks.append(callback)
        self._call_setter("set_params", self.params or None, callback)
        self._call_setter("set_model", self.model, callback)
        self._call_setter("set_callbacks", self.callbacks, *self.callbacks)
        self._listen()

    def set_params(self, params: dict[str, Any]) -> None:
        """Pass the run's parameters to all callbacks, if there are any."""
        self.params = params
        self._call_setter("set_params", params or None, *self.callbacks)

    def set_model(self, model: TrainedModel | None) -> None:
        """Pass each callback the model, if there is one, and the list of callbacks, if it has `set_callbacks`."""
        if model is not None:
            self.model = model
        self._call_setter("set_model", model, *self.callbacks)
        self._call_setter("set_callbacks", self.callbacks, *self.callbacks)
        self._listen()  # not before: a callback may choose its hooks in set_model

    def _call_setter(self, setter: str, value: object, *callbacks: object) -> None:
        for callback in callbacks if value is not None else ():
            if hasattr(callback, setter):
                self._run(callback, getattr(callback, setter), setter, value)

    def _listen(self) -> None:
        """Ask each callback which hooks it overrides."""
        active = [each for each in self.callbacks if is_first() or not getattr(each, "only_writes", False)]
        self._listeners: dict[str, list[tuple[object, _Hook]]] = {
            hook: [(each, method) for each in active if (method := _find_override(each, hook)) is not None]
            for hook in _HOOKS
        }
        self._hooks_of_readers = {
            hook
            for hook, listeners in self._listeners.items()
            if any(getattr(callback, "reads_weights", True) for callback, _ in listeners)
        }
        self._hooks_with_user_code = {
            hook
            for hook, listeners in self._listeners.items()
            if any(_may_run_user_code(callback) for callback, _ in listeners)
        }
        self._sets_rate = any(isinstance(callback, RateCallback) for callback in active)
        self.measures = any(getattr(callback, "measures_time", False) for callback in self.callbacks)
        if self.measures:
            self.call = time_function("callbacks", partial(CallbackList.call, self))  # type: ignore[method-assign]

    def __iter__(self) -> Iterator[object]:
        return iter(self.callbacks)

    def __len__(self) -> int:
        return len(self.callbacks)

    def has(self, hook: str) -> bool:
        """True if any callback overrides a hook.

        Args:
            hook: The hook's name, e.g. `"on_train_batch_end"`.
        """
        return bool(self._listeners[hook])

    def call(self, hook: str, *args: Any) -> None:
        """Call a hook of all callbacks that override it, in their order.

        Args:
            hook: The hook's name.
            args: The epoch or batch, if the hook has that argument, and the logs (default: empty).

        Raises:
            CallbackError: A callback raised an error, which is the `__cause__`. If the hook ends `fit`, `evaluate` or
                `predict`, the remaining callbacks still get it.
        """
        if self._pending_end_hook is None:
            self._pending_end_hook = _ENDS.get(hook)
        listeners = self._listeners[hook]
        if listeners:
            if hook in self._hooks_of_readers:
                self.expose()
            if len(args) == _HOOKS[hook]:
                args = (*args, {})
            if hook == "on_epoch_end" and self._sets_rate and isinstance(args[1], dict):
                args[1]["learning_rate"] = self.model.learning_rate  # for callbacks before the rate callback, too
            for position, (callback, method) in enumerate(listeners):
                try:
                    self._run(callback, method, hook, *args)
                except CallbackError:
                    if hook == self._pending_end_hook:
                        self._pending_end_hook = None
                        self._call_despite_errors(hook, listeners[position + 1 :], {})
                    raise
            if hook in self._hooks_with_user_code:
                self.note_user_code(hook in _EACH_BATCH)
        if hook == self._pending_end_hook:
            self._pending_end_hook = None

    def close_after_error(self, error: BaseException) -> None:
        """Call `on_exception` and `on_train_end` of all callbacks except the one that raised the error.

        Outside `fit` the end hook is `on_test_end` or `on_predict_end`. The logs are empty. An error in one of these
        hooks becomes a warning, so that it never hides the first error. Does nothing if no run had begun, or the run
        has ended.

        Args:
            error: The error.
        """
        hook = self._pending_end_hook
        self._pending_end_hook = None
        if hook is None:
            return
        failed = self._failed if isinstance(error, CallbackError) else None
        for name, args in (("on_exception", (error, {})), (hook, ({},))):
            if name in self._hooks_of_readers:
                self.expose()
            self._call_despite_errors(name, [pair for pair in self._listeners[name] if pair[0] is not failed], *args)

    def _run(self, callback: object, method: _Hook, hook: str, *args: Any) -> None:
        try:
            method(*args)
        except Exception as error:  # not KeyboardInterrupt or SystemExit, which the callback didn't cause
            self._failed = callback
            if _is_pruned_trial(error):
                raise
            raise CallbackError(_describe_error(callback, hook, error)) from error

    def _call_despite_errors(self, hook: str, listeners: list[tuple[object, _Hook]], *args: Any) -> None:
        for callback, method in listeners:
            try:
                method(*args)
            except Exception as error:
                with contextlib.suppress(Warning):  # where warnings are errors, the first error must still be raised
                    warn(f"while ending after an error, {_describe_error(callback, hook, error)}")


def _make_forwarder(hook: str) -> _Hook:
    def forward(self: CallbackList, *args: Any, **named: Any) -> None:
        self.call(hook, *(arg for arg in (*args, *named.values()) if arg is not None))

    forward.__doc__ = f"Call `{hook}` of all callbacks."
    return forward


# Every hook, called as a method, forwards to `call`.
for _hook in _HOOKS:
    for _name in filter(None, (_hook, _ALIASES.get(_hook))):
        setattr(CallbackList, _name, _make_forwarder(_hook))


def _flatten(callbacks: object) -> list[object]:
    inner = callbacks.callbacks if isinstance(callbacks, CallbackList) else callbacks
    return [callback for part in inner for callback in _flatten(part)] if isinstance(inner, (list, tuple)) else [inner]


def _check(callback: object) -> None:
    if isinstance(callback, type):
        raise ArgumentError(
            f"callbacks must be objects, got the class {callback.__name__}: pass an instance, {callback.__name__}(...)"
        )
    if not any(callable(getattr(callback, hook, None)) for hook in (*_HOOKS, *_ALIASES.values())):
        raise ArgumentError(
            f"callbacks must be Callback objects, or have hooks such as on_epoch_end as methods, got {callback!r} of "
            f"type {type(callback).__name__}"
        )
    libraries = (base.__module__.partition(".")[0] for base in type(callback).__mro__ if _is_from_lightning(base))
    library = next(libraries, "")
    if library:
        raise ArgumentError(
            f"{type(callback).__name__} is a callback of {library}, whose hooks take a trainer: derive it from "
            "tpufit.callbacks.Callback, whose hooks take (self, epoch, logs) or (self, batch, logs)"
        )
    warn_of_uncalled_hooks(type(callback), Callback if isinstance(callback, Callback) else object)


def _is_from_lightning(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("lightning", "pytorch_lightning", "lightning_fabric")


def _may_run_user_code(callback: object) -> bool:
    """True if a callback may change values that a step's Python reads. `only_writes` callbacks change none."""
    ours = type(callback).__module__.startswith(f"{__package__}.") and not getattr(callback, "reads_weights", True)
    return not ours and not getattr(callback, "only_writes", False)


def _find_override(callback: object, hook: str) -> _Hook | None:
    """Return the callback's method for a hook, or None if the callback doesn't override it."""
    for name in (hook, _ALIASES.get(hook)):
        method = getattr(callback, name, None) if name else None
        if callable(method) and getattr(method, "__func__", None) is not getattr(Callback, name or hook):
            return method  # type: ignore[no-any-return]
    return None


def _is_pruned_trial(error: Exception) -> bool:
    """True for the exception by which Optuna prunes a trial: its study catches it, so it isn't an error."""
    return type(error).__name__ == "TrialPruned" and type(error).__module__.startswith("optuna.")


def _describe_error(callback: object, hook: str, error: Exception) -> str:
    return f"{type(callback).__name__}.{hook} raised {type(error).__name__}: {error}"
