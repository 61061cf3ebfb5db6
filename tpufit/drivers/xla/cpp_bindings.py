"""`xla`: torch_xla's C++ bindings, for features that its public functions lack."""

from typing import Any

from ...runtime import forks


def xla() -> Any:
    """Return the bindings, imported on first use, because `start.start` prepares the environment for the import."""
    if forks.forked:  # not a call, because each step asks several times
        forks.refuse_fork()
    import torch_xla

    return torch_xla._XLAC
