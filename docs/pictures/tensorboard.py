"""Takes screenshots of TensorBoard with a real run, by Chromium: `python docs/pictures/tensorboard.py`."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from looks import FOLDER, ROOT
from tornado.websocket import websocket_connect

CLOSE_SETTINGS = "document.querySelector('[aria-label=\"Close side pane\"]').click()"
WINDOW = "1400,900"
TAGS = "^epoch_(accuracy|loss|input_bound|steps_per_second)$"


def free_port() -> int:
    """Return an unused port."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def answer(address: str, expected: str) -> str:
    """Return a server's answer, once it contains the expected words."""
    for _ in range(120):
        try:
            if expected in (said := urllib.request.urlopen(address).read().decode()):
                return said
        except OSError:
            pass  # the server hasn't started yet
        time.sleep(0.5)
    raise SystemExit(f"{address} doesn't answer")


@contextmanager
def served(logs: Path) -> Iterator[str]:
    """Start TensorBoard, wait until it has read the logs, and end it afterwards."""
    port = free_port()
    command = [sys.executable, "-m", "tensorboard.main", f"--logdir={logs}", f"--port={port}", "--load_fast=false"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        answer(f"http://localhost:{port}/data/plugin/scalars/tags", "epoch_accuracy")
        yield f"http://localhost:{port}"
    finally:
        server.terminate()
        server.wait()


async def photograph(browser: str, address: str, folder: Path) -> None:
    """Open TensorBoard in a browser, light and dark, wait until it has drawn, and save screenshots."""
    port = free_port()
    options = [
        "--headless",
        "--no-sandbox",
        "--enable-unsafe-swiftshader",
        f"--remote-debugging-port={port}",
        f"--window-size={WINDOW}",
    ]
    options += [f"--user-data-dir={folder}/profile", "--hide-scrollbars", "about:blank"]
    process = subprocess.Popen([browser, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        tabs = json.loads(await asyncio.to_thread(answer, f"http://localhost:{port}/json", "webSocketDebuggerUrl"))
        tab = await websocket_connect(next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page"))

        async def ask(method: str, **params: object) -> dict[str, Any]:
            await tab.write_message(json.dumps({"id": 1, "method": method, "params": params}))
            while "id" not in (reply := json.loads(await tab.read_message() or "{}")):
                pass
            return reply["result"]

        for look in ("light", "dark"):
            query = {"darkMode": str(look == "dark").lower(), "tagFilter": TAGS, "smoothing": "0"}
            await ask("Page.navigate", url=f"{address}/?{urlencode(query)}#timeseries")
            await asyncio.sleep(8)
            await ask("Runtime.evaluate", expression=CLOSE_SETTINGS)
            await asyncio.sleep(8)
            shot = await ask("Page.captureScreenshot", format="png")
            path = FOLDER / f"tensorboard-{look}.png"
            path.write_bytes(base64.b64decode(shot["data"]))
            print(path.relative_to(ROOT))
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    browser = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    if browser is None:
        raise SystemExit("this needs Chromium: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, ROOT / "examples" / "digits.py"], cwd=folder, env=environment, check=True)
        with served(Path(folder, "runs", "digits", "logs")) as address:
            asyncio.run(photograph(browser, address, Path(folder)))
