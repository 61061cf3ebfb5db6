"""RemoteMonitor, with the standard library's server, and without a server."""

import json
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest
import torch

from tpufit.callbacks import RemoteMonitor
from tpufit.errors import ArgumentError


@pytest.fixture
def server():
    """A server on a free port of this machine, which keeps requests; it answers with its `status`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            server.received.append((self.path, dict(self.headers), body))
            self.send_response(server.status)
            self.end_headers()

        def log_message(self, *args): ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.received, server.status = [], 200
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def address(server):
    return f"http://127.0.0.1:{server.server_port}"


def test_logs_are_sent_as_a_form_with_the_given_field(server):
    RemoteMonitor(address(server), field="event").on_epoch_end(3, {"loss": 0.5})
    [(path, headers, body)] = server.received
    assert path == "/publish/epoch/end/"
    assert headers["Content-Type"] == "application/x-www-form-urlencoded"
    assert json.loads(urllib.parse.parse_qs(body)["event"][0]) == {"epoch": 3, "loss": 0.5}


def test_json_with_headers_and_a_path(server):
    monitor = RemoteMonitor(address(server), "/in?run=1", headers={"X-Key": "k"}, send_as_json=True)
    logs = {
        "loss": np.float32(0.5),
        "one": np.arange(1),
        "recall": np.array([0.5, 1.0]),
        "tensor": torch.tensor(2.0),
        "note": "x",
    }
    monitor.on_epoch_end(0, logs)
    [(path, headers, body)] = server.received
    assert (path, headers["Content-Type"], headers["X-Key"]) == ("/in?run=1", "application/json", "k")
    assert json.loads(body) == {"epoch": 0, "loss": 0.5, "one": 0, "recall": [0.5, 1.0], "tensor": 2.0, "note": "x"}


def test_a_failing_server_is_one_warning(server):
    url = address(server)
    server.status = 503
    monitor = RemoteMonitor(url)
    with pytest.warns(UserWarning, match=r"could not send epoch 0 to http://127.* 503") as warned:
        for epoch in range(3):
            monitor.on_epoch_end(epoch, {"loss": 0.5})
    assert len(warned) == 1 and len(server.received) == 3
    server.status = 200
    monitor.on_epoch_end(3, {"loss": 0.5})
    assert len(server.received) == 4


def test_an_unreachable_server_is_one_warning():
    monitor = RemoteMonitor("http://127.0.0.1:1")
    with pytest.warns(UserWarning, match="could not send epoch 0 .* refused") as warned:
        monitor.on_epoch_end(0, {"loss": 0.5})
        monitor.on_epoch_end(1, {"loss": 0.5})
    assert len(warned) == 1


def test_keras_default_address():
    assert RemoteMonitor().url == "http://localhost:9000/publish/epoch/end/"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("localhost:9000",), "an address such as 'http://localhost:9000', got 'localhost:9000'"),
        (("file:///etc",), "got 'file:///etc'"),
        (("http://",), "got 'http://'"),
        (("http://localhost", "@elsewhere.com/"), "leads to the server 'localhost@elsewhere.com'"),
        (("http://localhost", ".elsewhere.com/"), "leads to the server 'localhost.elsewhere.com'"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        RemoteMonitor(*arguments)
