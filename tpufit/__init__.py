"""Keras's `fit()` for PyTorch on TPUs: compile, fit, evaluate and predict on every core of every host."""

import sys
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from .checkup import doctor

if TYPE_CHECKING:
    from .metrics import DatasetMetric
    from .model import Model, load
    from .pictures import show_batch, show_top_losses
    from .runtime import init, process_count, process_index
    from .utils.random import set_random_seed
    from .verification import verify

__version__ = "0.1.0"
__all__ = [
    "DatasetMetric",
    "Model",
    "__version__",
    "doctor",
    "init",
    "load",
    "process_count",
    "process_index",
    "set_random_seed",
    "show_batch",
    "show_top_losses",
    "verify",
]

_MODULES = {
    "DatasetMetric": "metrics",
    "Model": "model",
    "init": "runtime",
    "load": "model",
    "process_count": "runtime",
    "process_index": "runtime",
    "set_random_seed": "utils.random",
    "show_batch": "pictures",
    "show_top_losses": "pictures",
    "verify": "verification",
}


def _register_torch_tpu() -> None:
    """Name torch_tpu's device if `import torch` has loaded torch_tpu: PyTorch's first backward pass needs the name."""
    package = sys.modules.get(f"{__name__}.drivers.torchtpu")
    is_being_imported = package is not None and not hasattr(package, "DRIVER")  # it imports names from here
    if "torch_tpu._loader" in sys.modules and not is_being_imported:
        import_module(f"{__name__}.drivers.torchtpu.start").register_early()


def __getattr__(name: str) -> Any:
    """Import a name at its first use, because the doctor must run even if torch can't be imported."""
    import_module(f"{__name__}.utils.torch_import")
    _register_torch_tpu()
    if name in _MODULES:
        value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    elif not name.startswith("_") and find_spec(f"{__name__}.{name}"):
        value = import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List all names, imported or not, for tab completion and `help`."""
    parts = (part.name for part in iter_modules(__path__) if not part.name.startswith("_"))
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__, *parts})


_register_torch_tpu()
