"""`for_this_thread`: a context in which other threads that use some tensors wait.

torch_xla doesn't expect that one thread reads a tensor while another traces what becomes of it: it stumbles, or ends
the process.
"""

import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from threading import RLock, get_ident
from typing import Any

import torch
from torch import Tensor

# A thread that waits longer may be one that the step itself waits for: from then on it is let in. In seconds.
_PATIENCE = 2.0


class _Guard:
    """Makes threads wait for the one that has the tensors to itself, but for those that it may be waiting for."""

    def __init__(self) -> None:
        self._busy = RLock()  # a step may train another model
        self.others: set[int] = set()  # the threads that there were before
        self._let_in: set[int] = set()

    @contextmanager
    def for_this_thread(self) -> Iterator[None]:
        with self._busy:
            self.others = sys._current_frames().keys() - self._let_in - {get_ident()}
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
def for_this_thread(tensors: Sequence[Tensor]) -> Iterator[None]:
    """A context in which another thread that does anything with one of the tensors waits for its end.

    A tensor whose class has a `__torch_function__` of its own stays open to all.
    """
    classes = [type(tensor) for tensor in tensors]
    with _guard.for_this_thread():
        try:
            for tensor, kind in zip(tensors, classes, strict=True):
                tensor.__class__ = _guarded(kind)
            yield
        finally:
            for tensor, kind in zip(tensors, classes, strict=True):
                tensor.__class__ = kind


@cache
def _guarded(kind: type[Tensor]) -> type[Tensor]:
    """The class of a tensor of some class while one thread has it to itself."""
    if kind.__torch_function__ not in (Tensor.__torch_function__, torch._C._disabled_torch_function_impl):
        return kind

    plain = torch._C._disabled_torch_function_impl

    def wait_first(
        _: type, func: Any, classes: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if get_ident() in _guard.others:
            _guard.wait()
        result = plain(func, classes, args, kwargs or {})
        # `nn.Parameter` makes another one only of a weight whose detached tensor has the same class. Elsewhere a module
        # would take that tensor for a parameter.
        if func is Tensor.detach and sys._getframe(1).f_code is torch.nn.Parameter.__new__.__code__:
            result.__class__ = guarded
        return result

    names = {"__torch_function__": classmethod(wait_first), "__module__": kind.__module__}
    guarded: type[Tensor] = types.new_class(kind.__name__, (kind,), exec_body=lambda own: own.update(names))
    return guarded
