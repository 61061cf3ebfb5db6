"""Decides when something is due, by training steps or seconds. Independent of hooks, models and the disk."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from ...errors import ArgumentError


def resolve_frequency(argument: str, value: object, words: Mapping[str, int]) -> int:
    """Return the number of batches that an argument, a word or a number of batches, stands for.

    Raises:
        ArgumentError: The value is neither one of the words nor a whole number of at least 1.

    Example:
        >>> resolve_frequency("update_freq", "batch", {"epoch": 0, "batch": 1})
        1
    """
    if isinstance(value, str) and value in words:
        return words[value]
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    choices = ", ".join(map(repr, words))
    raise ArgumentError(f"{argument} must be {choices} or a whole number of batches of at least 1, got {value!r}")


class SaveRule:
    """Decides when to save: after an epoch, or a number of steps or seconds after the last save.

    Args:
        save_freq: `"epoch"`, a number of batches, or a `timedelta`.

    Attributes:
        between_batches: True if checkpoints are due between batches, and not after epochs.

    Raises:
        ArgumentError: Another frequency.

    Example: every third step, while several steps may run as one graph.
        >>> rule = SaveRule(3)
        >>> [rule.is_due(steps, now=0.0) for steps in (1, 2, 3, 5, 7, 9)]
        [False, False, True, False, True, False]
    """

    def __init__(self, save_freq: str | int | timedelta) -> None:
        self._seconds = save_freq.total_seconds() if isinstance(save_freq, timedelta) else 0.0
        self._every = 0 if self._seconds else resolve_frequency("save_freq", save_freq, {"epoch": 0})
        self.between_batches = bool(self._every or self._seconds)
        self._steps = self._since = 0
        self._saved = 0.0

    def begin(self, steps: int) -> None:
        """Count from here: the model's steps may differ from before."""
        self._steps = steps

    def is_due(self, steps: int, now: float) -> bool:
        """True if a checkpoint is due after a batch, given the model's steps so far and the seconds of any clock."""
        self._since += steps - self._steps
        self._steps = steps
        if not self._every:
            return self._seconds > 0 and now - self._saved >= self._seconds
        due = self._since >= self._every
        if due:
            self._since = 0  # as in Keras: surplus steps of a joined graph aren't carried over
        return due

    def note_save(self, now: float) -> None:
        """Count seconds from here."""
        self._saved = now

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps since the last save."""
        return {"steps_since_save": self._since}

    def load_state_dict(self, state: Mapping[str, Any], steps: int) -> None:
        """Restore the dict that `state_dict` returned, given the model's steps so far."""
        self._since = state["steps_since_save"]
        self._steps = steps
