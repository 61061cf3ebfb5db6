"""Pictures as arrays of bytes, (height, width, 3). With no hooks and no model."""

from typing import Any

import numpy as np

from ...errors import ArgumentError

_FORMATS = ("HW", "HWC", "CHW", "NHW", "NHWC", "NCHW")


def pixels(image: Any, dataformats: str) -> np.ndarray[Any, Any]:
    """Turn a picture, or several side by side, of bytes or of floats from 0 to 1, into bytes.

    The order of its dimensions is H, W, perhaps C, and N in front for several.

    Raises:
        ArgumentError: An unknown order, other dimensions, or neither one nor three nor four channels.

    Example:
        >>> pixels(np.ones((1, 2, 5)), "CHW").shape, int(pixels(np.ones((2, 5)), "HW").max())
        ((2, 5, 3), 255)
        >>> pixels(np.zeros((4, 3, 2, 5), dtype="uint8"), "NCHW").shape
        (2, 20, 3)
    """
    found = np.asarray(image)
    if dataformats not in _FORMATS:
        raise ArgumentError(f"dataformats must be one of {', '.join(_FORMATS)}, got {dataformats!r}")
    if found.ndim != len(dataformats):
        raise ArgumentError(
            f"an image of dataformats={dataformats!r} has {len(dataformats)} dimensions, got {found.shape}"
        )
    order = dataformats if "C" in dataformats else dataformats + "C"
    found = found if "C" in dataformats else found[..., None]
    order, found = (order, found) if "N" in order else ("N" + order, found[None])
    found = found.transpose([order.index(side) for side in "NHWC"])
    if found.shape[-1] not in (1, 3, 4):
        raise ArgumentError(f"an image has 1, 3 or 4 channels, got {found.shape[-1]}: is dataformats right?")
    if found.dtype != np.uint8:
        found = (found.astype("float32").clip(0, 1) * 255).round().astype("uint8")
    beside = np.concatenate(list(found), axis=1)
    return np.repeat(beside, 3, axis=-1) if beside.shape[-1] == 1 else np.ascontiguousarray(beside[..., :3])


def drawn(figure: Any) -> np.ndarray[Any, Any]:
    """Draw a figure of matplotlib's."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    return np.ascontiguousarray(np.asarray(canvas.buffer_rgba())[..., :3])
