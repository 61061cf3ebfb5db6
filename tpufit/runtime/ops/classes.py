"""The loss of classes in two passes over the logits, each core with its own rows."""

import torch
from torch import Tensor
from torch.nn import _reduction

from .views import unflattened


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """`torch.nn.functional.cross_entropy` of labels.

    The label's logit is picked by comparing, not by an index, which is a gather that the compiler doesn't fuse, and
    labels are compared in 32 bits. Logits that were flattened to `(batch * time, classes)` are taken as they were.
    """
    if target.is_floating_point() or not input.is_floating_point() or not input.numel() or input.dim() < 2:
        return None
    classes = input.shape[1]
    if (*input.shape[:1], *input.shape[2:]) != tuple(target.shape) or not 0 <= label_smoothing <= 1:
        return None
    if weight is not None and tuple(weight.shape) != (classes,):
        return None
    x = unflattened(input) if input.dim() == 2 else input
    dim = 1 if x is input else x.dim() - 1
    labels = target.to(torch.int32).view((*x.shape[:dim], *x.shape[dim + 1 :]))
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    along = (-1, *(1,) * (x.dim() - dim - 1))  # a vector of classes, beside the logits
    chosen = torch.arange(classes, dtype=torch.int32, device=x.device).view(along) == labels.unsqueeze(dim)
    scale = torch.logsumexp(x, dim)
    counts, zero = labels != ignore_index, x.new_zeros(())  # a tensor: a number would be sent to the device
    each = scale - torch.where(chosen, x, zero).sum(dim)
    weights = None
    if weight is not None:
        weights = torch.where(chosen, weight.to(x.dtype).view(along), zero).sum(dim) * counts.to(x.dtype)
        each = each * weights
    if label_smoothing:
        if weight is None:
            spread = scale * classes - x.sum(dim)
        else:
            all_weights = weight.to(x.dtype)
            spread = scale * all_weights.sum() - (x * all_weights.view(along)).sum(dim)
        each = each * (1 - label_smoothing) + spread * (label_smoothing / classes)
    each = torch.where(counts, each, zero)  # also where it is infinite
    if reduction == _reduction.get_enum("none"):
        return each.view(target.shape).to(input.dtype)
    loss = each.sum()
    if reduction == _reduction.get_enum("mean"):
        # Counted in whole numbers, as float32 counts to 16 million only.
        loss = loss / (counts.sum(dtype=torch.int32) if weights is None else weights.sum())
    return loss.to(input.dtype)
