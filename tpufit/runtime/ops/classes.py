"""The loss of classes in two passes over the logits, and classes as vectors: each core with its own rows."""

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
    labels are compared in 32 bits. Masks fill with zeros what doesn't count: `where` makes a tensor of its zero first,
    in each pass. Logits that were flattened to `(batch * time, classes)` are taken as they were.
    """
    if target.is_floating_point() or not input.is_floating_point() or not input.numel() or not input.dim():
        return None
    if input.dim() == 1:  # one sample
        if target.dim():
            return None
        loss = cross_entropy(input[None], target[None], weight, reduction, ignore_index, label_smoothing)
        return loss if loss is None or reduction else loss[0]
    classes = input.shape[1]
    if (*input.shape[:1], *input.shape[2:]) != tuple(target.shape) or not 0 <= label_smoothing <= 1:
        return None
    if weight is not None and tuple(weight.shape) != (classes,):
        return None
    x = unflattened(input) if input.dim() == 2 else input
    dim = 1 if x is input else x.dim() - 1
    labels = target.to(torch.int32 if abs(ignore_index) < 2**31 else torch.int64)
    if x is not input:
        labels = labels.view(x.shape[:-1])
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    along = (-1, *(1,) * (x.dim() - dim - 1))  # a vector of classes, beside the logits
    numbers = torch.arange(classes, dtype=torch.int32, device=x.device)
    others = (numbers.view(along) if len(along) > 1 else numbers) != labels.unsqueeze(dim)
    scale = torch.logsumexp(x, dim)
    ignored = labels == labels.new_full((), ignore_index)  # with Python's number it would be in 64 bits
    each = scale - x.masked_fill(others, 0).sum(dim)
    if weight is not None:
        weights = weight.to(x.dtype).view(along).masked_fill(others, 0).sum(dim).masked_fill(ignored, 0)
        each = each * weights
    if label_smoothing:
        if weight is None:
            spread = scale * classes - x.sum(dim)
        else:
            all_weights = weight.to(x.dtype)
            spread = scale * all_weights.sum() - (x * all_weights.view(along)).sum(dim)
        each = each * (1 - label_smoothing) + spread * (label_smoothing / classes)
    each = each.masked_fill(ignored, 0)  # also where it is infinite
    if reduction == _reduction.get_enum("none"):
        return each.view(target.shape).to(input.dtype)
    loss = each.sum()
    if reduction == _reduction.get_enum("mean"):
        # Counted in whole numbers, as float32 counts to 16 million only.
        loss = loss / ((~ignored).sum(dtype=torch.int32) if weight is None else weights.sum())
    return loss.to(input.dtype)


def one_hot(labels: Tensor, num_classes: int = -1) -> Tensor | None:
    """`torch.nn.functional.one_hot` of a known number of classes.

    By comparing: torch_xla scatters, with indices of 64 bits, see `indices`.
    """
    if num_classes < 1 or labels.dtype is not torch.int64:
        return None
    return (labels.unsqueeze(-1) == torch.arange(num_classes, device=labels.device)).to(torch.int64)
