"""`FailedWrites`: failed writes raise warnings, then an error."""

from collections.abc import Iterator
from contextlib import contextmanager

from .user_code import warn


class FailedWrites:
    """Counts consecutive failed writes, because a disk is full or a server is gone.

    Args:
        most: The number of consecutive failures at which the failure is an error.

    Example:
        >>> failed = FailedWrites(most=1)
        >>> with failed.tolerate("log.csv"):
        ...     raise OSError("No space left on device")
        Traceback (most recent call last):
        OSError: No space left on device
    """

    def __init__(self, most: int = 3) -> None:
        self._most = most
        self._count = 0

    @contextmanager
    def tolerate(self, path: object) -> Iterator[None]:
        """Return a context for a write, in which a file system's error is a warning until there are `most` in a row."""
        try:
            yield
        except OSError as error:
            self.count(error, f"{path} can't be written: {error}")
        else:
            self.reset()

    def count(self, error: Exception, message: str) -> None:
        """Count a failed write: warn with the message, or raise the error if it is one too many."""
        self._count += 1
        if self._count >= self._most:
            raise error
        warn(f"{message}. Training continues", again=True)

    def reset(self) -> None:
        """Note that a write has succeeded."""
        self._count = 0
