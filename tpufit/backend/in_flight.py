"""`InFlight`: back-pressure. Steps run ahead of the device, which the host waits for now and then."""

from abc import ABC, abstractmethod

from torch import Tensor


class InFlight(ABC):
    """Lets steps run ahead of the device, and waits for an older one when they are too many.

    Attributes:
        pace: The seconds that a step takes by now, or None as long as no long run of steps has been measured.
    """

    pace: float | None = None

    @abstractmethod
    def add(self, result: Tensor, nbytes: int) -> Tensor | None:
        """Note a step that was just started. **This may wait** for an older one.

        Args:
            result: A small result of the step.
            nbytes: The size of its batches.

        Returns:
            The result of the step that was waited for, on the host; None if none was.
        """
