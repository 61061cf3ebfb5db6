"""Linear algebra that torch_xla computes on the host, by products and triangular systems, which the device has.

Spectral and orthogonal parametrizations need it. Values and gradients are PyTorch's but for rounding.
"""

from typing import Any

import torch
from torch import Tensor

# A series of these terms is exact in float32 for matrices up to the norm 0.5. Larger matrices are halved so many times
# at most; the graph has a product for each time.
_TERMS = 12
_HALVINGS = 12


def vdot(input: Tensor, other: Tensor) -> Tensor:
    """`torch.vdot`, of which spectral norms are made."""
    return torch.dot(input.conj(), other)


def householder_product(input: Tensor, tau: Tensor) -> Tensor:
    """`torch.linalg.householder_product`: the first columns of a product of reflections, all at once.

    The product is `I - V @ T @ V.mT`, where `V` has the reflections' vectors and `T` is triangular.
    """
    n, k = input.shape[-2:]
    if not k:
        return input.clone()
    if tau.shape[-1] < k:  # the other reflections change nothing
        tau = torch.cat([tau, tau.new_zeros(*tau.shape[:-1], k - tau.shape[-1])], -1)
    first = torch.eye(n, k, dtype=input.dtype, device=input.device)
    vectors = input.tril(-1) + first
    together = torch.triu(vectors.mH @ vectors, 1) * tau[..., :, None]
    inverse: Tensor = _InverseOfUnitriangular.apply(together)  # type: ignore[no-untyped-call]
    return first - vectors @ (inverse * tau[..., None, :]) @ vectors[..., :k, :].mH


def matrix_exp(input: Tensor) -> Tensor:
    """`torch.matrix_exp`: a series of the halved matrix, squared again. NaN for a norm above 2,048."""
    norm = input.detach().abs().sum(-2, keepdim=True).amax(-1, keepdim=True)
    halvings = torch.log2(norm.clamp_min(0.5) * 2).ceil()
    small = input
    for i in range(_HALVINGS):
        small = torch.where(halvings > i, small / 2, small)
    eye = torch.eye(input.shape[-1], dtype=input.dtype, device=input.device)
    result = eye + small / _TERMS
    for term in range(_TERMS - 1, 0, -1):
        result = eye + small @ result / term
    for i in range(_HALVINGS):
        result = torch.where(halvings > i, result @ result, result)
    return torch.where(halvings > _HALVINGS, torch.nan, result)


class _InverseOfUnitriangular(torch.autograd.Function):
    """The inverse of `I + x`, for an `x` with nothing but zeros on and below its diagonal."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device).expand_as(x)
        inverse, _ = torch.triangular_solve(eye, x + eye, upper=True, unitriangular=True)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        inverse: Tensor = ctx.saved_tensors[0]
        return -inverse.mH @ gradients[0] @ inverse.mH
