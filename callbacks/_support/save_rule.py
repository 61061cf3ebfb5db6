"""`SaveRule`: says when a checkpoint is due. With no hooks, no model and no disk."""

from datetime import timedelta

from .frequency import Frequency, batches


class SaveRule:
    """Says when to save: after epochs, at every so many steps, or after every so many seconds.

    Args:
        save_freq: `"epoch"`, a number of batches, or a `timedelta`.

    Attributes:
        between_batches: True if checkpoints are due between batches, and not after epochs.

    Raises:
        ArgumentError: Another frequency.

    Example:
        >>> rule = SaveRule(timedelta(minutes=10))
        >>> rule.saved(now=0.0)
        >>> rule.is_due(steps=1, now=599.0), rule.is_due(steps=2, now=600.0)
        (False, True)
    """

    def __init__(self, save_freq: str | int | timedelta) -> None:
        self._seconds = save_freq.total_seconds() if isinstance(save_freq, timedelta) else 0.0
        self._frequency = Frequency(0 if self._seconds else batches("save_freq", save_freq, {"epoch": 0}))
        self.between_batches = bool(self._frequency.every or self._seconds)
        self._saved = 0.0

    def begin(self, steps: int) -> None:
        """Count steps from here.

        Args:
            steps: The steps taken so far.
        """
        self._frequency.begin(steps)

    def is_due(self, steps: int, now: float) -> bool:
        """Say if a checkpoint is due after a batch.

        Args:
            steps: The steps taken so far.
            now: The time, in seconds of any clock.
        """
        return self._frequency.is_due(steps) or (self._seconds > 0 and now - self._saved >= self._seconds)

    def saved(self, now: float) -> None:
        """Count seconds from here.

        Args:
            now: The time.
        """
        self._saved = now
