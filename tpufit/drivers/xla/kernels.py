"""Replacements for kernels of torch_xla that crash, don't compile, or differ from PyTorch's."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ...runtime.ops import ordering
from ...runtime.ops.derivatives import with_second_derivative
from ...runtime.ops.native import broadcast, operation
from . import activations, comparisons, complexes, dtype_promotion, fourier, gathers, pooling, user_reads
from .release_differences import redispatch

_DISTINCT = 256  # up to this number, random numbers are rarely equal: once in 500 times

# The positions of the dimensions among the arguments of reductions.
_DIMENSIONS = {"linalg_vector_norm": 2, "mean.dim": 1, "std.correction": 1, "sum.dim_IntList": 1}
_DIMENSIONS |= {"var.correction": 1, "var_mean.correction": 1}
_HALF = (torch.bfloat16, torch.float16)
# In torch_xla these operations may add many elements, and round after each addition to the dtype of the elements: in
# bfloat16 the sum of an image of ones may be 256.
_SCATTERS = ("index_add", "scatter_add", "scatter_reduce.two")
_SUMS = (
    *("_log_softmax", "_log_softmax_backward_data", "_softmax", "_softmax_backward_data", "binary_cross_entropy"),
    *("cumprod", "cumsum", "mean", "mse_loss", "prod", "prod.dim_int", "smooth_l1_loss", "std_mean.correction", "sum"),
    *(f"_adaptive_avg_pool{n}d{form}" for n in (2, 3) for form in ("", "_backward")),
    *_DIMENSIONS,
)
# PyTorch composes these operations from others. torch_xla's kernels for them have no gradient, so that PyTorch warns,
# or, for selu, a wrong gradient. inverse and svd are composed, too, but their parts don't run on the device, and their
# gradients are correct.
_COMPOSED = ("diag", "kl_div", "logdet", "selu", "selu_", "std", "std.dim")
# torch_xla's kernels for these operations, or for their gradients, refuse scalars, which have no dimensions.
_REFUSING_SCALARS = (
    *("_log_softmax", "_softmax", "all.dim", "any.dim", "cummax", "cummin", "cumprod", "cumsum", "index_add"),
    *("index_copy", "index_select", "kthvalue", "logsumexp", "masked_scatter", "max.dim", "mean.dim", "min.dim"),
    *("scatter.src", "scatter.value", "scatter_reduce.two", "sum.dim_IntList", "topk"),
)
# torch_xla's gradients of these activations don't broadcast their arguments, which jacobians and hessians need.
_NOT_BROADCASTING = ("gelu", "hardshrink", "leaky_relu", "softplus", "softshrink", "threshold")
_libraries: dict[str, torch.library.Library] = {}


def patch_kernels(backend: str = "XLA") -> None:
    """Replace kernels of the device, permanently: removing a kernel while another thread runs it would crash.

    `roll` of an empty tensor divides by zero. `randperm` doesn't compile if several cores share the rows that it
    shuffles. An empty list of dimensions should mean all dimensions, but reduces none. Diagonals of a tensor's first
    two dimensions, `pixel_shuffle` by a second factor, and singular values of several matrices are wrong.
    The modules `activations`, `comparisons`, `complexes`, `fourier`, `pooling`, `dtype_promotion`,
    `user_reads` and `runtime/ops/ordering.py` describe the other differences.
    """
    if backend in _libraries:
        return
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that a kernel is replaced
        library.impl("randperm", _randperm, backend)
        for name, kernel in (complexes.KERNELS | fourier.KERNELS | gathers.KERNELS).items():
            library.impl(name, kernel, backend)
        for name in _COMPOSED:
            library.impl(name, operation(name).decompose, f"Autograd{backend}")
        for name, kernel in _kernels_with_gradients().items():
            key, native = redispatch(f"aten::{name}", f"Autograd{backend}")
            library.impl(name, partial(_on_the_device, kernel, native), key, with_keyset=True)
        for name, kernel in _kernels().items():
            key, native = redispatch(f"aten::{name}", backend)
            library.impl(name, partial(_on_the_device, kernel, native), key, with_keyset=True)
        for name, kernel in _kernels_with_any_first_argument().items():
            key, native = redispatch(f"aten::{name}", backend)
            library.impl(name, partial(kernel, native), key, with_keyset=True)
        for name, kernel in _kernels_above_gradients().items():
            for backend_key in (f"Autograd{backend}", backend):  # the latter for torch.inference_mode
                key, native = redispatch(f"aten::{name}", backend_key)
                library.impl(name, partial(kernel, native), key, with_keyset=True)
    _libraries[backend] = library


def _kernels() -> dict[str, Callable[..., Any]]:
    """Return the kernels that take the native kernel, the dispatcher's keys, and the operation's arguments."""
    kernels: dict[str, Callable[..., Any]] = {"roll": _roll, "glu": _glu}
    kernels |= {"convolution_backward_overrideable": _convolution_backward}
    kernels |= {"native_batch_norm_backward": _batch_norm_backward}
    kernels |= dict.fromkeys(("squeeze_copy.dim", "squeeze_copy.dims"), _squeeze)
    kernels |= {"_local_scalar_dense": user_reads.read, "_to_copy": user_reads.convert}
    kernels |= {"inverse": _inverse, "linalg_inv_ex": _inverse}
    kernels |= {"_linalg_svd": _svd, "pixel_shuffle": _pixel_shuffle, "svd": _svd}
    kernels |= {"as_strided_scatter": gathers.as_strided_scatter, "repeat": gathers.repeat}
    kernels |= {name: partial(_over_all, position) for name, position in _DIMENSIONS.items()}
    kernels |= {"diagonal": _diagonal, "diagonal_copy": _diagonal, "diagonal_scatter": _diagonal_scatter}
    kernels |= comparisons.KERNELS | dtype_promotion.KERNELS
    kernels |= dict.fromkeys(("argmax", "argmin"), ordering.arg_extreme)
    kernels |= dict.fromkeys(("max.dim", "min.dim"), ordering.extreme)
    kernels |= dict.fromkeys(("max", "min"), ordering.extreme_of)
    kernels |= dict.fromkeys(("amax", "amin"), _extreme_over) | {"logsumexp": ordering.logsumexp}
    kernels |= dict.fromkeys(("sort", "sort.stable", "topk", "kthvalue"), ordering.ordered)
    kernels |= {f"cum{name}": partial(ordering.cumulative, name == "max") for name in ("max", "min")}
    kernels |= dict.fromkeys(("softshrink", "threshold"), activations.propagate_nan)
    kernels |= {"log_sigmoid_forward": activations.logsigmoid, "log_sigmoid_backward": activations.logsigmoid_backward}
    kernels |= {"acosh": complexes.acosh, "view_as_real_copy": complexes.view_as_real}
    kernels |= dict.fromkeys(("sigmoid_backward", "tanh_backward"), complexes.gradient_of_result)
    kernels |= {f"{name}_backward": broadcast for name in _NOT_BROADCASTING}
    kernels |= dict.fromkeys(("log", "log10", "log2", "sqrt"), complexes.hide_origin)
    for name, replacement in complexes.COMPLEX_KERNELS.items():
        kernels[name] = partial(_complex_or, replacement, kernels.get(name, _native))
    for name in dtype_promotion.FLOATING_FOR_INTEGERS:
        kernels[name] = partial(dtype_promotion.make_floating, kernels.get(name, _native))
    for name in _SUMS:
        kernels[name] = partial(_in_float32, kernels.get(name, _native))
    for name in ("elu", "hardsigmoid", "hardswish", "hardtanh"):
        kernels[f"{name}_backward"] = getattr(activations, f"{name}_backward")
    return kernels


def _kernels_with_gradients() -> dict[str, Callable[..., Any]]:
    """Return the kernels that call operations with gradients; without gradients, the device's kernels remain."""
    kernels: dict[str, Callable[..., Any]] = dict.fromkeys(_REFUSING_SCALARS, _with_dimensions)
    kernels |= {"_fft_r2c": _transform_real, "gather": gathers.gather, "scatter_add": gathers.scatter_add}
    kernels |= dict.fromkeys(("index_fill.int_Scalar", "index_fill.int_Tensor"), gathers.fill)
    kernels |= {name: partial(_in_float32, kernels.get(name, _native)) for name in _SCATTERS}
    return kernels | {_in_place(name): _make_in_place_kernel(name) for name in _SCATTERS}


