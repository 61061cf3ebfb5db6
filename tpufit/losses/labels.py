"""Checks of class labels on the host: a label that isn't a class of the output, because the device can't check it."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import LabelError
from ..utils.text import dtype_name

# Up to this many labels the range is found in a list; an array would take three times as long.
_SHORT = 256


class LabelRange(NamedTuple):
    """The smallest and the largest class label of a batch, and the shape and dtype of its targets."""

    smallest: int
    largest: int
    shape: torch.Size
    dtype: torch.dtype


def find_label_range(y: Tensor, ignored: int) -> LabelRange | None:
    """Find the smallest and largest class in a batch of host labels, without the ignored label.

    Only whole numbers are classes. None if there is nothing to check.

    Example:
        >>> find_label_range(torch.tensor([4, 2, -100]), -100)[:2]
        (2, 4)
    """
    shape = y.shape
    dtype = y.dtype
    if dtype.is_floating_point or y.is_meta or 0 in shape:
        return None
    ends = _find_range(y, ignored)
    return None if ends is None else LabelRange(*ends, shape, dtype)


def check_label_range(
    labels: LabelRange, classes: int, output_shape: Sequence[int] | None, ignored: int, prefix: str = ""
) -> None:
    """Raise `LabelError` for a label that isn't a class.

    Args:
        labels: The range of a batch's labels.
        classes: The number of classes, dimension 1 of the output, or dimension 0 of a vector.
        output_shape: The shape of the output; None if it isn't known, as in a replayed step.
        ignored: The label that the loss ignores, for the message.
        prefix: The start of the message (default: none).
    """
    smallest, largest, shape, dtype = labels
    if smallest < 0 or largest >= classes:
        if output_shape is not None and len(shape) > 1 and smallest >= 0:
            *positions, last = output_shape
            if positions == [*shape] and largest < last:
                raise LabelError(
                    f"{prefix}the loss finds {classes} classes in an output of shape {tuple(output_shape)}, and "
                    f"label {largest}: PyTorch expects the classes in dimension 1. Return the output transposed, "
                    "output.mT, or compile a causal language model of transformers with loss='module'"
                )
        raise LabelError(
            f"{prefix}label {largest if largest >= classes else smallest} is outside the module's {classes} "
            f"classes (0 to {classes - 1}), in a batch of targets of shape {tuple(shape)}, {dtype_name(dtype)}. "
            "Number the classes from 0, give the last layer more outputs, or mark labels to ignore with "
            f"ignore_index ({ignored})"
        )


def _find_range(y: Tensor, ignored: int) -> tuple[int, int] | None:
    """Return the smallest and largest class, or None if all labels are ignored."""
    ends = _find_ends(y)
    if ignored not in ends:
        return ends
    labels = y.numpy()
    kept = torch.from_numpy(labels[labels != ignored])
    return _find_ends(kept) if len(kept) else None


def _find_ends(y: Tensor) -> tuple[int, int]:
    """Return the smallest and largest label; optimized for a call between two steps, with cold caches."""
    shape = y.shape
    if len(shape) == 1 and shape[0] <= _SHORT:
        labels = y.tolist()
        return int(min(labels)), int(max(labels))
    array = y.numpy()
    # Calls the ufuncs directly, because `min` and `max` run more Python.
    return int(np.minimum.reduce(array, axis=None)), int(np.maximum.reduce(array, axis=None))
