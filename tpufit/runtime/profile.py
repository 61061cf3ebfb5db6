"""A trace by torch_xla's profiler: what host and device did, for TensorBoard's profile plugin or Perfetto."""

from __future__ import annotations

import os


def start_trace(folder: str | os.PathLike[str]) -> None:
    """Begin a trace.

    Args:
        folder: Where it goes at its end, below `plugins/profile/`.

    Raises:
        RuntimeError: One is under way already.
    """
    import torch_xla.debug.profiler as profiler

    profiler.start_trace(os.fspath(folder))


def stop_trace() -> None:
    """End the trace and write it.

    Raises:
        RuntimeError: None is under way.
    """
    import torch_xla.debug.profiler as profiler

    profiler.stop_trace()
