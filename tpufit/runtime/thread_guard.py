"""`guarding`: a context in which other threads that use some tensors wait.

torch_xla doesn't support reading a tensor in one thread while another traces its changes: it fails or aborts the
process.
"""

import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from threading import RLock, get_ident
from typing import Any

import torch
from torch import Tensor

from ..utils.garbage_collector import collector

# In seconds. A thread that has waited this long is let in, because the step itself may be waiting for that thread.
_PATIENCE = 2.0


class _Guard:
    """Makes threads wait for the thread that holds the tensors, unless the holder may be waiting for them."""

    def __init__(self) -> None:
        self._busy = RLock()  # reentrant, because a step may train another model
        self.others: set[int] = set()  # the other threads at the beginning
        self._let_in: set[int] = set()

    @contextmanager
    def guarding(self) -> Iterator[None]:
        with self._busy:
            with collector.pausing():  # copied to a set: the dict would keep this frame and its callers alive
                threads = set(sys._current_frames())
            self.others = threads - self._let_in - {get_ident()}
            yield

    def wait(self) -> None:
        """Wait, in one of the other threads, until the tensors are free."""
        if self._busy.acquire(timeout=_PATIENCE):
            self._busy.release()
        else:
            self._let_in.add(get_ident())
            self.others.discard(get_ident())


_guard = _Guard()


@contextmanager
def guarding(tensors: Sequence[Tensor]) -> Iterator[None]:
    """A context in which other threads that use one of the tensors wait for its end.

    Tensors whose class defines `__torch_function__` aren't guarded.
    """
    classes = [type(tensor) for tensor in tensors]
    with _guard.guarding():
        try:
            for tensor, kind in zip(tensors, classes, strict=True):
                tensor.__class__ = _make_guarded(kind)
            yield
        finally:
            for tensor, kind in zip(tensors, classes, strict=True):
                tensor.__class__ = kind


def unguarding() -> AbstractContextManager[None]:
    """A context in which this thread bypasses the guard, to read tensors fast. Only for the engine's own code.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> with guarding([weight]), unguarding():
        ...     weight.dim()
        1
    """
    return torch._C.DisableTorchFunctionSubclass()  # type: ignore[no-any-return]


def _caller() -> types.CodeType:
    """Return the code that has called a function on a guarded tensor, skipping frames of `__torch_function__` modes."""
    frame = sys._getframe(2)
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code


@cache
def _make_guarded(kind: type[Tensor]) -> type[Tensor]:
    """Return the guarded subclass of a tensor's class."""
    if kind.__torch_function__ not in (Tensor.__torch_function__, torch._C._disabled_torch_function_impl):
        return kind

    plain = torch._C._disabled_torch_function_impl

    def wait_first(
        _: type, func: Any, classes: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if get_ident() in _guard.others:
            _guard.wait()
        result = plain(func, classes, args, kwargs or {})
        # `nn.Parameter(weight)` requires that the detached tensor has the weight's class. Elsewhere the class is plain,
        # or a module would register the detached tensor as a parameter.
        if func is Tensor.detach and _caller() is torch.nn.Parameter.__new__.__code__:
            result.__class__ = guarded
        return result

    names = {"__torch_function__": classmethod(wait_first), "__module__": kind.__module__}
    guarded: type[Tensor] = types.new_class(kind.__name__, (kind,), exec_body=lambda own: own.update(names))
    return guarded
