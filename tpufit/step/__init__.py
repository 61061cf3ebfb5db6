"""One step of training, testing or predicting: its Python, its state, and the graphs that run it."""

from .batch import DeviceBatch
from .config import CompileConfig
from .engine import Engine, FitOptions
from .methods import StepMethods
from .runner import StepRunner
from .state import SavedState
from .weights import check_weights, match_weights, named_tensors
