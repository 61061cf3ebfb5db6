"""Pictures of data and predictions: `show_batch` and `show_top_losses`."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from .data.batches import unpack
from .data.stream import make_stream
from .data.user_data import recognize
from .diagnostics import plots
from .errors import ArgumentError, require_whole
from .model import Model
from .runtime import process_count

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Labels = Sequence[object] | None


def show_batch(x: Any, y: Any = None, count: int = 16, *, labels: Labels = None) -> Figure:
    """Draw the first images of data with their targets, as `fit` would read them.

    Args:
        x: Images, of shape `(rows, channels, height, width)`, `(rows, height, width, channels)` or
            `(rows, height, width)`, or a `Dataset`, a `DataLoader` or another iterable of batches.
        y: Targets, with arrays (default: none).
        count: The largest number of images (default 16).
        labels: The names of the classes (default: their numbers, from 0).

    Returns:
        Matplotlib's `Figure`. All images are brightened or darkened alike, so that their values fill the range.

    Raises:
        ArgumentError: The data aren't images.
        ImportError: Matplotlib is not installed.

    Example:
        >>> import torch, tpufit
        >>> figure = tpufit.show_batch(torch.rand(40, 1, 8, 8), torch.arange(40) % 2, count=4, labels=["cat", "dog"])
        >>> [ax.get_title() for ax in figure.axes]
        ['cat', 'dog', 'cat', 'dog']

    Source: `show_batch` of fastai.
    """
    count = require_whole("count", count)
    data = recognize(x, y)
    batch = next(iter(make_stream(data, batch_size=None if data.has_batches else count).epoch(0)))
    images, targets, _ = unpack(batch)
    titles = None
    if isinstance(targets, Tensor) and targets[0].numel() == 1:
        titles = [_name(target, labels) for target in targets[:count].flatten()]
    return plots.images(_pick_images(images)[:count], titles)


def show_top_losses(
    model: Model,
    x: Any,
    y: Any = None,
    count: int = 9,
    *,
    labels: Labels = None,
    loss: Callable[[Any, Any], Any] | None = None,
    batch_size: int | str | None = None,
) -> Figure:
    """Draw the images with the largest losses of a model, with their row numbers, targets and predictions.

    Predicts batch by batch, and computes the loss of each row separately, on the host.

    Args:
        model: A compiled model.
        x: As in `show_batch`.
        y: Targets, with arrays (default: none; other data yield them).
        count: The number of images (default 9).
        labels: The names of the classes (default: their numbers, from 0).
        loss: A function of (prediction, target), for batches of one row (default: the model's loss).
        batch_size: Rows per core, as in `Model.predict` (default 32).

    Returns:
        Matplotlib's `Figure`, with the largest loss first. Rows are counted from 0.

    Raises:
        ArgumentError: The data aren't images, or have no targets; the loss keeps tensors on the device; or there are
            several hosts.
        ImportError: Matplotlib is not installed.

    Example:
        >>> import torch, tpufit
        >>> model = tpufit.Model(torch.nn.Flatten())  # predicts the brighter of two pixels
        >>> model.compile(None, "cross_entropy")
        >>> x = torch.tensor([[1.0, 0.0], [9.0, 0.0], [0.0, 1.0]]).view(3, 1, 1, 2)
        >>> figure = tpufit.show_top_losses(model, x, torch.tensor([0, 1, 1]), count=1, labels=["left", "right"])
        >>> figure.axes[0].get_title()
        'row 1, loss 9\\nright, not left'

    Source: `plot_top_losses` of fastai.
    """
    count = require_whole("count", count)
    if process_count() > 1:
        raise ArgumentError(
            "show_top_losses needs all rows on one host, but there are several hosts: run it on a single host"
        )
    row_loss = _make_row_loss(model) if loss is None else lambda _, target, predicted: loss(predicted, target)
    top: list[tuple[float, int, Any, Any, Any]] = []
    row = 0
    for batch in model.batches(x, y, batch_size=batch_size, shuffle=False):
        inputs, targets, _ = unpack(batch)
        if targets is None:
            raise ArgumentError("show_top_losses needs targets: pass y, or data that yield (x, y)")
        predicted = tree_map(torch.as_tensor, model.predict_on_batch(inputs))
        for i in range(len(tree_leaves(targets)[0])):
            sample = tuple(_take_row(nest, i) for nest in (inputs, targets, predicted))
            with torch.no_grad():
                value = float(row_loss(*sample))
            value = math.inf if math.isnan(value) else value
            if len(top) < count or value > top[0][0]:
                entry = (value, -row, *(_copy(nest) for nest in sample))
                (heapq.heappush if len(top) < count else heapq.heapreplace)(top, entry)
            row += 1
    top.sort(key=lambda entry: entry[:2], reverse=True)
    images = torch.cat([_pick_images(entry[2]) for entry in top])
    return plots.images(images, [_title(*entry, labels=labels) for entry in top])


def _make_row_loss(model: Model) -> Callable[[Any, Any, Any], Any]:
    """Return a function that computes the model's loss of one row of inputs, targets and predictions on the host."""
    modules = [part for part in tree_leaves(model.loss) if isinstance(part, nn.Module)]
    if any(True for module in modules for _ in (*module.parameters(), *module.buffers())):
        raise ArgumentError(
            "show_top_losses computes the loss of each row on the host, and the model's loss keeps tensors on the "
            "device: pass a function of (prediction, target), e.g. loss=torch.nn.functional.cross_entropy"
        )
    return lambda inputs, targets, predicted: model.compute_loss(inputs, targets, predicted)


def _take_row(nest: Any, i: int) -> Any:
    return tree_map(lambda leaf: leaf[i : i + 1] if isinstance(leaf, Tensor) and leaf.dim() else leaf, nest)


def _copy(nest: Any) -> Any:
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, nest)


def _title(value: float, negative_row: int, _: Any, target: Any, predicted: Any, labels: Labels) -> str:
    title = f"row {-negative_row}, loss {value:.3g}"
    if not isinstance(target, Tensor) or target.numel() != 1 or not isinstance(predicted, Tensor):
        return title
    true = target.flatten()[0]
    if not true.is_floating_point() and predicted.dim() == 2 and predicted.shape[1] > 1:
        best = predicted.argmax()
        wrong = "" if best == true else f", not {_name(best, labels)}"
    else:
        wrong = f", not {predicted.item():.4g}" if predicted.numel() == 1 else ""
    return f"{title}\n{_name(true, labels)}{wrong}"


def _name(target: Tensor, labels: Labels) -> str:
    if target.is_floating_point():
        return f"{target.item():.4g}"
    number = int(target)
    return str(number) if labels is None or not 0 <= number < len(labels) else str(labels[number])


def _pick_images(inputs: Any) -> Any:
    """Return the first part of inputs that has the shape of images."""
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, (Tensor, np.ndarray))]
    images = next((tensor for tensor in tensors if tensor.ndim in (3, 4)), None)
    if images is None:
        shapes = [tuple(tensor.shape) for tensor in tensors]
        raise ArgumentError(
            "images must have shape (rows, channels, height, width), (rows, height, width, channels) or (rows, height, "
            f"width), got {shapes[0] if len(shapes) == 1 else shapes}"
        )
    return images
