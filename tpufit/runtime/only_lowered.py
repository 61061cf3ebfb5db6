"""`OnlyLowered`: tells which code the device can run by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# An operation has a kernel of the device, or is made of others that have.
_LOWERED = (
    "XLA",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
    "CompositeImplicitAutograd",
)


class OnlyLowered(TorchDispatchMode):
    """A context that refuses operations that the device would hand back to the host, with a wait in each step.

    Code is tried in it on tensors of the meta device, so that nothing is computed.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key) for key in _LOWERED):
            raise NotImplementedError(f"{func.name()} has no lowering")
        return func(*args, **(kwargs or {}))
