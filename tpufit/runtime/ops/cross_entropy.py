"""Cross-entropy in two passes over the logits, and one-hot vectors; each core computes its own rows."""

import torch
from torch import Tensor
from torch.nn import _reduction

from ..trace_context import assuming_finite
from .views import restore_rows


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """`torch.nn.functional.cross_entropy` of labels.

    The label's logit is selected by a comparison, in 32 bits: an index would be a gather, which the compiler doesn't
    fuse. `masked_fill` sets ignored elements to zero; `where` would create a tensor for its zero in each pass. Logits
    that were flattened to `(batch * time, classes)` are read in their original shape.
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
    x = restore_rows(input) if input.dim() == 2 else input
    dim = 1 if x is input else x.dim() - 1
    labels = target.to(torch.int32 if abs(ignore_index) < 2**31 else torch.int64)
    if x is not input:
        labels = labels.view(x.shape[:-1])
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    along = (-1, *(1,) * (x.dim() - dim - 1))  # the shape of a vector of classes that broadcasts to the logits
    numbers = torch.arange(classes, dtype=torch.int32, device=x.device)
    others = (numbers.view(along) if len(along) > 1 else numbers) != labels.unsqueeze(dim)
    with assuming_finite():  # infinite logits give NaN in PyTorch too
        scale = torch.logsumexp(x, dim)
    ignored = labels == labels.new_full((), ignore_index)  # a Python int would be compared in 64 bits
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
    each = each.masked_fill(ignored, 0)  # also infinite losses
    if reduction == _reduction.get_enum("none"):
        return each.view(target.shape).to(input.dtype)
    loss = each.sum()
    if reduction == _reduction.get_enum("mean"):
        # Counted as integers, because float32 is exact only up to 16 million.
        loss = loss / ((~ignored).sum(dtype=torch.int32) if weight is None else weights.sum())
    return loss.to(input.dtype)


def one_hot(labels: Tensor, num_classes: int = -1) -> Tensor | None:
    """`torch.nn.functional.one_hot` with a known number of classes.

    It compares labels, because torch_xla scatters with 64-bit indices, see `indices`.
    """
    if labels.dtype is not torch.int64:  # PyTorch's check, which its decomposition lacks in 2.13
        raise RuntimeError("one_hot is only applicable to index tensor of type LongTensor.")
    if num_classes < 1:
        return None
    return (labels.unsqueeze(-1) == torch.arange(num_classes, device=labels.device)).to(torch.int64)
