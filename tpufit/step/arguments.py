"""`arguments_of`: how a batch's x is passed to a module."""

import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


def arguments_of(module: nn.Module, x: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Make the arguments of a module's `forward` of a batch's x.

    Args:
        module: The module.
        x: A tensor; a tuple or list, passed by position; or a dict. That is passed by keyword, without `"labels"`, text
            and other objects that `forward` doesn't name. Tensors that it doesn't name are left out too, with a
            warning. A dict of which it names nothing is passed whole if it takes one argument.

    Returns:
        The positional arguments, and those by keyword.

    Example:
        >>> arguments_of(nn.Identity(), {"input": 1, "id": "a"}), arguments_of(nn.Identity(), {"left": 1, "right": 2})
        (((), {'input': 1}), (({'left': 1, 'right': 2},), {}))
    """
    if not isinstance(x, dict):
        return (x if isinstance(x, (tuple, list)) else (x,)), {}
    parameters = inspect.signature(module.forward).parameters.values()
    slots = {p.name: p.default is p.empty for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    named = {name: value for name, value in x.items() if name in slots}
    others = {name: value for name, value in x.items() if name not in slots and _has_tensors(value)}
    if not named and (sum(slots.values()) == 1 or (len(slots) == 1 and not takes_any)):
        return (x,), {}
    if takes_any or not named:
        return (), named | others
    others.pop("labels", None)
    if others:
        warnings.warn(
            f"x has {', '.join(map(repr, others))}, which {type(module).__name__}.forward doesn't name and so isn't "
            "given: leave it out of the batches, or give forward a parameter of this name",
            stacklevel=3,
        )
    return (), named


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
