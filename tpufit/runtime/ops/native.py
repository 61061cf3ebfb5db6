"""PyTorch's operations by name, and kernels that call them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Native = Callable[..., Any]
"""The previous kernel of an operation; it takes the dispatcher's keys, then the operation's arguments."""


def operation(name: str) -> Any:
    """Return an operation of PyTorch by its name in `torch.ops.aten`, such as `"std"` or `"std.dim"`."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def transforming() -> bool:
    """True inside a transform of `torch.func`, such as `vmap` or `grad`, which can't run our autograd functions."""
    return torch._C._are_functorch_transforms_active()


def broadcast(native: Native, keys: Any, *args: Any, **named: Any) -> Any:
    """Call a native kernel that doesn't broadcast its tensors, which are its first arguments."""
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    if len({tensor.shape for tensor in tensors}) > 1:
        args = (*torch.broadcast_tensors(*tensors), *args[len(tensors) :])
    return native(keys, *args, **named)


def with_fallback(name: str, replacement: Callable[..., Tensor | list[Tensor] | None]) -> Callable[..., Any]:
    """Return a kernel that calls `replacement`, and PyTorch's operation if it returns None."""
    native = operation(name)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        result = replacement(*args, **kwargs)
        return native.decompose(*args, **kwargs) if result is None else result

    return kernel
