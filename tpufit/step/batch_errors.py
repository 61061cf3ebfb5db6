"""Error messages of a step: a batch doesn't fit the module, or a step failed on the device."""

import inspect
import re
from collections.abc import Mapping, Sequence
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..data.batches import describe_value, list_tensors
from ..errors import DeviceError, join_few
from ..losses import describe_nest
from ..runtime import extract_message
from ..utils.text import dtype_name

# Cures by words in PyTorch's error; the first that matches is used.
_CURES = (
    (
        re.compile(r"dtype|scalar type|element types|[Ii]nput type|not implemented for"),
        "Give it rows in the dtype of its weights, such as x.float(), and bytes of pictures divided by 255. ",
    ),
    (
        re.compile(r"shape|size|dim|channel|\d-?D\b|broadcast|subscript|rank|features|elements"),
        "Compare the shape of the rows with the shape that the layer expects. ",
    ),
)


def explain_misfit(
    module: nn.Module,
    args: Sequence[Any],
    named: Mapping[str, Any],
    error: TypeError | AttributeError,
    has_further: bool = False,
) -> str:
    """Explain why a module's `forward` doesn't accept the arguments made from a batch; empty if it does.

    `has_further` is true if the caller passed more arguments than the batch's x.
    """
    if args and not any(isinstance(leaf, Tensor) for leaf in tree_leaves((args, named))):
        return f"x must be tensors or arrays of numbers, but the data gave {describe_value(args[0])}"
    if isinstance(error, AttributeError):
        return ""
    signature = inspect.signature(module.forward)
    try:
        signature.bind(*args, **named)
    except TypeError:
        kind = type(module).__name__
        given = ", ".join(["..."] * len(args) + [f"{name}=..." for name in named])
        if has_further:
            return (
                f"model(x, ...) calls the module as {kind}({given}), but its forward takes {signature}. Arguments "
                "after x are passed to forward; only training=True or training=False, by keyword, sets the mode instead"
            )
        form = "a dict" if named else f"a tuple of {len(args)}" if len(args) != 1 else "one tensor"
        return (
            f"x is {form}, so the module is called as {kind}({given}), but its forward takes {signature}. "
            "A dict is passed by keyword, a tuple by position, and a tensor alone"
        )
    if len(args) == 1 and isinstance(args[0], dict):
        return (
            f"x is {describe_nest(args[0])}, and {type(module).__name__}.forward{signature} names none of the keys, so "
            f"it gets the whole dict, and fails: {error}"
        )
    return ""


def explain_layer_failure(module: nn.Module, x: Any, error: RuntimeError) -> str:
    """Name the layer that failed on a batch: the innermost layer in the traceback."""
    names = {id(layer): name for name, layer in module.named_modules()}
    running = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
    layer = next((layer for layer in reversed(running) if id(layer) in names), module)
    kind = type(layer).__name__ if any(layer.children()) else repr(layer)
    which = f"the module's layer {names[id(layer)]!r}, {kind}," if layer is not module else f"the module, {kind},"
    weights = {p.dtype for p in module.parameters() if p.is_floating_point()}
    rows = {leaf.dtype for leaf in tree_leaves(x) if isinstance(leaf, Tensor) and leaf.is_floating_point()}
    if weights and rows and weights <= {torch.bfloat16, torch.float16} and not weights & rows:
        return (
            f"{which} fails on a batch of {list_tensors({'x': x})}, because the module's weights are in "
            f"{join_few(sorted(map(dtype_name, weights)))}: compile(..., precision='bf16-true') makes both bfloat16, "
            "and module.float() the weights float32"
        )
    if torch.float64 in weights and rows:
        return (
            f"{which} fails on a batch of {list_tensors({'x': x})}, because the module has weights in float64, which a "
            "TPU lacks; data in float64 become float32. Make the weights float32: module.float()"
        )
    said = extract_message(error)
    cure = next((cure for words, cure in _CURES if words.search(said)), "")
    return f"{which} fails on a batch of {list_tensors({'x': x})}. {cure}PyTorch says: {said}"


def explain_one_row(x: Any, error: ValueError) -> str:
    """Explain that a batch norm can't train on a single row; empty for any other error."""
    if "more than 1 value per channel" not in str(error):
        return ""
    return (
        f"a batch norm can't train on a batch of one row, got {list_tensors({'x': x})}. Choose a batch_size that "
        "leaves no single row at the end of an epoch, or leave that row out: DataLoader(drop_last=True), or "
        f"steps_per_epoch. PyTorch says: {error}"
    )


def describe_lost_weights(step: int, saved: str | None, error: Exception) -> str:
    """Say that the weights are lost with a step that failed, and where the last saved weights are."""
    where = f"the last saved weights are in {saved}" if saved else "none have been saved"
    return (
        f"step {step} failed on the device, or one shortly before it, and the weights are lost with it; {where}. Load "
        "them with load_weights (the optimizer then starts without state), and try a smaller batch. The device "
        f"says: {extract_message(error)}"
    )


def may_come_from_device(error: BaseException | None) -> bool:
    """True if an error or one of its causes may come from the device: runtimes raise plain RuntimeErrors for it."""
    while error is not None and type(error) is not RuntimeError and not isinstance(error, DeviceError):
        error = error.__cause__ or error.__context__
    return error is not None
