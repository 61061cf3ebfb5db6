"""Elementwise losses that Keras has and PyTorch lacks."""

import math
from collections.abc import Callable
from functools import wraps

from torch import Tensor
from torch.nn import functional as F


def with_reduction(value: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Give an elementwise function the argument `reduction` of PyTorch's losses: `"mean"` or `"none"`.

    Example:
        >>> import torch
        >>> float(with_reduction(percentage_error)(torch.tensor([3.0, 1.0]), torch.tensor([2.0, 1.0])))
        25.0
    """

    @wraps(value)
    def loss(y_pred: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
        each = value(y_pred, y)
        return each if reduction == "none" else each.mean()

    return loss


def percentage_error(y_pred: Tensor, y: Tensor) -> Tensor:
    """Compute the absolute error in percent of the target; its mean is Keras's `mean_absolute_percentage_error`.

    Example:
        >>> import torch
        >>> percentage_error(torch.tensor([3.0]), torch.tensor([2.0])).tolist()
        [50.0]
    """
    return 100 * (y_pred - y).abs() / y.abs().clamp(min=1e-7)


def squared_log_error(y_pred: Tensor, y: Tensor) -> Tensor:
    """Compute the squared difference of the logarithms of 1 + x, where x below 0 counts as 0, as in Keras."""
    return (y_pred.clamp(min=1e-7).log1p() - y.clamp(min=1e-7).log1p()).square()


def log_cosh(y_pred: Tensor, y: Tensor) -> Tensor:
    """Compute the logarithm of the hyperbolic cosine of the error, without overflow."""
    error = y_pred - y
    return error + F.softplus(-2 * error) - math.log(2)
