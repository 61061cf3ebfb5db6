"""`InFlight`: back-pressure. The host starts steps ahead of the device, and sometimes waits for an older step."""

from abc import ABC, abstractmethod

from torch import Tensor


class InFlight(ABC):
    """Lets steps run ahead of the device, and waits for an older step when too many are pending.

    Attributes:
        pace: The current seconds per step; None until a long run of steps has been measured.
    """

    pace: float | None = None

    @abstractmethod
    def add(self, result: Tensor, nbytes: int) -> Tensor | None:
        """Note a step that was just started. **This may wait** for an older step.

        Args:
            result: A small result of the step.
            nbytes: The size of its batches.

        Returns:
            The result, on the host, of the step that this call waited for; None if it didn't wait.
        """


class NeverWaits(InFlight):
    """No step is waited for.

    Absent cores run none. A GPU computes in order, and its full queue blocks the host.
    """

    def add(self, result: Tensor, nbytes: int) -> Tensor | None:
        return None
