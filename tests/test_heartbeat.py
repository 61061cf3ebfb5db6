"""The heartbeats of a pod's hosts, here in threads of one process."""

import socket
import struct
import threading
import time

from torch.distributed import HashStore

from tpufit.hosts.heartbeat import Heartbeat


def test_hosts_ignore_strangers():
    store, hosts = HashStore(), {}
    first = threading.Thread(target=lambda: hosts.update({0: Heartbeat(0, 2, store, "localhost")}))
    first.start()
    port = int(store.get("tpufit/heartbeat").decode().split()[0])
    with socket.create_connection(("localhost", port)) as stranger:
        stranger.sendall(b"a scanner of ports that knows no word")
    hosts[1] = Heartbeat(1, 2, store, "localhost")
    first.join()
    hosts[1].place = "train of epoch 1"
    deadline = time.monotonic() + 120
    while hosts[0].places.get(1) != "train of epoch 1" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert hosts[0].describe() == "process 0: starting, process 1: train of epoch 1"
    hosts[1].leave("has ended")
    while not hosts[0].gone and time.monotonic() < deadline:
        time.sleep(0.05)
    assert hosts[0].describe() == "process 1 has ended"
    hosts[0].leave("has ended")


def test_a_host_that_leaves_while_another_is_lost_keeps_its_heartbeat(monkeypatch):
    """Both threads of the first host then find the same connection broken."""
    died, hosts = [], []
    monkeypatch.setattr(threading, "excepthook", died.append)
    for _ in range(10):
        store = HashStore()
        first = threading.Thread(target=lambda store=store: hosts.append(Heartbeat(0, 2, store, "localhost")))
        first.start()
        port, word = store.get("tpufit/heartbeat").decode().split()
        other = socket.create_connection(("localhost", int(port)))
        other.sendall(word.encode())
        first.join()
        other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        other.close()  # as the kernel does for a killed process
        hosts[-1].leave("has ended")
    time.sleep(1.5)  # more than the time between two heartbeats
    assert not died
