"""Operations and their lowerings: torch_xla computes an operation that has none on the host."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..release import beneath
from . import linear_algebra

_TOLD_APART = 256  # so many random numbers are rarely equal: one in 500 times

_libraries: dict[str, torch.library.Library] = {}

# An operation has a kernel of the device, or is made of others that have.
_KEYS = ("XLA", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CompositeImplicitAutograd")


def has_kernel(operation: str) -> bool:
    """True if the device computes `"aten::add.Tensor"`, or another, itself; else the host does, with a wait a step."""
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(operation, key) for key in _KEYS)


def falls_back(name: str) -> bool:
    """True if the device computes no form of an operation.

    Example:
        >>> falls_back("add"), falls_back("dim"), falls_back("histc")
        (False, False, True)
    """
    packet = getattr(torch.ops.aten, name, None)
    forms = packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else []
    forms = [getattr(packet, form).name() for form in forms]
    known = [form for form in forms if torch._C._dispatch_has_kernel(form)]  # others are of TorchScript only
    return bool(known) and not any(map(has_kernel, known))


def lower_missing(backend: str = "XLA") -> None:
    """Teach the device operations that torch_xla 2.9 lacks, or that end the process, for modules and functions alike.

    Huber's loss has no kernel, nor have `vdot`, `householder_product` and `matrix_exp`, of which spectral and
    orthogonal parametrizations are made. `nll_loss` of one sample is a segmentation fault, and so is `cross_entropy`,
    which calls it. `roll` of an empty tensor divides by zero. `randperm` doesn't compile where several cores share the
    rows that it shuffles. Values and gradients are PyTorch's, but for rounding where Huber's `delta` is not 1. The
    backend is the dispatch key of the tensors; tests take `"CPU"`.
    """
    if backend not in _libraries:  # for good: taking a kernel back while another thread is in it would be a crash
        library = _libraries[backend] = torch.library.Library("aten", "IMPL")
        for key in (f"Autograd{backend}", backend):  # the latter for torch.inference_mode
            library.impl("huber_loss", _huber_loss, key)
            library.impl("nll_loss_nd", _nll_loss, key)
            library.impl("vdot", linear_algebra.vdot, key)
            library.impl("linalg_householder_product", linear_algebra.householder_product, key)
            library.impl("linalg_matrix_exp", linear_algebra.matrix_exp, key)
        if backend == "XLA":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PyTorch says that it is replaced
                library.impl("randperm", _randperm, backend)
                key, native = beneath("aten::roll", backend)
                library.impl("roll", partial(_roll, native), key, with_keyset=True)


def _huber_loss(input: Tensor, target: Tensor, reduction: int = 1, delta: float = 1.0) -> Tensor:
    if not delta > 0:
        raise RuntimeError("huber_loss does not support non-positive values for delta.")  # as PyTorch says it
    loss: Tensor = torch.ops.aten.smooth_l1_loss(input, target, reduction, beta=delta) * delta
    return loss


def _nll_loss(
    input: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1, ignore_index: int = -100
) -> Tensor:
    native = torch.ops.aten.nll_loss_nd.default
    if input.dim() != 1:
        return native.decompose(input, target, weight, reduction, ignore_index)  # type: ignore[no-any-return]
    if target.dim():
        F.nll_loss(torch.empty(input.shape), torch.empty(target.shape, dtype=torch.int64))  # PyTorch's own error
    loss: Tensor = native.decompose(input[None], target[None], weight, reduction, ignore_index)
    return loss if reduction else loss[0]


def _randperm(
    n: int,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> Tensor:
    """A random order, by sorting random numbers: again where float32 has too few of them to tell all places apart."""
    if n < 0:
        raise RuntimeError(f"n must be non-negative, got {n}")  # as PyTorch says it
    order = torch.arange(n, device=device)
    if n > 1:
        order = torch.rand(n, dtype=torch.float32, device=device).argsort()
    if n > _TOLD_APART:
        order = order[torch.rand(n, dtype=torch.float32, device=device).argsort()]
    return order.to(dtype or torch.int64)


def _roll(native: Callable[..., Tensor], keys: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if tensor.device.type == "xla" and not tensor.numel():
        return tensor.clone()
    return native(keys, tensor, *args, **kwargs)
