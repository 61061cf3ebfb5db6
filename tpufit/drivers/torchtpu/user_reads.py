"""`guard_reads`: reads by user code, such as `.item()` and `.cpu()`, raise an error if the value is lost."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_guards: list[torch.library.Library] = []


def guard_reads(prepare: Callable[[Tensor], Tensor | None]) -> None:
    """Call a function before the device's own kernels read a tensor. Otherwise, they wait forever for a lost value.

    This can't be undone, because another thread may be running one of the kernels.

    Args:
        prepare: Waits until the tensor has its value, or raises an error. It may return the value, on the host.
    """
    if _guards:
        return
    read_one = torch.library.get_kernel("aten::_local_scalar_dense", "PrivateUse1")
    copy = torch.library.get_kernel("aten::_to_copy", "PrivateUse1")

    def read_scalar(keys: Any, tensor: Tensor) -> Any:
        value = prepare(tensor)
        return read_one.call_boxed(keys, tensor) if value is None else value.item()

    def copy_to(keys: Any, tensor: Tensor, **options: Any) -> Tensor:
        device = options.get("device")
        value = prepare(tensor) if device is not None and torch.device(device).type == "cpu" else None
        if value is not None:
            return value.to(options.get("dtype") or value.dtype)
        copied: Tensor = copy.call_boxed(keys, tensor, **options)
        return copied

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that a kernel is replaced
        library.impl("_local_scalar_dense", read_scalar, "PrivateUse1", with_keyset=True)
        library.impl("_to_copy", copy_to, "PrivateUse1", with_keyset=True)
    _guards.append(library)
