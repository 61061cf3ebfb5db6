"""`ProfiledSteps`: profiles some training steps."""

import os
from collections.abc import Callable, Sequence

from ...errors import ArgumentError
from ...runtime import start_profile
from ..base import Logs
from .scalars import extract_scalars


class ProfiledSteps:
    """Profiles some training steps.

    Args:
        profile_batch: See `TensorBoard`.

    Raises:
        ArgumentError: `profile_batch` is neither 0, nor a step, nor a first and a last step.
    """

    def __init__(self, profile_batch: int | Sequence[int]) -> None:
        pair = tuple(profile_batch) if isinstance(profile_batch, Sequence) else (profile_batch, profile_batch)
        whole = len(pair) == 2 and all(isinstance(step, int) and not isinstance(step, bool) for step in pair)
        if not whole or (not 1 <= pair[0] <= pair[1] and profile_batch != 0):
            raise ArgumentError(
                f"profile_batch must be a step from 1, or the first and the last of several, e.g. (10, 12), got "
                f"{profile_batch!r}"
            )
        self._due = pair if profile_batch else None
        self._stop: Callable[[], None] | None = None  # while profiling

    def update(self, steps: int, logs: Logs | None, folder: str) -> None:
        """Begin before the first of the steps, and end after the last. Both read the logs, to wait for the device."""
        if self._due is None:
            return
        first, last = self._due
        if self._stop is None and first - 1 <= steps < last:
            extract_scalars(logs)  # else the profile would include earlier steps that still run
            self._stop = start_profile(os.path.join(folder, "train"))
        elif self._stop is not None and steps >= last:
            extract_scalars(logs)  # else the profile would end before the device has finished the last step
            self.stop()

    def stop(self) -> None:
        """End the profile, if it has begun."""
        if self._stop is not None:
            stop, self._stop = self._stop, None
            self._due = None
            stop()
