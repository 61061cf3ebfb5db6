"""`FailedWrites`: files that can't be written are a warning, and in the end an error. With no hooks and no model."""

from collections.abc import Iterator
from contextlib import contextmanager

from ...utils.users_code import warn


class FailedWrites:
    """Counts the writes in a row that have failed, because a disk is full or a server is gone.

    Args:
        most: The number in a row at which the failure is an error.

    Example:
        >>> failed = FailedWrites(most=1)
        >>> with failed.tolerated("log.csv"):
        ...     raise OSError("No space left on device")
        Traceback (most recent call last):
        OSError: No space left on device
    """

    def __init__(self, most: int = 3) -> None:
        self._most = most
        self._count = 0

    @contextmanager
    def tolerated(self, path: object) -> Iterator[None]:
        """A context in which something is written; an error of the file system is a warning, but not the last one."""
        try:
            yield
        except OSError as error:
            self._count += 1
            if self._count >= self._most:
                raise
            warn(f"{path} can't be written: {error}. Training goes on", again=True)
        else:
            self._count = 0
