"""One step of training, testing or predicting: its Python, its state, and the graphs that run it.

docs/words.md has a glossary: role, pass, capture, replay, hold and the like.
"""

from .api_suggestions import explain_arguments, suggestion_for, warn_of_uncalled_hooks, warn_of_uncalled_methods
from .attribute_modules import find_kept_modules, find_kept_parameters
from .batch import DeviceGroup, join_groups
from .compile_config import CompileConfig
from .dry_run import find_fault
from .engine import MODEL_ATTRIBUTES, Engine, FitOptions, UserModel
from .modules import keeping_modes, unwrap_module
from .remat import RematArgument, list_policies
from .runner import StepRunner
from .saved_state import SavedState, collect_state, load_state, trains_other_parameters
from .sharding import ShardArgument
from .step_methods import CompileOption, StepMethods
from .weight_names import check_weights, match_weights, named_tensors, strip_prefixes
