"""TorchTPU's modes: operations are computed, or only recorded."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from .names import names
from .tensors import on_tpu


@contextmanager
def computing() -> Iterator[None]:
    """A context in which operations are computed, also during a trace; neither the trace nor a watch sees them."""
    names().push_mode(names().modes.DEFER_AND_FUSE)
    # Each step computes twice outside of any trace, and PyTorch takes some microseconds to find no mode.
    modes = _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()
    try:
        with modes, torch._C.DisableTorchFunction():
            yield
    finally:
        names().pop_mode()


@contextmanager
def noting() -> Iterator[None]:
    """A context in which operations are only recorded."""
    names().push_mode(names().modes.INTERNAL_COMPILE_FX_GRAPH)
    try:
        yield
    finally:
        names().pop_mode()


class Printing(TorchFunctionMode):
    """Prints a tensor of a trace as a copy on the host, because PyTorch disables all modes while it prints."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__repr__ and on_tpu(args[0]):
            return repr(args[0].detach().cpu())
        return func(*args, **(kwargs or {}))
