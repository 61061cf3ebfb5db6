"""How often something is done while training, as a number of batches."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import ArgumentError


class Every:
    """Counts batches, of which several may come at once, and says when so many more have been trained on.

    Args:
        batches: How many; 0 is never.

    Attributes:
        every: The number given.
        seen: How many have been counted in all.

    Example:
        >>> every = Every(3)
        >>> [every.reaches(batch) for batch in (1, 3, 5)]  # steps_per_execution=2
        [False, True, True]
    """

    def __init__(self, batches: int) -> None:
        self.every, self._last = batches, -1
        self.seen = 0

    def end_epoch(self) -> None:
        """From here on batches are numbered from 0 again."""
        self._last = -1

    def reaches(self, batch: int) -> bool:
        """Count up to a batch.

        Args:
            batch: Its number in the epoch.

        Returns:
            Whether a multiple of the batches has been reached since the last call.
        """
        before = self.seen
        self.seen += batch - self._last
        self._last = batch
        return bool(self.every) and self.seen // self.every > before // self.every

    def state_dict(self) -> dict[str, int]:
        """How far it has counted."""
        return {"seen": self.seen, "last": self._last}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from a state.

        Args:
            state: What `state_dict` returned.
        """
        self.seen, self._last = state["seen"], state["last"]


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
