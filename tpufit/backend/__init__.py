"""What the rest of tpufit asks of a device: a contract that `runtime/` fulfils with torch_xla, and `eager` without it.

| file | its idea |
| --- | --- |
| `attention` | how attention is to be computed, and is |
| `cores` | the cores of a process |
| `placement` | where steps run, and how tensors lie there |
| `state` | the tensors that steps change |
| `program` | a step, and how it is run |
| `in_flight` | how far steps run ahead of the device |
| `load` | what a step needs, for errors |
| `verbs` | the functions beside these |
| `threads` | threads use the device one after another |
| `eager` | all of it in plain PyTorch on the host, for `run_eagerly` |

mypy compares: the classes of a backend inherit from these, or are returned as these, and `runtime/conforms.py` compares
the functions. `docs/backends.md` says what a new one needs, method by method.
"""

from .attention import ATTENTION, AttentionForms
from .cores import Cores, CoresArgument
from .eager import HOST
from .in_flight import InFlight
from .load import Load
from .placement import Placement, Sharding, Shardings
from .program import Body, Program, Sums
from .state import DeviceState, Slot
from .threads import in_turn, turns
from .verbs import REMAT_POLICIES, Backend
