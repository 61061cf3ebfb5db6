"""When something is done that is done at every so many training steps. With no hooks, no model and no disk."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from ...errors import ArgumentError


def batches(name: str, value: object, words: Mapping[str, int]) -> int:
    """Turn an argument, named in the error, that is a word or a number of batches into a number of batches.

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


class SaveRule:
    """Says when to save: after epochs, when so many steps were taken since the last time, or after so many seconds.

    Args:
        save_freq: `"epoch"`, a number of batches, or a `timedelta`.

    Attributes:
        between_batches: True if checkpoints are due between batches, and not after epochs.

    Raises:
        ArgumentError: Another frequency.

    Example: every third step, where several steps may have run as one graph.
        >>> rule = SaveRule(3)
        >>> [rule.is_due(steps, now=0.0) for steps in (1, 2, 3, 5, 7, 9)]
        [False, False, True, False, True, False]
    """

    def __init__(self, save_freq: str | int | timedelta) -> None:
        self._seconds = save_freq.total_seconds() if isinstance(save_freq, timedelta) else 0.0
        self._every = 0 if self._seconds else batches("save_freq", save_freq, {"epoch": 0})
        self.between_batches = bool(self._every or self._seconds)
        self._steps = self._since = 0
        self._saved = 0.0

    def begin(self, steps: int) -> None:
        """Go on counting from here: the model's own steps may be others than before."""
        self._steps = steps

    def is_due(self, steps: int, now: float) -> bool:
        """Say if a checkpoint is due after a batch, by the model's steps so far and the seconds of any clock."""
        self._since += steps - self._steps
        self._steps = steps
        if not self._every:
            return self._seconds > 0 and now - self._saved >= self._seconds
        due = self._since >= self._every
        if due:
            self._since = 0  # as Keras: the rest of steps joined to one graph isn't carried over
        return due

    def saved(self, now: float) -> None:
        """Count seconds from here."""
        self._saved = now

    def state_dict(self) -> dict[str, Any]:
        """The steps since the last time, as a number."""
        return {"since": self._since}

    def load_state_dict(self, state: Mapping[str, Any], steps: int) -> None:
        """Go on from the dict that `state_dict` returned, and the model's steps so far."""
        self._since = state["since"]
        self._steps = steps
