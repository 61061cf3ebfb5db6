"""Replacements for kernels that TorchTPU lacks, or that read a value on the host."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decompositions
from torch.nn import functional as F

from ...runtime.ops import ordering
from ...runtime.ops.derivatives import with_second_derivative
from ...runtime.ops.native import broadcast, operation
from .private_names import names

_libraries: list[torch.library.Library] = []

# Kernels that take the native kernel and the dispatcher's keys, then the operation's arguments.
_GRADIENT_KERNELS: dict[str, Callable[..., Any]] = {
    f"{name}_backward": broadcast
    for name in (
        *("gelu", "hardsigmoid", "hardswish", "hardtanh", "log_sigmoid", "logit", "sigmoid", "tanh", "threshold"),
    )
}
# The same operations, composed of others.
_WITHOUT_SECOND_DERIVATIVES: dict[str, Callable[..., Tensor]] = {
    "grid_sampler_2d": decompositions.grid_sampler_2d,
    **{
        f"repeat_interleave.{form}": operation(f"repeat_interleave.{form}").decompose
        for form in ("self_Tensor", "self_int")
    },
}
_ORDERING_KERNELS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("argmax", "argmin"), ordering.arg_extreme),
    **dict.fromkeys(("max.dim", "min.dim"), ordering.extreme),
    **dict.fromkeys(("max", "min", "amax", "amin"), ordering.extreme_of),
    **dict.fromkeys(("sort", "sort.stable", "topk", "kthvalue"), ordering.ordered),
}


def patch_kernels(platform: str) -> None:
    """Replace kernels of the device, permanently: removing a kernel while another thread runs it would crash.

    The native kernels' faults:

    - `masked_fill` reads a tensor `value` on the host. `smooth_l1_loss`, and the gradient of adaptive max pooling in
      one or two dimensions, run on the host.
    - `unique` and `unique_consecutive` crash, so the host computes both. `index_reduce` crashes for more than one
      dimension.
    - `avg_pool1d` has no gradient. `elu` divides positive numbers by the `alpha` of `celu`. Maxima and minima take
      infinity for the largest finite number. Sorting doesn't put NaN last. `copy_` also copies the attribute `grad`.
    - `ctc_loss` refuses lengths and targets on the host, which PyTorch accepts.
    - `cumsum` is too new for XLA's plugin for the CPU.
    - `lstm` and `gru` compute in float32 and draw from TorchTPU's own generator. PyTorch's decompositions replace them:
      products, which autocast handles, and dropouts.
    - Padding by replication refuses to crop some dimensions, and its gradient ends the process, also for
      dimensions of one element.
    - Gradients of activations don't broadcast their arguments, which jacobians and hessians need: the result has the
      wrong shape, or the process ends.
    - Second derivatives are missing for cross-entropy, embedding, max pooling and `repeat_interleave`, and wrong for
      `grid_sample`. Max pooling refuses transforms of `torch.func`.

    Args:
        platform: `"TPU"` or `"CPU"`.
    """
    if _libraries:
        return
    pools = (F.max_pool1d, F.max_pool2d, F.max_pool3d)  # TorchTPU's; PyTorch's, which call the dispatcher, return
    names().unpatch_max_pool()
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that a kernel is replaced
        library.impl("masked_fill.Tensor", _masked_fill, "PrivateUse1")
        library.impl("masked_fill_.Tensor", _masked_fill_, "PrivateUse1")
        for key in ("AutogradPrivateUse1", "PrivateUse1"):  # the latter for torch.inference_mode
            library.impl("smooth_l1_loss", _smooth_l1_loss, key)
            library.impl("ctc_loss.Tensor", _ctc_loss, key)
            library.impl("ctc_loss.IntList", _ctc_loss, key)
            for name in ("avg_pool1d", "cross_entropy_loss", "embedding_backward", "gru.input", "lstm.input"):
                library.impl(name, operation(name).decompose, key)
            for n, pool in enumerate(pools, 1):
                library.impl(f"max_pool{n}d", partial(_max_pool, n, pool), key)
        for name, kernel in (_ORDERING_KERNELS | _PADDING_KERNELS | _GRADIENT_KERNELS).items():
            native = torch.library.get_kernel(f"aten::{name}", "PrivateUse1").call_boxed
            library.impl(name, partial(kernel, native), "PrivateUse1", with_keyset=True)
        for name, composed in _WITHOUT_SECOND_DERIVATIVES.items():
            native = torch.library.get_kernel(f"aten::{name}", "AutogradPrivateUse1").call_boxed
            library.impl(name, partial(_differentiate_twice, native, composed), "AutogradPrivateUse1", with_keyset=True)
        copy = torch.library.get_kernel("aten::copy_", "PrivateUse1").call_boxed
        library.impl("copy_", partial(_copy, copy), "PrivateUse1", with_keyset=True)
        if platform == "CPU":
            library.impl("cumsum", _cumsum, "PrivateUse1")
        library.impl("adaptive_max_pool2d_backward", _adaptive_max_pool2d_backward, "PrivateUse1")
        library.impl("elu", _elu, "PrivateUse1")
        library.impl("index_reduce", _index_reduce, "PrivateUse1")
        library.impl("index_reduce_", _index_reduce_, "PrivateUse1")
        library.impl("_unique2", _unique, "PrivateUse1")
        library.impl("unique_consecutive", _unique_consecutive, "PrivateUse1")
    _libraries.append(library)


def _masked_fill(tensor: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    return torch.where(mask, value.to(tensor), tensor)


def _masked_fill_(tensor: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    return tensor.copy_(torch.where(mask, value.to(tensor), tensor))


def _smooth_l1_loss(input: Tensor, target: Tensor, reduction: int = 1, beta: float = 1.0) -> Tensor:
    if beta < 0:
        raise RuntimeError("smooth_l1_loss does not support negative values for beta.")  # PyTorch's message
    error = (input - target).abs()
    loss = error if beta == 0 else torch.where(error < beta, error.square() * (0.5 / beta), error - 0.5 * beta)
    return loss.mean() if reduction == 1 else loss.sum() if reduction == 2 else loss


def _ctc_loss(log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, *options: Any) -> Tensor:
    on_device = [torch.as_tensor(value).to(log_probs.device) for value in (targets, input_lengths, target_lengths)]
    loss: Tensor = torch.ops.aten.ctc_loss.Tensor.decompose(log_probs, *on_device, *options)
    return loss


def _copy(
    native: Callable[..., Tensor], keys: Any, tensor: Tensor, source: Tensor, non_blocking: bool = False
) -> Tensor:
    return native(keys, tensor, source.detach(), non_blocking)


def _replication_pad(native: Callable[..., Tensor], keys: Any, tensor: Tensor, padding: list[int]) -> Tensor:
    if min(padding) >= 0:
        return native(keys, tensor, padding)
    for dim, sources in _sources(tensor, padding):
        tensor = tensor.index_select(dim, sources)
    return tensor


def _replication_pad_backward(
    native: Callable[..., Tensor], keys: Any, gradient: Tensor, tensor: Tensor, padding: list[int]
) -> Tensor:
    if min(padding) >= 0 and min(tensor.shape[-(len(padding) // 2) :]) > 1:
        return native(keys, gradient, tensor, padding)
    for dim, sources in _sources(tensor, padding):
        shape = [*gradient.shape]
        shape[dim] = tensor.shape[dim]
        gradient = gradient.new_zeros(shape).index_add(dim, sources, gradient)
    return gradient


def _sources(tensor: Tensor, padding: list[int]) -> Iterator[tuple[int, Tensor]]:
    """Return each padded dimension, from the last, and the index in `tensor` of each element after the padding."""
    for i, (before, after) in enumerate(zip(padding[::2], padding[1::2], strict=True), 1):
        size = tensor.shape[-i]
        yield -i, (torch.arange(before + size + after, device=tensor.device) - before).clamp(0, size - 1)


_PADDING_KERNELS: dict[str, Callable[..., Any]] = {
    **{f"replication_pad{n}d": _replication_pad for n in (1, 2, 3)},
    **{f"replication_pad{n}d_backward": _replication_pad_backward for n in (1, 2, 3)},
}


def _adaptive_max_pool2d_backward(gradient: Tensor, tensor: Tensor, indices: Tensor) -> Tensor:
    flat = torch.zeros_like(tensor).flatten(-2)
    return flat.scatter_add(-1, indices.flatten(-2), gradient.flatten(-2)).view_as(tensor)


def _max_pool(
    dimensions: int,
    native: Callable[..., Tensor],
    tensor: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] | int = 0,
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> Tensor:
    composed = operation(f"max_pool{dimensions}d").decompose
    if any(step != 1 for step in dilation):  # of which TorchTPU computes no gradient
        result: Tensor = composed(tensor, kernel_size, stride, padding, dilation, ceil_mode)
        return result
    return with_second_derivative(native, composed, tensor, kernel_size, stride or kernel_size, padding, 1, ceil_mode)


def _differentiate_twice(
    native: Callable[..., Tensor], composed: Callable[..., Tensor], keys: Any, *args: Any, **kwargs: Any
) -> Tensor:
    return with_second_derivative(partial(native, keys), composed, *args, **kwargs)


def _cumsum(tensor: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    is_integer = tensor.dtype is torch.bool or not (tensor.is_floating_point() or tensor.is_complex())
    total = tensor.to(dtype or (torch.int64 if is_integer else tensor.dtype)).clone()
    count = total.shape[dim] if total.dim() else 0
    span = 1  # the number of elements in each partial sum
    while span < count:
        later = total.narrow(dim, span, count - span) + total.narrow(dim, 0, count - span)
        total = torch.cat([total.narrow(dim, 0, span), later], dim)
        span *= 2
    return total


def _elu(tensor: Tensor, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Tensor:
    below = torch.expm1(tensor.clamp(max=0) * input_scale) * (alpha * scale)
    return torch.where(tensor > 0, tensor * scale, below)


def _index_reduce(
    tensor: Tensor, dim: int, index: Tensor, source: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    if tensor.dim():
        shape = [1] * tensor.dim()
        shape[dim] = -1
        index = index.view(shape).expand_as(source)
    return tensor.scatter_reduce(dim, index, source, reduce, include_self=include_self)


def _index_reduce_(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return tensor.copy_(_index_reduce(tensor, *args, **kwargs))


def _unique(tensor: Tensor, sorted: bool = True, *returns: bool) -> tuple[Tensor, ...]:
    # The caller ignores the results that it hasn't requested.
    return _from_host(tensor, torch.unique(tensor.cpu(), sorted, return_inverse=True, return_counts=True))


def _unique_consecutive(tensor: Tensor, *options: Any) -> tuple[Tensor, ...]:
    return _from_host(tensor, torch.ops.aten.unique_consecutive(tensor.cpu(), *options))


def _from_host(tensor: Tensor, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(result.to(tensor.device) for result in results)
