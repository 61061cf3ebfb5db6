"""`Heartbeat`: the hosts' signs of life. A host that dies or hangs ends the others, so that none waits forever.

Process 0 has a socket to each other host. Every second each host reports what it is doing, and process 0 tells all
which hosts are gone. If a host's main thread is stuck, waiting for a program that the lost host will never run, its
heartbeat ends the process with a message.
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

_PERIOD = 1.0  # seconds between two heartbeats
_SILENCE = 60.0  # seconds of silence after which a host counts as gone: a process may be stopped that long, or swap
_GRACE = 5.0  # seconds for the main thread to raise an error by itself, once a host is gone


def read_silence_limit() -> float:
    """Return the seconds of silence after which a host counts as gone: `TPUFIT_HOST_TIMEOUT`, or 60."""
    return float(os.environ.get("TPUFIT_HOST_TIMEOUT", _SILENCE))


class Heartbeat:
    """Tells the other hosts that this host is alive, and detects hosts that are gone.

    The hosts connect through a shared store, and the address of process 0.

    Attributes:
        place: What this host is doing, for the others' messages.
        busy: True while this host needs all others.
        waiting: True while this host waits for the others.
        gone: The hosts that are gone, by index, each with the reason.
        places: What each host was doing at its last heartbeat.
    """

    def __init__(self, index: int, count: int, store: Store, address: str) -> None:
        self.place = "starting"
        self.busy = False
        self.waiting = False
        self.gone: dict[int, str] = {}
        self.places: dict[int, str] = {}
        self._index = index
        self._farewell: str | None = None
        self._peers: dict[socket.socket, _Peer] = {}
        if index == 0:
            listener = socket.create_server(("", 0), backlog=count)
            password = secrets.token_hex(16)
            store.set("tpufit/heartbeat", f"{listener.getsockname()[1]} {password}")
            while len(self._peers) < count - 1:
                connection, _ = listener.accept()
                if _knows_password(connection, password):
                    self._add(connection)
            listener.close()
        else:
            port, password = store.get("tpufit/heartbeat").decode().split()
            connection = socket.create_connection((address, int(port)))
            connection.sendall(password.encode())
            self._add(connection)
        # A daemon, which ends with the process, whatever the main thread does.
        threading.Thread(target=self._beat, name="tpufit-heartbeat", daemon=True).start()

    def leave(self, why: str) -> None:
        """Tell the others that this host takes no further part, with a predicate such as `"has ended"`."""
        self._farewell = why
        self._send()  # the heartbeat's thread handles broken connections

    def wait_for_lost_host(self, seconds: float) -> bool:
        """Wait at most `seconds` until a host is gone; True if a host is."""
        deadline = monotonic() + seconds
        while not self.gone and monotonic() < deadline:
            sleep(_PERIOD / 10)
        return bool(self.gone)

    def describe(self) -> str:
        """Describe which hosts are gone and why, or what all are doing."""
        if self.gone:
            return "; ".join(f"process {index} {why}" for index, why in sorted(self.gone.items()))
        return ", ".join(f"process {index}: {place}" for index, place in sorted(self._collect_places().items()))

    def _collect_places(self) -> dict[int, str]:
        return {**self.places, self._index: self.place + ", waiting for the others" * self.waiting}

    def _add(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._peers[connection] = _Peer()

    def _beat(self) -> None:
        lost_at: float | None = None
        sent_at = 0.0
        while True:
            if monotonic() - sent_at >= _PERIOD:
                for connection in self._send():
                    self._lose(connection, "is gone")
                sent_at = monotonic()
            ready, _, _ = select.select(list(self._peers), [], [], _PERIOD / 4)
            for connection in ready:
                self._receive(connection)
            for connection, peer in list(self._peers.items()):
                if monotonic() - peer.heard_at > read_silence_limit():
                    self._lose(connection, f"has sent no heartbeat for {read_silence_limit():g} s")
            if not self.gone:
                continue
            lost_at = monotonic() if lost_at is None else lost_at
            if self.busy and monotonic() - lost_at > _GRACE:
                self._end()

    def _end(self) -> None:
        where = f"process {self._index} ends here: {self.place}"
        text = f"tpufit: {self.describe()}; {where}. Start all hosts again; fit(resume=True) resumes\n"
        sys.stderr.write(text)
        sys.stderr.flush()
        os._exit(75)  # EX_TEMPFAIL of sysexits.h: a retry may work

    def _send(self) -> list[socket.socket]:
        """Send this host's place to the others, and return the broken connections."""
        here: dict[str, Any] = {"host": self._index, "places": self._collect_places(), "gone": self.gone}
        if self._farewell is not None:
            here["gone"] = {**self.gone, self._index: self._farewell}
        text = json.dumps(here).encode() + b"\n"
        broken = []
        for connection in list(self._peers):
            try:
                connection.send(text)
            except BlockingIOError:  # the peer doesn't read; its silence will be detected
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
        *messages, peer.incomplete = (peer.incomplete + got).split(b"\n")
        for text in messages:
            message = json.loads(text)
            peer.host = message["host"]
            places = {int(index): place for index, place in message["places"].items()}
            self.places |= {index: place for index, place in places.items() if index != self._index}
            for index, why in message["gone"].items():
                if int(index) != self._index:
                    self.gone.setdefault(int(index), why)

    def _lose(self, connection: socket.socket, why: str) -> None:
        host = self._peers.pop(connection).host
        connection.close()
        if self._farewell is None:
            place = self.places.get(host)
            self.gone.setdefault(host, why + (f" (last: {place})" if place else ""))


def _knows_password(connection: socket.socket, password: str) -> bool:
    """True if the caller knows the password: anything in the network may connect."""
    connection.settimeout(_PERIOD * 10)
    try:
        answer = connection.recv(len(password), socket.MSG_WAITALL)
    except OSError:
        answer = b""
    if secrets.compare_digest(answer, password.encode()):
        return True
    connection.close()
    return False


class _Peer:
    """What another host has sent, and when."""

    def __init__(self) -> None:
        self.host = 0  # until the peer sends its index, it can only be process 0
        self.heard_at = monotonic()
        self.incomplete = b""  # the beginning of a message
