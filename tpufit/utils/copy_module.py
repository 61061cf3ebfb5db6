"""`copy_module`: copies a module with other values."""

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def copy_module(module: nn.Module, value_of: Callable[[Tensor], Tensor]) -> nn.Module:
    """Copy a module for evaluation, with the values that `value_of` returns for its tensors. Tied tensors stay tied.

    Example:
        >>> import torch
        >>> net = nn.Linear(2, 1)
        >>> copy_module(net, torch.zeros_like).weight
        Parameter containing:
        tensor([[0., 0.]], requires_grad=True)
    """
    copied_tensors: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        value = value_of(tensor)
        is_parameter = isinstance(tensor, nn.Parameter)
        copied_tensors[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if is_parameter else value
    return copy.deepcopy(module, copied_tensors).eval()  # uses these copies of the tensors
