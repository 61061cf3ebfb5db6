"""`LazyLogs`: a batch's logs, which wait for the device only when they are read."""

from collections import UserDict
from collections.abc import Callable, Sequence
from typing import Any

_UNREAD = object()


class LazyLogs(UserDict[str, Any]):
    """A batch's logs: a dict whose numbers stay on the device until a read, which fetches all of them at once.

    Names, length and membership cost nothing. A callback may write into it as into a dict. Even a late read returns the
    values of this batch.

    Args:
        names: The names of the logs.
        read: Waits for the device and returns the logs.

    Example:
        >>> logs = LazyLogs(["loss"], lambda: {"loss": 0.5})
        >>> len(logs), logs["loss"], dict(logs)
        (1, 0.5, {'loss': 0.5})
    """

    def __init__(self, names: Sequence[str], read: Callable[[], dict[str, Any]]) -> None:
        super().__init__(dict.fromkeys(names, _UNREAD))
        self._read: Callable[[], dict[str, Any]] | None = read

    def __getitem__(self, name: str) -> Any:
        if self.data[name] is _UNREAD and self._read is not None:
            for key, value in self._read().items():
                if self.data.get(key) is _UNREAD:  # a value that a callback has written stays
                    self.data[key] = value
            self._read = None  # last, because another thread may be reading
        return self.data[name]

    def __repr__(self) -> str:
        return repr(self.data if self._read is None else f"LazyLogs({', '.join(self.data)}: not read yet)")
