"""`xla`: torch_xla's own bindings, which do what its public functions lack."""

from typing import Any


def xla() -> Any:
    """The bindings, imported when they are first needed: `devices.start` prepares the environment for the import."""
    import torch_xla

    return torch_xla._XLAC
