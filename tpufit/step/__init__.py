"""One step of training, testing or predicting: its Python, its state, and the graphs that run it.

| word | meaning |
| --- | --- |
| role | the kind of a step: `"train"`, `"eval"` or `"predict"` |
| pass | one run over data in one role, such as an epoch |
| capture | trace the Python of a step into a graph and compile it, twice, to prove that both traces are equal |
| replay | run a captured graph on new inputs, without the step's Python |
| hold | keep the weights' values apart while graphs are replayed; the user's own tensors are empty meanwhile |
| write back | put the held values into the user's own tensors |
| expose | write back before user code may read the weights |
"""

from .batch import DeviceGroup, joined
from .blocks import RematArgument
from .config import CompileConfig
from .engine import Engine, FitOptions, UserModel
from .methods import CompileOption, StepMethods
from .modules import modes_kept, usable
from .named_tensors import check_weights, match_weights, named_tensors
from .runner import StepRunner
from .sharding import ShardArgument
from .state import SavedState
from .suggestions import suggestion_for
from .trial import fault_of
