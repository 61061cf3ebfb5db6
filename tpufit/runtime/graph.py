"""Run a step as one XLA graph. Today the graph is traced on every call; this is where replaying it will come in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import report
from .mesh import Placement

_depth = 0


def tracing() -> bool:
    """Whether a step is being traced right now: then a value on the device can't be read without breaking its graph."""
    return _depth > 0


def run(body: Callable[..., Any], *inputs: Any, placement: Placement, role: str, seed: int) -> Any:
    """Run `body(*inputs)` as one graph, without waiting for it.

    Args:
        body: Python code over device tensors. What it changes in place (parameters, sums) is changed by the graph.
        inputs: Its arguments.
        placement: Where it runs; on the host it just runs.
        role: What its graphs are counted under: `"train"`, `"eval"` or `"predict"`.
        seed: The seed of its random numbers, so that nothing that ran before can move them.

    Returns:
        What `body` returned; its tensors will hold values as soon as the device has got to them.
    """
    global _depth
    if placement.on_host:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return body(*inputs)
    import torch_xla.core.xla_model as xm

    xm.set_rng_state(seed, str(placement.device))
    _depth += 1
    try:
        outputs = body(*inputs)
    finally:
        _depth -= 1
    launch(placement, role)
    return outputs


def launch(placement: Placement, role: str) -> None:
    """Start everything that is pending on the device, without waiting for it.

    Args:
        placement: Where it is pending; nothing ever is on the host.
        role: What a graph that must be compiled for it is counted under.
    """
    if placement.on_host:
        return
    import torch_xla

    with report.role(role):
        torch_xla._XLAC._xla_step_marker(str(placement.device), [], wait=False)