def _kernels_with_any_first_argument() -> dict[str, Callable[..., Any]]:
    """Return the kernels of operations whose first argument may be a number, or a tensor on the host."""
    kernels: dict[str, Callable[..., Any]] = {"copy_": user_reads.copy, "_to_cpu": user_reads.read_all}
    return kernels | {"pow.Scalar": complexes.power_of_number}


def _kernels_above_gradients() -> dict[str, Callable[..., Any]]:
    """Return the kernels of operations for which torch_xla has gradients; their arguments are as in `_kernels`."""
    kernels: dict[str, Callable[..., Any]] = {"avg_pool2d": pooling.avg_pool, "avg_pool3d": pooling.avg_pool}
    kernels = {name: partial(_in_float32, partial(kernel, name)) for name, kernel in kernels.items()}
    kernels |= {name: partial(pooling.max_pool, name) for name in ("max_pool1d", "max_pool2d", "max_pool3d")}
    with_indices = ("adaptive_max_pool2d", "max_pool2d_with_indices", "max_pool3d_with_indices")
    kernels |= {name: partial(pooling.max_pool_with_indices, name) for name in with_indices}
    kernels |= {f"replication_pad{n}d": gathers.replicate for n in (1, 2, 3)} | {"cdist": _cdist}
    return {name: partial(_on_the_device, kernel) for name, kernel in kernels.items()} | {"einsum": _einsum}


