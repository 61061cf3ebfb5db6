"""TorchTPU's modes: operations are computed, or only recorded."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .private_names import names
from .tensor_identity import on_tpu


@contextmanager
def computing() -> Iterator[None]:
    """A context in which operations are computed, also during a trace; neither the trace nor a watch sees them."""
    names().push_mode(names().modes.DEFER_AND_FUSE)
    # Skipped without modes: it takes microseconds, and each step enters this twice outside of traces.
    modes = _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()
    try:
        with modes, torch._C.DisableTorchFunction():
            yield
    finally:
        names().pop_mode()


@contextmanager
def recording() -> Iterator[None]:
    """A context in which operations are only recorded."""
    names().push_mode(names().modes.INTERNAL_COMPILE_FX_GRAPH)
    try:
        yield
    finally:
        names().pop_mode()


@contextmanager
def printing() -> Iterator[None]:
    """A context in which a tensor of a trace is printed as a copy on the host: PyTorch disables modes while it prints.

    A mode for functions would do the same, but Python would run for each function of the trace.
    """
    plain: Callable[..., str] = Tensor.__repr__

    def show(tensor: Tensor, **options: Any) -> str:
        return plain(tensor.detach().cpu() if on_tpu(tensor) else tensor, **options)

    setattr(Tensor, "__repr__", show)  # noqa: B010 - mypy refuses an assignment
    try:
        yield
    finally:
        setattr(Tensor, "__repr__", plain)  # noqa: B010
