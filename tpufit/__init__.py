"""Keras's `fit()` for PyTorch on TPUs: compile, fit, evaluate and predict on every core of every host."""

from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from .checkup import doctor

if TYPE_CHECKING:
    from .model import Model, load
    from .runtime import init, process_count, process_index
    from .utils.random import set_random_seed
    from .verification import verify

__version__ = "0.1.0"
__all__ = [
    "Model",
    "__version__",
    "doctor",
    "init",
    "load",
    "process_count",
    "process_index",
    "set_random_seed",
    "verify",
]

_WHERE = {
    "Model": "model",
    "init": "runtime",
    "load": "model",
    "process_count": "runtime",
    "process_index": "runtime",
    "set_random_seed": "utils.random",
    "verify": "verification",
}


def __getattr__(name: str) -> Any:
    """Import a name at its first use: the doctor must also run where torch can't be imported."""
    if name in _WHERE:
        value = getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
    elif not name.startswith("_") and find_spec(f"{__name__}.{name}"):
        value = import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the names that aren't imported yet as well, for tab completion and `help`."""
    parts = (part.name for part in iter_modules(__path__) if not part.name.startswith("_"))
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__, *parts})
