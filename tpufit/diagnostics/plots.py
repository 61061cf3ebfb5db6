"""Pictures of a training, by matplotlib, which is an extra: `pip install 'tpufit[plot]'`.

Matplotlib is imported when the first picture is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ArgumentError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_TEXT = 30  # a confusion matrix of more classes has no numbers written into it


def new_axes(count: int = 1, side: tuple[float, float] = (5.0, 3.5)) -> tuple[Figure, list[Axes]]:
    """Axes side by side in a new figure, in the style of all pictures here; `side` is width and height in inches.

    Raises:
        ImportError: Matplotlib is not installed.
    """
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("drawing needs matplotlib: pip install 'tpufit[plot]'") from error
    figure, axes = pyplot.subplots(1, count, figsize=(side[0] * count, side[1]), squeeze=False, layout="constrained")
    for ax in axes[0]:
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    return figure, list(axes[0])


def curves(lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> Figure:
    """Draw the logs of a training over its epochs, each in a picture of its own, with validation beside training.

    Args:
        lines: The epochs and the values of each log; `val_loss` goes into the picture of `loss`.

    Returns:
        Matplotlib's `Figure`.

    Raises:
        ImportError: Matplotlib is not installed.
        ArgumentError: There is nothing to draw.

    Example:
        >>> figure = curves({"loss": ([1, 2], [0.5, 0.3]), "val_loss": ([2], [0.4]), "accuracy": ([1, 2], [0.7, 0.8])})
        >>> [ax.get_title() for ax in figure.axes]
        ['loss', 'accuracy']
    """
    titles = list(dict.fromkeys(name.removeprefix("val_") for name in lines))
    if not titles:
        raise ArgumentError("there are no logs to draw: plot() is for the history of a training")
    figure, axes = new_axes(len(titles))
    from matplotlib.ticker import MaxNLocator

    for ax, title in zip(axes, titles, strict=True):
        for name, label in ((title, "training"), (f"val_{title}", "validation")):
            if name in lines:
                epochs, values = lines[name]
                ax.plot(epochs, values, marker="." if len(epochs) < 30 else None, label=label)
        ax.set(title=title, xlabel="epoch")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.legend()
    return figure


def confusion_matrix(matrix: Any, labels: Sequence[object] | None = None) -> Figure:
    """Draw a confusion matrix: a row for each true class, a column for each predicted one.

    The darkness of a cell is its share of the row, so that rare classes show as well.

    Args:
        matrix: Counts or shares of shape `(classes, classes)`, as `torchmetrics.ConfusionMatrix` computes them.
        labels: The names of the classes (default: their numbers, from 0).

    Returns:
        Matplotlib's `Figure`.

    Raises:
        ImportError: Matplotlib is not installed.
        ArgumentError: The matrix has another shape, or there is another number of labels.

    Example:
        >>> figure = confusion_matrix([[8, 2], [1, 9]], labels=["cat", "dog"])
        >>> [text.get_text() for text in figure.axes[0].texts]
        ['8', '2', '1', '9']
    """
    counts = np.asarray(matrix)
    if counts.ndim != 2 or counts.shape[0] != counts.shape[1]:
        cure = "Of several labels, each has its own: draw matrix[i]"
        raise ArgumentError(f"matrix must be of shape (classes, classes), got {counts.shape}. {cure}")
    classes = len(counts)
    names = [str(label) for label in (range(classes) if labels is None else labels)]
    if len(names) != classes:
        raise ArgumentError(f"labels must be {classes}, one a class, got {len(names)}")
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1e-12)
    size = max(4.0, min(12.0, 0.5 * classes + 1.5))
    figure, (ax,) = new_axes(side=(size, size))
    ax.grid(visible=False)
    ax.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    places = range(classes)
    ax.set(xlabel="predicted", ylabel="true", xticks=places, yticks=places, yticklabels=names)
    ax.set_xticklabels(names, rotation=90 if max(map(len, names)) > 3 else 0)
    if classes <= _MOST_TEXT:
        for row, column in np.ndindex(counts.shape):
            value = counts[row, column]
            text = f"{value:.2f}" if np.issubdtype(counts.dtype, np.floating) else str(value)
            color = "white" if shares[row, column] > 0.5 else "black"
            ax.text(column, row, text, ha="center", va="center", color=color)
    return figure
