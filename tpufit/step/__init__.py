"""One step of training, testing or predicting: its Python, its state, and the graphs that run it.

CONTRIBUTING.md has a glossary: role, pass, capture, replay, hold and the like.
"""

from .batch import DeviceGroup, joined
from .blocks import RematArgument, policies_for
from .config import CompileConfig
from .engine import Engine, FitOptions, UserModel
from .kept_modules import kept_modules, kept_parameters
from .methods import CompileOption, StepMethods
from .modules import modes_kept, usable
from .named_tensors import check_weights, match_weights, named_tensors
from .runner import StepRunner
from .sharding import ShardArgument
from .state import SavedState
from .suggestions import explaining, suggestion_for, warn_of_uncalled_hooks, warn_of_uncalled_methods
from .trial import fault_of
