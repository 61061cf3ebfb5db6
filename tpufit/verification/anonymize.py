"""`anonymize`: removes the names of users, hosts and folders from a text, so that it can be published."""

import getpass
import os
import re
import socket
from contextlib import suppress
from pathlib import Path

_ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b")
_PATH = re.compile(r"(?<![\w/.:])(?:[a-z]+:/)?(?:/[^\s/'\"(),;:]+)+/?")
_LONGEST = 1500  # characters


def anonymize(text: str) -> str:
    """Return a text without user names, host names, addresses and folders; a long text loses its middle.

    Example:
        >>> anonymize('File "/home/ada/project/train.py", line 3: no host at 10.0.0.2:8470')
        'File "train.py", line 3: no host at (address)'
    """
    text = _ADDRESS.sub("(address)", _PATH.sub(lambda path: path[0].rstrip("/").rpartition("/")[2], text))
    for name, word in _names().items():
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", word, text)
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]}\n...\n{text[-_LONGEST // 2 :]}"
    return text


def _names() -> dict[str, str]:
    """Return the names of this machine and its user, longest first, each with its replacement."""
    hosts = {socket.gethostname(), socket.gethostname().partition(".")[0]}
    hosts |= {*os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",")} - {"localhost"}
    users = {Path.home().name}
    with suppress(KeyError, OSError):  # a user without a name
        users.add(getpass.getuser())
    # Names that identify nobody, and occur in many messages.
    known = {"root", "user", "jovyan", "content", "kaggle", "cpu", "tpu", "home", ""}
    found = {name: "(host)" for name in hosts} | {name: "(user)" for name in users}
    return {name: found[name] for name in sorted(found, key=len, reverse=True) if name.lower() not in known}