def _on_the_device(
    kernel: Callable[..., Any], native: Callable[..., Any], keys: Any, tensor: Any, *args: Any, **kwargs: Any
) -> Any:
    """Call a kernel for tensors of the device, and the native kernel for others, which torch_xla 2.8 passes too."""
    first = next((x for x in (tensor, *args) if isinstance(x, Tensor)), None)  # a number may precede the tensor
    if first is None or first.device.type != "xla":
        return native(keys, tensor, *args, **kwargs)
    return kernel(native, keys, tensor, *args, **kwargs)


def _randperm(
    n: int,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> Tensor:
    """Return a random order, by sorting random numbers; by sorting twice where float32 numbers may be equal."""
    if n < 0:
        raise RuntimeError(f"n must be non-negative, got {n}")  # PyTorch's message
    order = torch.arange(n, device=device)
    if n > 1:
        order = torch.rand(n, dtype=torch.float32, device=device).argsort()
    if n > _DISTINCT:
        order = order[torch.rand(n, dtype=torch.float32, device=device).argsort()]
    return order.to(dtype or torch.int64)


def _roll(native: Callable[..., Tensor], keys: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return native(keys, tensor, *args, **kwargs) if tensor.numel() else tensor.clone()


def _squeeze(native: Callable[..., Tensor], keys: Any, tensor: Tensor, *dims: Any) -> Tensor:
    """`squeeze`, also of a tensor without dimensions, which torch_xla refuses."""
    return native(keys, tensor, *dims) if tensor.dim() else tensor.clone()


def _diagonal(
    native: Callable[..., Tensor], keys: Any, tensor: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Tensor:
    return native(keys, tensor, *_swap_dimensions(tensor.dim(), offset, dim1, dim2))


def _diagonal_scatter(
    native: Callable[..., Tensor],
    keys: Any,
    tensor: Tensor,
    source: Tensor,
    offset: int = 0,
    dim1: int = 0,
    dim2: int = 1,
) -> Tensor:
    return native(keys, tensor, source, *_swap_dimensions(tensor.dim(), offset, dim1, dim2))


def _swap_dimensions(rank: int, offset: int, dim1: int, dim2: int) -> tuple[int, int, int]:
    """Swap the first two dimensions of a diagonal, which torch_xla would otherwise mistake for the last two."""
    return (-offset, dim2, dim1) if rank > 2 and (dim1 % rank, dim2 % rank) == (0, 1) else (offset, dim1, dim2)


def _pixel_shuffle(_: Callable[..., Tensor], __: Any, images: Tensor, factor: int) -> Tensor:
    """`pixel_shuffle`. torch_xla's cached graph ignores the factor, and computes all calls with the first factor."""
    if images.dim() < 3 or factor < 1 or images.shape[-3] % factor**2:
        raise RuntimeError(
            "pixel_shuffle takes images of shape (..., channels, height, width), whose number of channels is divisible "
            f"by {factor} x {factor} = {factor**2}, got {tuple(images.shape)}"
        )
    *rows, channels, height, width = images.shape
    n = len(rows)
    split = images.reshape(*rows, channels // factor**2, factor, factor, height, width)
    split = split.permute(*range(n), n, n + 3, n + 1, n + 4, n + 2)
    return split.reshape(*rows, channels // factor**2, height * factor, width * factor)


def _svd(native: Callable[..., Any], keys: Any, matrix: Tensor, *args: Any, **kwargs: Any) -> Any:
    if matrix.is_complex():
        raise RuntimeError(
            "torch_xla can't compute the singular values of a complex matrix, which svd, pinv, cond, matrix_rank, "
            "lstsq and the nuclear norm need: call f(x.cpu()).to(x.device), on the host"
        )
    if matrix.dim() > 2:
        raise RuntimeError(
            f"torch_xla computes the singular values of one matrix at a time, but the tensor has shape "
            f"{tuple(matrix.shape)}: call torch.stack([f(x) for x in matrices])"
        )
    if not matrix.numel():
        raise RuntimeError(f"torch_xla can't compute the singular values of an empty matrix {tuple(matrix.shape)}")
    return native(keys, matrix, *args, **kwargs)


def _complex_or(
    replacement: Callable[..., Tensor], kernel: Callable[..., Any], native: Any, keys: Any, *args: Any, **kwargs: Any
) -> Any:
    """Call `replacement` for complex numbers, and `kernel` for others."""
    return replacement(*args, **kwargs) if args[0].is_complex() else kernel(native, keys, *args, **kwargs)


def _native(native: Callable[..., Any], keys: Any, *args: Any, **kwargs: Any) -> Any:
    return native(keys, *args, **kwargs)


def _in_float32(kernel: Callable[..., Any], native: Any, keys: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call a kernel that adds elements, in float32 instead of 16 bits; round once, as PyTorch does."""
    dtype = kwargs.get("dtype") or tensor.dtype
    if dtype not in _HALF:
        return kernel(native, keys, tensor, *args, **kwargs)
    if kwargs.get("dtype"):
        kwargs["dtype"] = torch.float32
    wide = [x.float() if isinstance(x, Tensor) and x.dtype is tensor.dtype else x for x in args]
    result = kernel(native, keys, tensor.float(), *wide, **kwargs)
    return tree_map_only(Tensor, lambda one: one.to(dtype), result)


def _convolution_backward(native: Callable[..., Any], keys: Any, gradient: Tensor, *args: Any) -> Any:
    """The gradients of a convolution. The gradient of the bias is a sum, see `_SUMS`."""
    *options, (needs_input, needs_weight, needs_bias) = args
    if gradient.dtype not in _HALF or not needs_bias:
        return native(keys, gradient, *args)
    inner, outer, _ = native(keys, gradient, *options, [needs_input, needs_weight, False])
    return inner, outer, gradient.sum([0, *range(2, gradient.dim())])


def _batch_norm_backward(
    native: Callable[..., Any],
    keys: Any,
    gradient: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    batch_mean: Tensor | None,
    batch_scale: Tensor | None,
    train: bool,
    eps: float,
    needed: list[bool],
) -> Any:
    """The gradients of a batch norm, also in evaluation, for which torch_xla raises an error or ends the process."""
    if train or mean is None or variance is None:
        return native(keys, gradient, x, weight, mean, variance, batch_mean, batch_scale, train, eps, needed)
    shape = (1, -1, *[1] * (x.dim() - 2))
    rows = [0, *range(2, x.dim())]
    scale = (variance + eps).rsqrt().reshape(shape)
    gradients = (
        gradient * (scale if weight is None else scale * weight.reshape(shape)),
        (gradient * (x - mean.reshape(shape)) * scale).sum(rows),
        gradient.sum(rows),
    )
    dtypes = (x.dtype, *[x.dtype if weight is None else weight.dtype] * 2)
    return tuple(one.to(dtype) if need else None for one, dtype, need in zip(gradients, dtypes, needed, strict=True))


def _in_place(name: str) -> str:
    packet, dot, overload = name.partition(".")
    return f"{packet}_{dot}{overload}"


def _make_in_place_kernel(name: str) -> Callable[..., Any]:
    """Return a kernel for an operation's in-place form, which gradients of gathers call."""

    def kernel(native: Callable[..., Tensor], keys: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if tensor.dtype in _HALF:
            return tensor.copy_(operation(name)(tensor, *args, **kwargs))
        return native(keys, tensor, *args, **kwargs)

    return kernel


def _with_dimensions(native: Callable[..., Any], keys: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call an operation on tensors of one number instead of tensors without dimensions."""
    if tensor.dim():
        return native(keys, tensor, *args, **kwargs)
    operands = [x[None] if isinstance(x, Tensor) and not x.dim() else x for x in (tensor, *args)]
    return tree_map_only(Tensor, lambda result: result.reshape(()), native(keys, *operands, **kwargs))


def _extreme_over(native: Callable[..., Tensor], keys: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return ordering.extreme_of(partial(_over_all, 1, native), keys, tensor, *args, **kwargs)


def _over_all(position: int, native: Callable[..., Any], keys: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Reduce all dimensions if the argument at this position is an empty list."""
    if kwargs.get("dtype") is not None:  # torch_xla would compute the mean of integers in integers
        tensor = tensor.to(kwargs["dtype"])
    before, dims, after = args[: position - 1], args[position - 1 : position] or ([],), args[position:]
    if len(before) == position - 1 and dims[0] is not None and not dims[0]:
        return native(keys, tensor, *before, list(range(tensor.dim())), *after, **kwargs)
    return native(keys, tensor, *args, **kwargs)


def _transform_real(native: Callable[..., Tensor], keys: Any, tensor: Tensor, *args: Any) -> Tensor:
    """The Fourier transform of real numbers, times 1.0, to separate its gradient from that of a following `irfft`.

    Without the product, the gradient of a following `irfft` raised an error, was wrong, or crashed the process, as if
    freed memory were read.
    """
    return native(keys, tensor, *args) * 1.0


def _einsum(native: Callable[..., Tensor], keys: Any, equation: str, tensors: list[Tensor], **kwargs: Any) -> Tensor:
    """`einsum`. torch_xla's gradient has no gradient, refuses transforms, and doesn't conjugate complex numbers."""
    composed = operation("einsum").decompose
    if tensors and tensors[0].device.type == "xla":
        if any(tensor.is_complex() for tensor in tensors):
            return composed(equation, tensors, **kwargs)  # type: ignore[no-any-return]
        return with_second_derivative(partial(native, keys), composed, equation, tensors, **kwargs)
    return native(keys, equation, tensors, **kwargs)


def _inverse(native: Callable[..., Any], keys: Any, matrix: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`inv` and `inv_ex`. torch_xla inverts complex numbers wrongly, and its `inv_ex` returns too few error codes."""
    found = native(keys, complexes.as_real(matrix) if matrix.is_complex() else matrix, *args, **kwargs)
    inverse: Tensor = found if isinstance(found, Tensor) else found[0]
    inverse = complexes.from_real(inverse) if matrix.is_complex() else inverse
    if isinstance(found, Tensor):
        return inverse
    return inverse, torch.zeros(matrix.shape[:-2], dtype=torch.int32, device=matrix.device)


def _cdist(native: Callable[..., Tensor], keys: Any, first: Tensor, second: Tensor, *args: Any) -> Tensor:
    """`cdist` of stacks of one shape; torch_xla's doesn't broadcast them."""
    stacks = torch.broadcast_shapes(first.shape[:-2], second.shape[:-2])
    return native(keys, *(points.expand(*stacks, *points.shape[-2:]) for points in (first, second)), *args)


def _glu(native: Callable[..., Tensor], keys: Any, tensor: Tensor, *args: Any) -> Tensor:
    torch.ops.aten.glu(torch.empty_like(tensor, device="meta"), *args)  # raises PyTorch's error for an odd size
    return native(keys, tensor, *args)
