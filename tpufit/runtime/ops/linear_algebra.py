"""Linear algebra that torch_xla computes on the host, reformulated as products and triangular solves for the device.

Spectral and orthogonal parametrizations need it. Values and gradients equal PyTorch's up to rounding.
"""

from typing import Any

import torch
from torch import Tensor

from .native import operation

# A series with this number of terms is exact in float32 for matrices up to the norm 0.5. Larger matrices are halved up
# to `_HALVINGS` times. The graph always has as many squarings.
_TERMS = 12
_HALVINGS = 12


def vdot(input: Tensor, other: Tensor) -> Tensor:
    """`torch.vdot`, which spectral norms use."""
    # On TorchTPU `dot` of a lazily conjugated tensor ends the process.
    return torch.dot(input.conj().resolve_conj(), other)


def householder_product(input: Tensor, tau: Tensor) -> Tensor:
    """`torch.linalg.householder_product`: the first columns of a product of reflections.

    All reflections are applied at once, as `I - V @ T @ V.mT`, where the columns of `V` are the reflections' vectors
    and `T` is triangular.
    """
    n, k = input.shape[-2:]
    if not input.numel():
        return input.clone()
    if tau.shape[-1] < k:  # the remaining reflections are identities
        tau = torch.cat([tau, tau.new_zeros(*tau.shape[:-1], k - tau.shape[-1])], -1)
    first = torch.eye(n, k, dtype=input.dtype, device=input.device)
    vectors = input.tril(-1) + first
    triangle = torch.triu(vectors.mH @ vectors, 1) * tau[..., :, None]
    inverse: Tensor = _InverseOfUnitriangular.apply(triangle)  # type: ignore[no-untyped-call]
    return first - vectors @ (inverse * tau[..., None, :]) @ vectors[..., :k, :].mH


def slogdet(input: Tensor) -> tuple[Tensor, Tensor]:
    """`torch.linalg.slogdet`, whose gradient in PyTorch needs LU factors that torch_xla doesn't return."""
    if not input.numel() and input.shape[-2:] == (0, 0):
        return input.new_ones(input.shape[:-2]), input.abs().sum((-2, -1))
    if input.is_complex():  # torch_xla's sign of complex numbers is always 1 or -1
        factors, pivots, _ = torch.linalg.lu_factor_ex(input)
        diagonal = factors.diagonal(dim1=-2, dim2=-1)
        swaps = pivots != torch.arange(1, input.shape[-1] + 1, device=input.device)
        return diagonal.sgn().prod(-1) * (1 - swaps.sum(-1) % 2 * 2), diagonal.abs().log().sum(-1)
    return _LogDeterminant.apply(input)  # type: ignore[no-untyped-call, no-any-return]


def matrix_exp(input: Tensor) -> Tensor:
    """`torch.matrix_exp`: a power series of the matrix, halved several times, then squared as often.

    NaN for a norm above 2,048.
    """
    if not input.numel():
        return input.clone()
    if input.dtype in (torch.bfloat16, torch.float16):  # 16 bits would be too few for squares of squares
        return matrix_exp(input.float()).to(input.dtype)
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
    """The inverse of `I + x`, for a strictly upper triangular `x`."""

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


class _LogDeterminant(torch.autograd.Function):
    """The sign of a determinant and the logarithm of its absolute value, whose gradient is the inverse's transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        sign, logarithm, *_ = operation("_linalg_slogdet")(x)
        ctx.save_for_backward(x)
        ctx.mark_non_differentiable(sign)
        return sign, logarithm

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        x: Tensor = ctx.saved_tensors[0]
        inverse: Tensor = torch.linalg.inv_ex(x).inverse  # `inv` would read a value to check for singularity
        return gradients[1][..., None, None] * inverse.mT
