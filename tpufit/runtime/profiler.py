"""Profiles of the host and the device, by the runtime's profiler or PyTorch's, and names for traced operations."""

import os
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path

import torch

from .devices import get_settled_cores
from .driver import driver


def start_profile(folder: str | os.PathLike[str]) -> Callable[[], None]:
    """Start recording, and return the function that stops the recording and writes it.

    A process can record only one profile at a time. It is written to the folder as
    `plugins/profile/<time>/*.trace.json.gz`, and by a runtime's profiler also as `*.xplane.pb`.
    """
    cores = get_settled_cores()
    if cores is None or cores.platform == "CUDA":
        return _start_pytorch(Path(folder))
    driver().start_profile(folder)
    return driver().stop_profile


def _start_pytorch(folder: Path) -> Callable[[], None]:
    """Start recording by PyTorch's profiler, which knows the host and a GPU; see `start_profile`."""
    recording = torch.profiler.profile()
    recording.start()

    def stop() -> None:
        recording.stop()
        place = folder / "plugins" / "profile" / f"{datetime.now():%Y_%m_%d_%H_%M_%S}"
        place.mkdir(parents=True, exist_ok=True)
        recording.export_chrome_trace(str(place / f"{socket.gethostname()}.trace.json.gz"))

    return stop


def scope(name: str) -> AbstractContextManager[None]:
    """A context in which traced operations carry a name (without slashes), if the runtime was started to keep names."""
    return driver().scope(name)
