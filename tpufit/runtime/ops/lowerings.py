"""Operations and their lowerings: torch_xla computes an operation without a lowering on the host."""

import warnings
from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor
from torch.nn import functional as F

from ...errors import BatchError
from ..driver import driver
from . import linear_algebra, reductions, resizing
from .native import with_fallback

_libraries: dict[str, torch.library.Library] = {}

# The device computes an operation by its kernel, or by a composite of other operations.
_KEYS = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CompositeImplicitAutograd")


def has_kernel(operation: str) -> bool:
    """True if the device computes an operation, e.g. `"aten::add.Tensor"`; else the host does, and each step waits."""
    return any(
        torch._C._dispatch_has_kernel_for_dispatch_key(operation, key) for key in (driver().dispatch_key, *_KEYS)
    )


def falls_back(name: str) -> bool:
    """True if the device computes no overload of an operation.

    Example:
        >>> falls_back("add"), falls_back("dim"), falls_back("histc"), falls_back("view_as_real")
        (False, False, True, False)
    """
    known = _overloads(name)
    copies = _overloads(f"{name}_copy")  # views are copies on the device
    return bool(known) and not any(map(has_kernel, known + copies))


def _overloads(name: str) -> list[str]:
    packet = getattr(torch.ops.aten, name, None)
    overloads = packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else []
    names = [getattr(packet, overload).name() for overload in overloads]
    return [name for name in names if torch._C._dispatch_has_kernel(name)]  # without TorchScript's own overloads


def lower_missing(backend: str) -> None:
    """Register kernels for operations that torch_xla 2.9 lacks, computes differently, or crashes in.

    Huber's loss has no kernel; neither have `vdot`, `householder_product` and `matrix_exp`, which spectral and
    orthogonal parametrizations use. `slogdet` and `logdet` have no gradient. `nll_loss` of one sample crashes with a
    segmentation fault, and so does `cross_entropy`, which calls it. Counts, norms and pairwise distances of some orders
    differ from PyTorch's, and so do images resized by a factor. The registered kernels' values and gradients equal
    PyTorch's, up to rounding if Huber's `delta` isn't 1. Packed sequences are refused, because their gradients and
    their recurrent layers fail with misleading errors. The backend is the dispatch key of the tensors; tests pass
    `"CPU"`.
    """
    if backend not in _libraries:  # permanent: removing a kernel while another thread runs it would crash
        library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns that a kernel is replaced
            for key in (f"Autograd{backend}", backend):  # the latter for torch.inference_mode
                library.impl("huber_loss", _huber_loss, key)
                library.impl("nll_loss_nd", _nll_loss, key)
                library.impl("_pack_padded_sequence", _refuse_packing, key)
                library.impl("vdot", linear_algebra.vdot, key)
                library.impl("linalg_householder_product", linear_algebra.householder_product, key)
                library.impl("linalg_matrix_exp", linear_algebra.matrix_exp, key)
                library.impl("linalg_slogdet", linear_algebra.slogdet, key)
                for form in ("count_nonzero", "count_nonzero.dim_IntList"):
                    library.impl(form, reductions.count_nonzero, key)
                for form in ("norm.Scalar", "norm.ScalarOpt_dim", "norm.ScalarOpt_dim_dtype", "norm.ScalarOpt_dtype"):
                    library.impl(form, reductions.norm, key)
                for name, replacement in _PARTIAL.items():
                    library.impl(name, with_fallback(name, replacement), key)
        _libraries[backend] = library  # last, so that the next call retries after an error


# These kernels return None where the native operation equals PyTorch's.
_PARTIAL: dict[str, Callable[..., Tensor | None]] = {
    "pdist": reductions.pdist,
    "upsample_bilinear2d.vec": resizing.bilinear,
    "upsample_nearest2d.vec": resizing.nearest,
}


def _refuse_packing(input: Tensor, lengths: Tensor, batch_first: bool) -> NoReturn:
    raise BatchError(
        "pack_padded_sequence can't run on the device: a packed sequence has another shape for other lengths, and its "
        "layers read its sizes on the host. Call the recurrent layer on the padded rows instead: with batch_first=True "
        "each row's last output is y[torch.arange(len(y), device=y.device), lengths - 1]. Leave the padding out of a "
        "loss or a mean by the mask torch.arange(y.shape[1], device=y.device) < lengths[:, None]"
    )


def _huber_loss(input: Tensor, target: Tensor, reduction: int = 1, delta: float = 1.0) -> Tensor:
    if not delta > 0:
        raise RuntimeError("huber_loss does not support non-positive values for delta.")  # PyTorch's message
    loss: Tensor = torch.ops.aten.smooth_l1_loss(input, target, reduction, beta=delta) * delta
    return loss


def _nll_loss(
    input: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1, ignore_index: int = -100
) -> Tensor:
    native = torch.ops.aten.nll_loss_nd.default
    if input.dim() != 1:
        return native.decompose(input, target, weight, reduction, ignore_index)  # type: ignore[no-any-return]
    if target.dim():
        F.nll_loss(torch.empty(input.shape), torch.empty(target.shape, dtype=torch.int64))  # raises PyTorch's error
    loss: Tensor = native.decompose(input[None], target[None], weight, reduction, ignore_index)
    return loss if reduction else loss[0]
