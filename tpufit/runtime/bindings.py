"""`xla`: torch_xla's own bindings, which do what its public functions lack."""

from typing import Any

from .forks import refuse_fork


def xla() -> Any:
    """The bindings, imported when they are first needed: `devices.start` prepares the environment for the import."""
    refuse_fork()
    import torch_xla

    return torch_xla._XLAC
