"""Products of tensors of three dimensions and more, which keep their dimensions.

torch_xla flattens them to matrices. Rows that the cores don't share evenly can't be flattened where they are, so every
core first gathers all of them; and the compiler copies what it then has to lay out anew.
"""

from collections.abc import Callable
from string import ascii_lowercase
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .residuals import keeps, residual


class _Product(torch.autograd.Function):
    """A product by an Einstein sum, whose gradients are such products too.

    Each index must be of two of the three tensors, so that no gradient is a broadcast.
    """

    @staticmethod
    def forward(ctx: Any, equation: str, a: Tensor, b: Tensor, kept: bool) -> Tensor:
        ctx.equation = equation
        _, needs_a, needs_b, _ = ctx.needs_input_grad
        # As PyTorch's: what no gradient needs may be written into after this.
        ctx.save_for_backward(a if needs_b else None, b if needs_a else None)
        if not kept:
            return torch.einsum(equation, a, b)
        (result,), _ = residual(lambda: [torch.einsum(equation, a, b)])
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        a, b = ctx.saved_tensors
        of_a, of_b, of_result = ctx.equation.replace("->", ",").split(",")
        _, needs_a, needs_b, _ = ctx.needs_input_grad
        return (
            None,
            product(f"{of_result},{of_b}->{of_a}", gradient, b) if needs_a else None,
            product(f"{of_a},{of_result}->{of_b}", a, gradient) if needs_b else None,
            None,
        )


def product(equation: str, a: Tensor, b: Tensor, kept: bool = False) -> Tensor:
    """Multiply two tensors and add up, in one operation of XLA.

    The equation is as in `torch.einsum`, without an ellipsis; each index is of two of the three tensors. A region that
    keeps products keeps this one if it is to be `kept`.

    Example:
        >>> product("ij,jk->ik", torch.ones(2, 3), torch.ones(3, 4)).shape
        torch.Size([2, 4])
    """
    result: Tensor = _Product.apply(equation, a, b, kept)  # type: ignore[no-untyped-call]
    return result


class _Given(NamedTuple):
    """What a result of `linear` is made of, the versions of these tensors, which count the writes into each, and what
    to call if it is computed in parts instead."""

    tensors: tuple[Tensor, Tensor, Tensor | None]
    versions: list[int]
    forget: Callable[[], None]


class _Linear(torch.autograd.Function):
    """Rows of any dimension by a weight, in ranges of its outputs, which together are all of them.

    As one range it is `torch.nn.functional.linear`. As several, each is a product of its own, and the gradients are
    those of one product: slices of a whole result are copies on a TPU, but their gradients are joined for nothing.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, sizes: list[int]) -> tuple[Tensor, ...]:
        needs_input, needs_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(input if needs_weight else None, weight if needs_input else None)
        ctx.dtype = input.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        rows = ascii_lowercase[: input.dim() - 1]
        parts, forget = residual(
            lambda: [torch.einsum(f"{rows}y,zy->{rows}z", input, part) for part in weight.split(sizes)]
        )
        ctx.given = _Given((input, weight, bias), _versions(input, weight, bias), forget)
        if bias is None:
            return tuple(parts)
        return tuple(part + own for part, own in zip(parts, bias.split(sizes), strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        input, weight = ctx.saved_tensors
        ctx.given = None  # a graph that outlives its step must not keep them
        needs_input, needs_weight, needs_bias, _ = ctx.needs_input_grad
        gradient = (gradients[0] if len(gradients) == 1 else torch.cat(gradients, -1)).to(ctx.dtype)
        rows = ascii_lowercase[: gradient.dim() - 1]
        of_bias = None
        if needs_bias:
            sums = [part.sum(tuple(range(gradient.dim() - 1))) for part in gradients]
            of_bias = (sums[0] if len(sums) == 1 else torch.cat(sums)).to(ctx.bias_dtype)
        return (
            product(f"{rows}z,zy->{rows}y", gradient, weight) if needs_input else None,
            product(f"{rows}z,{rows}y->zy", gradient, input) if needs_weight else None,
            of_bias,
            None,
        )


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """`torch.nn.functional.linear`; of more than a matrix, in our own words."""
    matrix = input.dim() == 2 and not keeps()
    if bias is not None and matrix:  # PyTorch's own words, to which the way back is long
        flat: Tensor = torch.ops.aten.addmm(bias, input, weight.t())
        return flat
    rows = input.dim() > 2 or (input.dim() == 2 and not matrix)
    fits = rows and weight.dim() == 2 and input.shape[-1] == weight.shape[1] and input.numel()
    if not fits or not _can_multiply(input, weight) or (bias is not None and bias.shape != weight.shape[:1]):
        return None
    y: tuple[Tensor] = _Linear.apply(input, weight, bias, [len(weight)])  # type: ignore[no-untyped-call]
    return y[0]


def divided(x: Tensor, sizes: list[int]) -> tuple[Tensor, ...] | None:
    """Compute a result of `linear` once more, as several products of these sizes. XLA leaves the first one out.

    It is None if the tensor isn't such a result, if what it was made of has been written into since, or if its own
    gradient is asked for.
    """
    given = getattr(x.grad_fn, "given", None)
    if not isinstance(given, _Given) or _versions(*given.tensors) != given.versions:
        return None
    if x._backward_hooks or x.retains_grad:
        return None
    given.forget()
    parts: tuple[Tensor, ...] = _Linear.apply(*given.tensors, sizes)  # type: ignore[no-untyped-call]
    return parts


def _versions(*tensors: Tensor | None) -> list[int]:
    return [tensor._version for tensor in tensors if tensor is not None]


def matmul(input: Tensor, other: Tensor) -> Tensor | None:
    """`torch.matmul` of more than a matrix by a matrix, or by as many matrices."""
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
