"""Draws pictures of a training with matplotlib, an extra: `pip install 'tpufit[plot]'`.

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

_MOST_TEXT = 30  # the most classes of a confusion matrix with numbers in the cells


def make_axes(count: int = 1, side: tuple[float, float] = (5.0, 3.5)) -> tuple[Figure, list[Axes]]:
    """Make axes side by side in a new figure, in the style of these pictures; `side` is width and height in inches.

    Raises:
        ImportError: Matplotlib is not installed.
    """
    figure, axes = _subplots(1, count, side)
    for ax in axes:
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _subplots(rows: int, columns: int, side: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    require_matplotlib()
    from matplotlib import pyplot

    from .shown_once import ShownOnce

    size = side[0] * columns, side[1] * rows
    figure, axes = pyplot.subplots(
        rows, columns, figsize=size, squeeze=False, layout="constrained", FigureClass=ShownOnce
    )
    return figure, list(axes.flat)


def require_matplotlib() -> None:
    """Raise an `ImportError` that names the extra, if matplotlib isn't installed."""
    try:
        import matplotlib.pyplot  # noqa: F401
    except ImportError as error:
        raise ImportError("drawing needs matplotlib: pip install 'tpufit[plot]'") from error


def close(figure: Figure) -> None:
    """Close a figure, which pyplot would otherwise keep and show."""
    from matplotlib import pyplot

    pyplot.close(figure)


def curves(lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> Figure:
    """Draw a training's logs over the epochs, each in its own chart, with training and validation together.

    Args:
        lines: The epochs and the values of each log; `val_loss` goes into the chart of `loss`.

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
    figure, axes = make_axes(len(titles))
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
    """Draw a confusion matrix: a row for each true class, a column for each predicted class.

    A cell's darkness is its share of the row, so that rare classes are visible, too.

    Args:
        matrix: Counts or shares of shape `(classes, classes)`, as `torchmetrics.ConfusionMatrix` computes them.
        labels: The names of the classes (default: their numbers, from 0).

    Returns:
        Matplotlib's `Figure`.

    Raises:
        ImportError: Matplotlib is not installed.
        ArgumentError: The matrix isn't square, or the number of labels differs.

    Example:
        >>> figure = confusion_matrix([[8, 2], [1, 9]], labels=["cat", "dog"])
        >>> [text.get_text() for text in figure.axes[0].texts]
        ['8', '2', '1', '9']
    """
    counts = np.asarray(matrix)
    if counts.ndim != 2 or counts.shape[0] != counts.shape[1]:
        cure = "Multilabel metrics have a matrix per label: draw matrix[i]"
        raise ArgumentError(f"matrix must be of shape (classes, classes), got {counts.shape}. {cure}")
    classes = len(counts)
    names = [str(label) for label in (range(classes) if labels is None else labels)]
    if len(names) != classes:
        raise ArgumentError(f"labels must be {classes}, one per class, got {len(names)}")
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1e-12)
    size = max(4.0, min(12.0, 0.5 * classes + 1.5))
    figure, (ax,) = make_axes(side=(size, size))
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


def images(pictures: Any, titles: Sequence[object] | None = None) -> Figure:
    """Draw images in a grid, each below its title.

    Args:
        pictures: An array or a tensor on the host, of shape `(rows, channels, height, width)`, `(rows, height, width,
            channels)` or `(rows, height, width)`. Bytes are shown unchanged; other numbers are scaled from their
            smallest to their largest value.
        titles: A title for each image (default: none).

    Returns:
        Matplotlib's `Figure`.

    Raises:
        ImportError: Matplotlib is not installed.
        ArgumentError: The array has another shape.

    Example:
        >>> figure = images(np.zeros((3, 1, 8, 8)), ["a", "b", "c"])
        >>> [ax.get_title() for ax in figure.axes]
        ['a', 'b', 'c']
    """
    pixels = np.asarray(pictures)
    channels = (1, 3, 4)
    if pixels.ndim == 4 and pixels.shape[1] in channels:
        pixels = np.moveaxis(pixels, 1, -1)
    if pixels.ndim not in (3, 4) or not len(pixels) or (pixels.ndim == 4 and pixels.shape[-1] not in channels):
        raise ArgumentError(
            "images are of shape (rows, channels, height, width), (rows, height, width, channels) or (rows, height, "
            f"width), with 1, 3 or 4 channels, got {pixels.shape}"
        )
    pixels = pixels[..., 0] if pixels.ndim == 4 and pixels.shape[-1] == 1 else pixels
    if pixels.dtype != np.uint8:
        pixels = pixels.astype("float32")
        least, most = pixels.min(), pixels.max()
        pixels = (pixels - least) / max(most - least, 1e-12)
    columns = int(np.ceil(np.sqrt(len(pixels))))
    figure, axes = _subplots(int(np.ceil(len(pixels) / columns)), columns, (2.0, 2.4))
    most_shown = 255 if pixels.dtype == np.uint8 else 1
    for i, ax in enumerate(axes):
        if i >= len(pixels):
            ax.remove()
            continue
        ax.imshow(pixels[i], cmap="gray", vmin=0, vmax=most_shown)
        ax.set_axis_off()
        if titles is not None:
            ax.set_title(str(titles[i]), fontsize="small")
    return figure
