"""Pictures as arrays of bytes, (height, width, 3). Independent of hooks and models."""

from typing import Any

import numpy as np

from ...errors import ArgumentError

_FORMATS = ("HW", "HWC", "CHW", "NHW", "NHWC", "NCHW")


def to_pixels(image: Any, dataformats: str) -> np.ndarray[Any, Any]:
    """Convert a picture, or several side by side, of bytes or of floats from 0 to 1, to bytes.

    `dataformats` is the order of the dimensions: H, W, optionally C, and a leading N for several pictures.

    Raises:
        ArgumentError: An unknown order, wrong dimensions, or channels other than 1, 3 or 4.

    Example:
        >>> to_pixels(np.ones((1, 2, 5)), "CHW").shape, int(to_pixels(np.ones((2, 5)), "HW").max())
        ((2, 5, 3), 255)
        >>> to_pixels(np.zeros((4, 3, 2, 5), dtype="uint8"), "NCHW").shape
        (2, 20, 3)
    """
    array = np.asarray(image)
    if dataformats not in _FORMATS:
        raise ArgumentError(f"dataformats must be one of {', '.join(_FORMATS)}, got {dataformats!r}")
    if array.ndim != len(dataformats):
        raise ArgumentError(
            f"an image of dataformats={dataformats!r} has {len(dataformats)} dimensions, got {array.shape}"
        )
    order = dataformats if "C" in dataformats else dataformats + "C"
    array = array if "C" in dataformats else array[..., None]
    order, array = (order, array) if "N" in order else ("N" + order, array[None])
    array = array.transpose([order.index(side) for side in "NHWC"])
    if array.shape[-1] not in (1, 3, 4):
        raise ArgumentError(f"an image has 1, 3 or 4 channels, got {array.shape[-1]}: is dataformats right?")
    if array.dtype != np.uint8:
        array = (array.astype("float32").clip(0, 1) * 255).round().astype("uint8")
    joined = np.concatenate(list(array), axis=1)
    return np.repeat(joined, 3, axis=-1) if joined.shape[-1] == 1 else np.ascontiguousarray(joined[..., :3])


def draw_figure(figure: Any) -> np.ndarray[Any, Any]:
    """Draw a matplotlib figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    return np.ascontiguousarray(np.asarray(canvas.buffer_rgba())[..., :3])
