"""Keras's `fit()` for PyTorch on TPUs: compile, fit, evaluate and predict on every core, from one process."""

from .checkup import doctor
from .model import Model
from .runtime import init
from .seeds import set_random_seed

__version__ = "0.1.0"
__all__ = ["Model", "__version__", "doctor", "init", "set_random_seed"]
