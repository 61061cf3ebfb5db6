"""`pad_batch`: pads a short batch to the rows of the others."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..errors import DataError
from .batches import count_rows, describe_value, unpack


def pad_batch(batch: Any, rows: int, label: int) -> Any:
    """Pad a batch of host tensors to a number of rows, with copies of its last row that have an ignored label.

    Args:
        batch: `(x, y)` or `(x, y, sample_weight)`, with one tensor of labels as targets.
        rows: The number of rows; a batch that has as many is returned unchanged.
        label: The label that the loss ignores.

    Raises:
        DataError: The targets aren't labels.

    Example:
        >>> pad_batch((torch.tensor([1.0, 2.0]), torch.tensor([0, 1])), 4, -100)
        (tensor([1., 2., 2., 2.]), tensor([   0,    1, -100, -100]))
    """
    missing = rows - count_rows(tree_leaves(batch))
    if missing <= 0:
        return batch
    _, y, _ = unpack(batch)
    require_labels(y)

    def pad_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim():
            return leaf
        last = leaf[-1:].expand(missing, *leaf.shape[1:])
        return torch.cat([leaf, torch.full_like(last, label) if leaf is y else last])

    return tree_map(pad_leaf, batch)


def require_labels(y: Any) -> None:
    """Check that targets are labels, one of which the loss can ignore.

    Raises:
        DataError: They aren't labels.
    """
    if not isinstance(y, Tensor) or y.is_floating_point() or y.dtype in (torch.bool, torch.uint8):
        what = f"{y.dtype} of shape {tuple(y.shape)}" if isinstance(y, Tensor) else describe_value(y)
        raise DataError(
            "last_batch='pad' marks padding by a label that the loss ignores, and the targets aren't labels (signed "
            f"whole numbers): {what}. Pass last_batch='exact' or 'drop'"
        )
