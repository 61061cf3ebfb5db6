"""`Frequency`: something that is done at every so many training steps. With no hooks and no model."""

from collections.abc import Mapping

from ...errors import ArgumentError


def batches(name: str, value: object, words: Mapping[str, int]) -> int:
    """Turn an argument that is a word or a number of batches into a number of batches.

    Args:
        name: The argument's name, for the error.
        value: The argument.
        words: The number of batches that each word stands for.

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


class Frequency:
    """Says when something is due that is done at every so many training steps.

    Args:
        every: The number of steps; 0 is never.

    Example: every third step, where several steps may have run as one graph.
        >>> frequency = Frequency(every=3)
        >>> [frequency.is_due(steps) for steps in (1, 2, 3, 5, 7)]
        [False, False, True, False, True]
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._steps = 0

    def begin(self, steps: int) -> None:
        """Count from here: nothing is due for the steps before.

        Args:
            steps: The steps taken so far.
        """
        self._steps = steps

    def is_due(self, steps: int) -> bool:
        """Take note of the steps, and say if a multiple of `every` was reached since the last call.

        Args:
            steps: The steps taken so far.
        """
        before, self._steps = self._steps, steps
        return self.every > 0 and steps // self.every > before // self.every
