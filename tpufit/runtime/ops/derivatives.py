"""`with_second_derivative`: operations whose gradients, as the device computes them, have no gradients themselves.

PyTorch would take the missing second derivative for 0, e.g. in a gradient penalty.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def with_second_derivative(native: Callable[..., Tensor], composed: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Return `native(*tensors)`, with derivatives of any order.

    Args:
        native: The device's operation; it and its gradient are used for the result and for first derivatives.
        composed: The same operation, composed of others that have derivatives of any order.
        tensors: All tensors on which the result depends.
    """
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        result: Tensor = _Native.apply(native, composed, *tensors)  # type: ignore[no-untyped-call]
        return result
    return native(*tensors)


class _Native(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, native: Callable[..., Tensor], composed: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.operations = native, composed
        return native(*tensors)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        gradients = _Gradient.apply(*ctx.operations, needed, gradient, *ctx.saved_tensors)  # type: ignore[no-untyped-call]
        remaining = iter(gradients)
        return None, None, *(next(remaining) if need else None for need in needed)


class _Gradient(torch.autograd.Function):
    """The gradients of `_Native` for the needed tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        native: Callable[..., Tensor],
        composed: Callable[..., Tensor],
        needed: tuple[bool, ...],
        gradient: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(gradient, *tensors)
        ctx.composed, ctx.needed = composed, needed
        # The result is computed again, because only it leads to the gradient; nothing else uses it, so that the
        # compiler removes it.
        detached = [tensor.detach().requires_grad_(need) for tensor, need in zip(tensors, needed, strict=True)]
        with torch.enable_grad():
            result = native(*detached)
        return torch.autograd.grad(result, [tensor for tensor in detached if tensor.requires_grad], gradient)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        with_graph = torch.is_grad_enabled()
        needed = [tensor.requires_grad for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            # Aliases, because the gradient may depend on the tensors: that belongs to the caller's graph.
            gradient, *tensors = aliases = [tensor.view_as(tensor) for tensor in ctx.saved_tensors]
            differentiated = [tensor for tensor, need in zip(tensors, ctx.needed, strict=True) if need]
            first = torch.autograd.grad(ctx.composed(*tensors), differentiated, gradient, create_graph=True)
            inputs = [alias for alias, need in zip(aliases, needed, strict=True) if need]
            learning = [pair for pair in zip(first, gradients, strict=True) if pair[0].requires_grad]
            second = torch.autograd.grad(
                [one for one, _ in learning],
                inputs,
                [other for _, other in learning],
                create_graph=with_graph,
                allow_unused=True,
            )
        results = iter(second)
        return None, None, None, *(next(results) if need else None for need in needed)
