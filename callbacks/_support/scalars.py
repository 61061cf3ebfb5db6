"""The logs that are single numbers, and numbers as text for people."""

from collections.abc import Mapping
from typing import Any


def extract_scalars(logs: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the logs that are single numbers, as floats. If they are lazy, this waits for the device.

    Other logs, such as an array with a value per class, are omitted.

    Example:
        >>> import numpy as np
        >>> extract_scalars({"loss": np.float32(0.5), "recall_by_class": np.zeros(3), "note": "x"})
        {'loss': 0.5}
    """
    numbers = {}
    for name, value in (logs or {}).items():
        number = as_scalar(value)
        if number is not None:
            numbers[name] = number
    return numbers


def as_scalar(value: Any) -> float | None:
    """Return a single number as a float, and None for anything else."""
    if isinstance(value, (int, float)):
        return float(value)
    if hasattr(value, "item") and hasattr(value, "shape") and all(side == 1 for side in value.shape):
        item = value.item()
        return float(item) if isinstance(item, (int, float)) else None
    return None


def as_text(value: float) -> str:
    """Format a number with four decimals, or with an exponent if it is too small for them.

    Example:
        >>> as_text(0.123456), as_text(0.000123456), as_text(0)
        ('0.1235', '1.2346e-04', '0.0000')
    """
    return f"{value:.4e}" if 0 < abs(value) < 1e-3 else f"{value:.4f}"
