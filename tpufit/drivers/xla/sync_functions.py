"""Replaces torch_xla's functions that compute pending tensors.

The replacements find programs inside `distinguishing_inputs`. tpufit calls them, and so do `torch_xla.sync` and
`xm.mark_step`, which the user's code may call.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from ...runtime.pending_tensors import find_pending_elsewhere, others_are_pending
from .graph_hash import distinguishing_inputs


def patch_syncs() -> None:
    """Replace the functions, permanently: another thread may be inside one."""
    import torch_xla

    for name, function in (("_xla_sync_multi", _sync_multi), ("_xla_step_marker", _step_marker)):
        native = getattr(torch_xla._XLAC, name)
        if not isinstance(native, partial):
            setattr(torch_xla._XLAC, name, partial(function, native))


def _sync_multi(native: Any, tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> None:
    with distinguishing_inputs(tensors):
        native(tensors, *args, **kwargs)


def _step_marker(native: Any, *args: Any, tensors: Sequence[Tensor] | None = None, **kwargs: Any) -> None:
    """Compute all pending tensors. The tensors that Python refers to identify the program.

    Args:
        native: torch_xla's function.
        args: Its arguments.
        tensors: The tensors that may be pending (default: all tensors that Python refers to).
        kwargs: Its further arguments.
    """
    pending = find_pending_elsewhere((), tensors) if others_are_pending(()) else ()
    with distinguishing_inputs(pending, "launch"):
        native(*args, **kwargs)
