"""What optimizers, metrics and losses need to know about the device's numbers."""

import torch
from torch.optim import Optimizer

# A TPU emulates integers of 64 bits.
COUNTS = torch.int32


def keeps_count(optimizer: Optimizer) -> bool:
    """True if an optimizer can keep its step counter on the device (PyTorch calls that capturable)."""
    # Adadelta has the option, but not for XLA.
    return "capturable" in optimizer.param_groups[0] and not isinstance(optimizer, torch.optim.Adadelta)
