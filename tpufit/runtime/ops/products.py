"""Products of tensors with three or more dimensions, which keep their dimensions.

torch_xla flattens the tensors to matrices. Rows that aren't divided evenly among the cores can't be flattened in place,
so every core gathers all rows first; and the compiler copies tensors to change their layout.
"""

from collections.abc import Callable
from string import ascii_lowercase
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .residuals import compute_residual, keeps_residuals


def _multiply(equation: str, a: Tensor, b: Tensor) -> Tensor:
    """`torch.einsum`, whose result isn't a view: `views` looks for it as the base of later views."""
    result = torch.einsum(equation, a, b)
    return result.clone() if result._is_view() else result  # in a graph, a copy costs nothing


class _Product(torch.autograd.Function):
    """A product as an Einstein sum, whose gradients are such products too.

    Each index must occur in two of the three tensors, so that no gradient is a broadcast.
    """

    @staticmethod
    def forward(ctx: Any, equation: str, a: Tensor, b: Tensor, kept: bool) -> Tensor:
        ctx.equation = equation
        _, needs_a, needs_b, _ = ctx.needs_input_grad
        # As in PyTorch, a tensor that no gradient needs may be modified afterwards.
        ctx.save_for_backward(a if needs_b else None, b if needs_a else None)
        if not kept:
            return _multiply(equation, a, b)
        (result,), _ = compute_residual(lambda: [_multiply(equation, a, b)])
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        a, b = ctx.saved_tensors
        a_indices, b_indices, result_indices = ctx.equation.replace("->", ",").split(",")
        _, needs_a, needs_b, _ = ctx.needs_input_grad
        return (
            None,
            product(f"{result_indices},{b_indices}->{a_indices}", gradient, b) if needs_a else None,
            product(f"{a_indices},{result_indices}->{b_indices}", a, gradient) if needs_b else None,
            None,
        )


def product(equation: str, a: Tensor, b: Tensor, kept: bool = False) -> Tensor:
    """Multiply and sum two tensors in one operation of XLA.

    The equation is as in `torch.einsum`, without an ellipsis; each index occurs in two of the three tensors. If `kept`,
    a region that keeps products keeps this one.

    Example:
        >>> product("ij,jk->ik", torch.ones(2, 3), torch.ones(3, 4)).shape
        torch.Size([2, 4])
    """
    result: Tensor = _Product.apply(equation, a, b, kept)  # type: ignore[no-untyped-call]
    return result


class _Inputs(NamedTuple):
    """The inputs of `linear`, their versions, which change when they are modified, and a function that drops the kept
    result, for use when it is computed in parts instead."""

    tensors: tuple[Tensor, Tensor, Tensor | None]
    versions: list[int]
    forget: Callable[[], None]


class _Linear(torch.autograd.Function):
    """A linear layer whose outputs are computed in consecutive ranges, one product each.

    With one range it is `torch.nn.functional.linear`. With several, the gradients are still computed by one product. On
    a TPU, slices of a whole result would be copies, but concatenating their gradients costs nothing.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, sizes: list[int]) -> tuple[Tensor, ...]:
        needs_input, needs_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(input if needs_weight else None, weight if needs_input else None)
        ctx.dtype = input.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        rows = ascii_lowercase[: input.dim() - 1]
        parts, forget = compute_residual(
            lambda: [_multiply(f"{rows}y,zy->{rows}z", input, part) for part in weight.split(sizes)]
        )
        ctx.inputs = _Inputs((input, weight, bias), _versions(input, weight, bias), forget)
        if bias is None:
            return tuple(parts)
        return tuple(part + summand for part, summand in zip(parts, bias.split(sizes), strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        input, weight = ctx.saved_tensors
        ctx.inputs = None  # a graph that outlives its step must not keep them
        needs_input, needs_weight, needs_bias, _ = ctx.needs_input_grad
        gradient = (gradients[0] if len(gradients) == 1 else torch.cat(gradients, -1)).to(ctx.dtype)
        rows = ascii_lowercase[: gradient.dim() - 1]
        bias_gradient = None
        if needs_bias:
            sums = [part.sum(tuple(range(gradient.dim() - 1))) for part in gradients]
            bias_gradient = (sums[0] if len(sums) == 1 else torch.cat(sums)).to(ctx.bias_dtype)
        return (
            product(f"{rows}z,zy->{rows}y", gradient, weight) if needs_input else None,
            product(f"{rows}z,{rows}y->zy", gradient, input) if needs_weight else None,
            bias_gradient,
            None,
        )


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """`torch.nn.functional.linear`; inputs with more than two dimensions keep their dimensions."""
    matrix = input.dim() == 2 and not keeps_residuals()
    if bias is not None and matrix:  # the same operation as PyTorch's, called directly to save host time
        flat: Tensor = torch.ops.aten.addmm(bias, input, weight.t())
        return flat
    rows = input.dim() > 2 or (input.dim() == 2 and not matrix)
    fits = rows and weight.dim() == 2 and input.shape[-1] == weight.shape[1] and input.numel()
    if not fits or not _can_multiply(input, weight) or (bias is not None and bias.shape != weight.shape[:1]):
        return None
    y: tuple[Tensor] = _Linear.apply(input, weight, bias, [len(weight)])  # type: ignore[no-untyped-call]
    return y[0]


def split_linear(x: Tensor, sizes: list[int]) -> tuple[Tensor, ...] | None:
    """Recompute a result of `linear` as several products of these sizes. XLA removes the unused first product.

    None if the tensor isn't a result of `linear`, if its inputs have been modified since, or if its gradient is needed.
    """
    inputs = getattr(x.grad_fn, "inputs", None)
    if not isinstance(inputs, _Inputs) or _versions(*inputs.tensors) != inputs.versions:
        return None
    if x._backward_hooks or x.retains_grad:
        return None
    inputs.forget()
    parts: tuple[Tensor, ...] = _Linear.apply(*inputs.tensors, sizes)  # type: ignore[no-untyped-call]
    return parts


def _versions(*tensors: Tensor | None) -> list[int]:
    return [tensor._version for tensor in tensors if tensor is not None]


def matmul(input: Tensor, other: Tensor) -> Tensor | None:
    """`torch.matmul` of a stack of matrices, with three or more dimensions, by one matrix or by a matrix for each."""
    if input.dim() < 3 or other.dim() < 2 or input.shape[-1] != other.shape[-2]:
        return None
    if not _can_multiply(input, other) or not input.numel():
        return None
    rows = ascii_lowercase[: input.dim() - 2]
    if other.dim() == 2:
        return product(f"{rows}xy,yz->{rows}xz", input, other, kept=True)
    if other.shape[:-2] == input.shape[:-2]:
        return product(f"{rows}xy,{rows}yz->{rows}xz", input, other)
    return None


def _can_multiply(a: Tensor, b: Tensor) -> bool:
    return a.is_floating_point() and a.dtype is b.dtype and b.numel() > 0
