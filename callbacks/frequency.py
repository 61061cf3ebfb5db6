"""How often something is done while training, as a number of batches."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import ArgumentError


def batches(name: str, value: object, words: Mapping[str, int]) -> int:
    """Turn an argument that is a word or a number of batches into a number of batches.

    Args:
        name: The argument's name, for the error.
        value: What came.
        words: The words there are, each with what it stands for.

    Raises:
        ArgumentError: Neither of these words nor a whole number, 1 or more.

    Example:
        >>> batches("update_freq", "batch", {"epoch": 0, "batch": 1})
        1
    """
    if isinstance(value, str) and value in words:
        return words[value]
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise ArgumentError(f"{name} must be {', '.join(map(repr, words))} or a number of batches from 1, got {value!r}")
