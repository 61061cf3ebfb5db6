"""`RemoteMonitor`: sends the logs of every epoch to a server."""

import json
import urllib.parse
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any

from ..errors import ArgumentError
from ..utils.user_code import warn
from .base import Callback, Logs

_TIMEOUT = 10.0  # seconds
_TIMEOUT_WHILE_DOWN = 1.0  # else a server that never answers would cost ten seconds per epoch


class RemoteMonitor(Callback):
    """Sends the logs of each epoch to a server, by HTTP POST as JSON: `{"epoch": 0, "loss": 0.5}`.

    If the server can't be reached, or refuses, there is one warning; training continues, and later epochs are still
    sent.

    Args:
        root: The server (default `"http://localhost:9000"`).
        path: The path on the server (default `"/publish/epoch/end/"`).
        field: The form field that contains the JSON (default `"data"`), if it is sent as a form.
        headers: Additional headers (default: none).
        send_as_json: Send the JSON as the body, as `application/json` (default False: as a form field).

    Raises:
        ArgumentError: `root` isn't an HTTP address, or `path` would lead to another server.

    Example:
        >>> RemoteMonitor("http://localhost:9000", send_as_json=True).url
        'http://localhost:9000/publish/epoch/end/'

    Source: `keras.callbacks.RemoteMonitor`.
    """

    reads_weights = False
    only_writes = True

    def __init__(
        self,
        root: str = "http://localhost:9000",
        path: str = "/publish/epoch/end/",
        field: str = "data",
        headers: Mapping[str, str] | None = None,
        send_as_json: bool = False,
    ) -> None:
        server = urllib.parse.urlsplit(root)
        whole = urllib.parse.urlsplit(root + path)
        if server.scheme not in ("http", "https") or not server.hostname:
            raise ArgumentError(f"root must be an address such as 'http://localhost:9000', got {root!r}")
        if whole.netloc != server.netloc:
            raise ArgumentError(f"path must begin with '/', or it leads to the server {whole.netloc!r}: got {path!r}")
        self.root = root
        self.path = path
        self.field = field
        self.send_as_json = send_as_json
        self.headers = headers
        self._timeout = _TIMEOUT
        self._warned = False

    @property
    def url(self) -> str:
        """The address to send the logs to."""
        return self.root + self.path

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Send the logs."""
        try:
            with urllib.request.urlopen(self._request({"epoch": epoch, **(logs or {})}), timeout=self._timeout):
                self._timeout = _TIMEOUT
        except (OSError, HTTPException) as error:
            self._timeout = _TIMEOUT_WHILE_DOWN
            if not self._warned:
                self._warned = True
                warn(
                    f"RemoteMonitor could not send epoch {epoch} to {self.url}: {error}. Training "
                    "continues, and later epochs are still sent, without further warnings",
                )

    def _request(self, event: Mapping[str, Any]) -> urllib.request.Request:
        text = json.dumps(event, default=_as_plain)
        if self.send_as_json:
            body = text
            kind = "application/json"
        else:
            body = urllib.parse.urlencode({self.field: text})
            kind = "application/x-www-form-urlencoded"
        return urllib.request.Request(
            self.url, body.encode(), {"Content-Type": kind, **(self.headers or {})}, method="POST"
        )


def _as_plain(value: Any) -> Any:
    """Convert a value that JSON lacks: a NumPy number, an array or a tensor."""
    if not hasattr(value, "tolist"):
        return str(value)
    return value.item() if all(side == 1 for side in value.shape) else value.tolist()
