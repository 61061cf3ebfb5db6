"""`with_second_derivative`: makes operations twice differentiable whose device kernels aren't.

PyTorch would take the missing second derivative for 0, e.g. in a gradient penalty.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from .native import transforming


def with_second_derivative(
    native: Callable[..., Tensor], composed: Callable[..., Tensor], *args: Any, **named: Any
) -> Tensor:
    """Return `native(*args, **named)`, with derivatives of any order.

    Args:
        native: The device's operation; the result and first derivatives are its own.
        composed: The same operation, composed of others that have derivatives of any order, and rules for the
            transforms of `torch.func`, in which it replaces the device's operation.
        args: The arguments; lists may contain tensors.
        named: The named arguments.
    """
    if transforming():
        return composed(*args, **named)
    leaves, structure = tree_flatten((args, named))
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not at or not torch.is_grad_enabled():
        return native(*args, **named)
    tensors = [leaves[i] for i in at]
    leaves = [None if i in at else leaf for i, leaf in enumerate(leaves)]  # autograd keeps the tensors

    def of_tensors(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*tensors: Tensor) -> Tensor:
            filled = list(leaves)
            for i, tensor in zip(at, tensors, strict=True):
                filled[i] = tensor
            args, named = tree_unflatten(filled, structure)
            return function(*args, **named)

        return call

    result: Tensor = _Native.apply(of_tensors(native), of_tensors(composed), *tensors)  # type: ignore[no-untyped-call]
    return result


class _Native(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, native: Callable[..., Tensor], composed: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.functions = native, composed
        return native(*tensors)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradients = _Gradient.apply(*ctx.functions, gradient, *ctx.saved_tensors)  # type: ignore[no-untyped-call]
        return None, None, *gradients


class _Gradient(torch.autograd.Function):
    """The gradients of `_Native` for each tensor."""

    @staticmethod
    def forward(
        ctx: Any,
        native: Callable[..., Tensor],
        composed: Callable[..., Tensor],
        gradient: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(gradient, *tensors)
        ctx.composed = composed
        # Run the operation again for its autograd graph; the compiler removes the unused result.
        detached = [tensor.detach().requires_grad_() for tensor in tensors]
        with torch.enable_grad():
            result = native(*detached)
        return torch.autograd.grad(result, detached, gradient)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        with_graph = torch.is_grad_enabled()
        needed = [tensor.requires_grad for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            # Differentiate aliases: a dependence of the gradient on the tensors belongs to the caller's graph.
            gradient, *tensors = aliases = [tensor.view_as(tensor) for tensor in ctx.saved_tensors]
            first = torch.autograd.grad(ctx.composed(*tensors), tensors, gradient, create_graph=True)
            inputs = [alias for alias, need in zip(aliases, needed, strict=True) if need]
            pairs = [pair for pair in zip(first, gradients, strict=True) if pair[0].requires_grad]
            outputs, factors = zip(*pairs, strict=True) if pairs else ((), ())
            second = torch.autograd.grad(outputs, inputs, factors, create_graph=with_graph, allow_unused=True)
        results = iter(second)
        return None, None, *(next(results) if need else None for need in needed)
