"""Kernels that copy a tensor to the host, such as those of `.item()`, `.cpu()` and operations that run on the host.

Each computes pending tensors first, and finds their program inside `distinguishing_inputs`. complex128 is read as pairs
of real numbers, because torch_xla drops the imaginary parts.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .graph_hash import distinguishing_inputs


def read(native: Callable[..., Any], keys: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Read a tensor, as `.item()` does."""
    if tensor.dtype is torch.complex128:
        return tensor.cpu().item()
    with distinguishing_inputs([tensor]):
        return native(keys, tensor, *args, **kwargs)


def copy(native: Callable[..., Tensor], keys: Any, target: Tensor, source: Tensor, *args: Any) -> Tensor:
    """Copy a tensor into another, as `copy_` does: perhaps into a tensor on the host."""
    reads = source.device.type == "xla" != target.device.type
    if reads and source.dtype is torch.complex128:
        return target.copy_(source.cpu())
    with distinguishing_inputs([source] if reads else []):
        copied: Tensor = native(keys, target, source, *args)
    return copied


def convert(native: Callable[..., Tensor], keys: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Convert a tensor, as `.to` does: perhaps on the device, perhaps to the host."""
    device = kwargs.get("device")
    if kwargs.get("dtype") is torch.complex32:
        raise RuntimeError("torch_xla has no complex32, which chalf() returns: use complex64, e.g. x.cfloat()")
    if device is None or torch.device(device).type == "xla":
        return native(keys, tensor, *args, **kwargs)
    if tensor.dtype is torch.complex128:
        pairs = torch.view_as_real_copy(tensor).to(device)
        return torch.view_as_complex(pairs).to(kwargs.get("dtype") or tensor.dtype)
    with distinguishing_inputs([tensor]):
        copied: Tensor = native(keys, tensor, *args, **kwargs)
    return copied


def read_all(native: Callable[..., Any], keys: Any, tensors: Sequence[Tensor]) -> Any:
    """Read all operands of an operation that runs on the host."""
    # An operand may be a Python number: PyTorch has made a tensor of it, but passes the number.
    operands = [tensor if isinstance(tensor, Tensor) else torch.tensor(tensor) for tensor in tensors]
    with distinguishing_inputs([tensor for tensor in operands if tensor.device.type == "xla"]):
        return native(keys, operands)
