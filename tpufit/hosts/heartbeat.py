"""`Heartbeat`: a sign of life of each host: one that died or hangs ends the others too, and none waits for ever.

Process 0 keeps a socket to each of the others. Every second each says what it is doing, and process 0 passes on who is
gone. A host whose main thread can't come back by itself, because it waits for a program that the lost host will never
run, is ended by its own heartbeat, with a sentence.
"""

import json
import os
import secrets
import select
import socket
import sys
import threading
from time import monotonic, sleep
from typing import Any

from torch.distributed import Store

_PERIOD = 1.0  # seconds between two signs of life
_SILENCE = 60.0  # seconds without one after which a host counts as gone: a process may be stopped that long, or swap
_GRACE = 5.0  # seconds for the main thread to come to an error by itself, once a host is gone


def patience() -> float:
    """The seconds of silence after which a host counts as gone: 60, or those of `TPUFIT_HOST_TIMEOUT`."""
    return float(os.environ.get("TPUFIT_HOST_TIMEOUT", _SILENCE))


class Heartbeat:
    """Tells the other hosts that this one lives, and notices those that don't.

    They find each other through a store that all share, and the address of process 0.

    Attributes:
        place: What this host is doing, for the sentences of others.
        busy: True while this host needs all others.
        waits: True while it waits for them.
        gone: The hosts that are gone, by number, each with the reason.
        places: What each host was doing when it was last heard of.
    """

    def __init__(self, index: int, count: int, store: Store, address: str) -> None:
        self.place = "starting"
        self.busy = False
        self.waits = False
        self.gone: dict[int, str] = {}
        self.places: dict[int, str] = {}
        self._index = index
        self._farewell: str | None = None
        self._peers: dict[socket.socket, _Peer] = {}
        if index == 0:
            listener = socket.create_server(("", 0), backlog=count)
            word = secrets.token_hex(16)
            store.set("tpufit/heartbeat", f"{listener.getsockname()[1]} {word}")
            while len(self._peers) < count - 1:
                connection, _ = listener.accept()
                if _says(connection, word):
                    self._add(connection)
            listener.close()
        else:
            port, word = store.get("tpufit/heartbeat").decode().split()
            connection = socket.create_connection((address, int(port)))
            connection.sendall(word.encode())
            self._add(connection)
        # A daemon: it ends with the process, whatever the main thread does.
        threading.Thread(target=self._beat, name="tpufit-heartbeat", daemon=True).start()

    def leave(self, why: str) -> None:
        """Tell the others that this host takes no further part, as a half-sentence after its name: `"has ended"`."""
        self._farewell = why
        self._send()  # whom it doesn't reach, the heartbeat's own thread loses

    def notices(self, seconds: float) -> bool:
        """Wait until a host is gone, at most so long; True if one is."""
        deadline = monotonic() + seconds
        while not self.gone and monotonic() < deadline:
            sleep(_PERIOD / 10)
        return bool(self.gone)

    def describe(self) -> str:
        """Say which hosts are gone and why, or where all are."""
        if self.gone:
            return "; ".join(f"process {index} {why}" for index, why in sorted(self.gone.items()))
        return ", ".join(f"process {index}: {place}" for index, place in sorted(self._everywhere().items()))

    def _everywhere(self) -> dict[int, str]:
        return {**self.places, self._index: self.place + ", where it waits for the others" * self.waits}

    def _add(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._peers[connection] = _Peer()

    def _beat(self) -> None:
        lost: float | None = None
        sent = 0.0
        while True:
            if monotonic() - sent >= _PERIOD:
                for connection in self._send():
                    self._lose(connection, "is gone")
                sent = monotonic()
            ready, _, _ = select.select(list(self._peers), [], [], _PERIOD / 4)
            for connection in ready:
                self._receive(connection)
            for connection, peer in list(self._peers.items()):
                if monotonic() - peer.heard_at > patience():
                    self._lose(connection, f"has given no sign of life for {patience():g} s")
            if not self.gone:
                continue
            lost = monotonic() if lost is None else lost
            if self.busy and monotonic() - lost > _GRACE:
                self._end()

    def _end(self) -> None:
        where = f"process {self._index} ends here: {self.place}"
        text = f"tpufit: {self.describe()}; {where}. Start all hosts again; fit(resume=True) goes on\n"
        sys.stderr.write(text)
        sys.stderr.flush()
        os._exit(75)  # EX_TEMPFAIL of sysexits.h: the same may work another time

    def _send(self) -> list[socket.socket]:
        """Tell the others where this host is. Returns the connections that are broken."""
        here: dict[str, Any] = {"host": self._index, "places": self._everywhere(), "gone": self.gone}
        if self._farewell is not None:
            here["gone"] = {**self.gone, self._index: self._farewell}
        text = json.dumps(here).encode() + b"\n"
        broken = []
        for connection in list(self._peers):
            try:
                connection.send(text)
            except BlockingIOError:  # it doesn't read: its own silence will show
                continue
            except OSError:
                broken.append(connection)
        return broken

    def _receive(self, connection: socket.socket) -> None:
        try:
            got = connection.recv(1 << 16)
        except OSError:
            got = b""
        if not got:
            return self._lose(connection, "is gone")
        peer = self._peers[connection]
        peer.heard_at = monotonic()
        *whole, peer.rest = (peer.rest + got).split(b"\n")
        for text in whole:
            said = json.loads(text)
            peer.host = said["host"]
            self.places |= {int(index): place for index, place in said["places"].items() if int(index) != self._index}
            for index, why in said["gone"].items():
                if int(index) != self._index:
                    self.gone.setdefault(int(index), why)

    def _lose(self, connection: socket.socket, why: str) -> None:
        host = self._peers.pop(connection).host
        connection.close()
        if self._farewell is None:
            place = self.places.get(host)
            self.gone.setdefault(host, why + (f" (last: {place})" if place else ""))


def _says(connection: socket.socket, word: str) -> bool:
    """True if whoever calls knows the word: anything in the network may call."""
    connection.settimeout(_PERIOD * 10)
    try:
        said = connection.recv(len(word), socket.MSG_WAITALL)
    except OSError:
        said = b""
    if secrets.compare_digest(said, word.encode()):
        return True
    connection.close()
    return False


class _Peer:
    """What has come from another host, and when."""

    def __init__(self) -> None:
        self.host = 0  # until it says another, it can only be process 0
        self.heard_at = monotonic()
        self.rest = b""
