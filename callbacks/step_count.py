"""`StepCount`: how many steps have been taken, told from the numbers of their batches. With no hooks and no model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class StepCount:
    """Counts training steps, and says when it is time for what is done every so often.

    Args:
        every: After how many steps it is time; 0 is never.

    Attributes:
        steps: The steps so far, over all epochs.

    Example: two epochs of three batches; then one of four, of which every two run as one graph.
        >>> count = StepCount(every=2)
        >>> [count.advance(batch) for batch in (0, 1, 2, 0, 1, 2)]
        [False, True, False, True, False, True]
        >>> [count.advance(batch) for batch in (1, 3)], count.steps
        ([True, True], 10)
    """

    def __init__(self, every: int) -> None:
        self.steps = 0
        self._every = every
        self._last = -1  # the batch before, in its epoch

    def begin(self) -> None:
        """Another training begins; its first batch belongs to no epoch before."""
        self._last = -1

    def advance(self, batch: int) -> bool:
        """Take a batch in.

        Args:
            batch: Its number in its epoch, from 0; that of the last one, if several have run as one.

        Returns:
            Whether it is time.
        """
        before = self.steps
        self.steps += batch - self._last if batch > self._last else batch + 1
        self._last = batch
        return self._every > 0 and self.steps // self._every > before // self._every

    def state_dict(self) -> dict[str, Any]:
        """What is known so far, as numbers."""
        return {"steps": self.steps, "last": self._last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Args:
            state: What `state_dict` returned.
        """
        self.steps, self._last = state["steps"], state["last"]
