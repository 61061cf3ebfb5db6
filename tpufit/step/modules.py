"""The user's module: which ones can be trained, and their modes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..errors import ArgumentError, PlacementError
from ..utils.users_code import warn


def usable(module: object) -> nn.Module:
    """Return the module, without `torch.compile` around it.

    Raises:
        ArgumentError: It is no module, or it has a part that torch.compile or torch.jit made for other devices.
    """
    if not isinstance(module, nn.Module):
        raise ArgumentError(f"tpufit.Model wraps a torch.nn.Module (an instance), got {module!r}")
    original = dict(module.named_children()).get("_orig_mod")
    if original is not None:
        warn("torch.compile has no effect here: tpufit uses the module inside, and compiles its steps for the device")
        module = original
    for name, layer in module.named_modules():
        what = f"the layer {name!r}" if name else "the module"
        if isinstance(layer, torch.jit.ScriptModule):
            raise ArgumentError(f"{what} was made by torch.jit, which can't be traced for XLA: pass the original one")
        if name.endswith("_orig_mod") or getattr(layer, "_compiled_call_impl", None) is not None:
            what = what.replace("._orig_mod", "")
            raise ArgumentError(f"{what} was compiled by torch.compile, which knows no XLA device: pass it uncompiled")
    return module


def refuse_host_inputs(module: nn.Module, args: Any, kwargs: Any) -> None:
    """Refuse inputs on the host for a module on the device: a forward pre-hook of the user's module while it is there.

    Raises:
        PlacementError: There are some.
    """
    parameter = next(module.parameters(), None)
    if parameter is None or parameter.device.type != "xla":
        return
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if any(tensor.device.type == "cpu" and tensor.dim() for tensor in given):
        raise PlacementError(
            f"{type(module).__name__} is on the device since it was trained, and its input is on the host. Call the "
            "tpufit.Model instead, model(x), which takes both, or model.predict(x); or bring the module back with "
            "model.to_cpu()"
        )


@contextmanager
def modes_kept(module: nn.Module, training: bool | None = None) -> Iterator[None]:
    """Restore the mode of each layer, training or not, at the end; meanwhile all have the given one, if any."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        if training is not None:
            module.train(training)
        yield
    finally:
        for part, mode in modes:
            part.training = mode
