"""Records profiles of the host's and the device's work by the runtime's profiler, and names traced operations."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from .cpp_bindings import xla


def start_profile(folder: str | os.PathLike[str]) -> None:
    """Start recording. A process can record only one profile at a time.

    It is written to the folder as `plugins/profile/<time>/*.xplane.pb` and `*.trace.json.gz`.
    """
    import torch_xla.debug.profiler as profiler

    profiler.start_trace(folder)


def stop_profile() -> None:
    """Stop recording, and write the profile."""
    import torch_xla.debug.profiler as profiler

    profiler.stop_trace()


@contextmanager
def scope(name: str) -> Iterator[None]:
    """A context in which traced operations get a name, without slashes, if the runtime was started to keep names."""
    pushed = xla().profiler.scope_pusher(name)
    try:
        yield
    finally:
        del pushed
