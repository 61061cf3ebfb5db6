"""The interface of a device for the rest of tpufit; `runtime/` implements it with a driver, and `eager` with PyTorch.

| file | its idea |
| --- | --- |
| `attention` | the requested form of attention, and each layer's actual form |
| `cores` | the cores of a process |
| `placement` | where steps run, and how tensors are laid out there |
| `device_state` | the tensors that steps change |
| `program` | a step, and how it runs |
| `in_flight` | how far steps run ahead of the device |
| `step_memory` | the memory that a step needs, for errors |
| `device_functions` | the functions that the rest of tpufit calls, besides these classes |
| `device_turns` | lets threads use the device one after another |
| `eager` | all of it in plain PyTorch on the host, for `run_eagerly` |

mypy checks a backend against this interface: its classes inherit from these classes or are returned as these types, and
`runtime/interface_check.py` compares the functions. `docs/backends.md` says what a new backend needs, method by method.
"""

from .attention import ATTENTION, AttentionForms
from .cores import Cores, CoresArgument
from .device_functions import Backend
from .device_state import DeviceState, Slot
from .device_turns import in_turn, turns
from .eager import HOST
from .in_flight import InFlight, NeverWaits
from .placement import Placement, Sharding, Shardings, block_of_rows, sharding_of_each
from .program import Body, Program, Sums
from .step_memory import StepMemory
