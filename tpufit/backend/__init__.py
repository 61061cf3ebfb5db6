"""What the rest of tpufit asks of a device: a contract that `runtime/` fulfils with a driver, and `eager` with PyTorch.

| file | its idea |
| --- | --- |
| `attention` | how attention is to be computed, and is |
| `cores` | the cores of a process |
| `placement` | where steps run, and how tensors lie there |
| `device_state` | the tensors that steps change |
| `program` | a step, and how it is run |
| `in_flight` | how far steps run ahead of the device |
| `step_load` | what a step needs, for errors |
| `functions` | what the rest of tpufit asks of a device, beside these |
| `threads` | threads use the device one after another |
| `eager` | all of it in plain PyTorch on the host, for `run_eagerly` |

mypy compares: the classes of a backend inherit from these, or are returned as these, and `runtime/conforms.py` compares
the functions. `docs/backends.md` says what a new one needs, method by method.
"""

from .attention import ATTENTION, AttentionForms
from .cores import Cores, CoresArgument
from .device_state import DeviceState, Slot
from .eager import HOST
from .functions import Backend
from .in_flight import InFlight
from .placement import Placement, Sharding, Shardings, sharding_of_each
from .program import Body, Program, Sums
from .step_load import Load
from .threads import in_turn, turns
