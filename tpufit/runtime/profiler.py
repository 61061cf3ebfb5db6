"""A profile of the host's and the device's work, by the runtime's own profiler, and names for what is traced."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from .bindings import xla


def start_profile(folder: str | os.PathLike[str]) -> None:
    """Begin to record. Only one profile can be recorded at a time in a process.

    It is written to the folder as `plugins/profile/<time>/*.xplane.pb` and `*.trace.json.gz`.
    """
    import torch_xla.debug.profiler as profiler

    profiler.start_trace(folder)


def stop_profile() -> None:
    """End the recording, and write it."""
    import torch_xla.debug.profiler as profiler

    profiler.stop_trace()


@contextmanager
def scope(name: str) -> Iterator[None]:
    """A context in which traced operations carry a name without slashes, if the runtime was started to keep names."""
    pushed = xla().profiler.scope_pusher(name)
    try:
        yield
    finally:
        del pushed
