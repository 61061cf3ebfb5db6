"""`call`: runs a module on a batch's x."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..errors import BatchError
from ..runtime import translate
from ..utils.users_code import warn
from .failures import layer_failure, misfit, one_row


def call(module: nn.Module, x: Any) -> Any:
    """Run a module on a batch's x, see `arguments_of`.

    Raises:
        BatchError: The module takes other arguments, or one of its layers fails, e.g. on rows of the wrong shape.
    """
    args, named = arguments_of(module, x)
    try:
        return module(*args, **named)
    except (TypeError, AttributeError) as error:
        reason = misfit(module, args, named, error)
        if not reason:
            raise
        raise BatchError(reason) from error
    except ValueError as error:
        reason = one_row(x, error)
        if not reason:
            raise
        raise BatchError(reason) from error
    except RuntimeError as error:
        # Wrong shapes give a plain RuntimeError; what the runtime says of itself isn't the batch's fault.
        if type(error) is not RuntimeError or translate(error) is not None:
            raise
        raise BatchError(layer_failure(module, x, error)) from error


def arguments_of(module: nn.Module, x: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Make the positional and the keyword arguments of a module's `forward` of a batch's x.

    A tuple or list is passed by position; a dict by keyword, without `"labels"`, text and other objects that `forward`
    doesn't name. Tensors that it doesn't name are left out too, with a warning. A dict of which it names nothing is
    passed whole if it takes one argument. A model of transformers is told to keep no cache, unless x says so itself.

    Example:
        >>> arguments_of(nn.Identity(), {"input": 1, "id": "a"}), arguments_of(nn.Identity(), {"left": 1, "right": 2})
        (((), {'input': 1}), (({'left': 1, 'right': 2},), {}))
    """
    args, named = _of_batch(module, x)
    return args, {**named, "use_cache": False} if "use_cache" not in named and _keeps_cache(module) else named


def _of_batch(module: nn.Module, x: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
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
        warn(
            f"x has {', '.join(map(repr, others))}, which {type(module).__name__}.forward doesn't name and so isn't "
            "given: leave it out of the batches, or give forward a parameter of this name"
        )
    return (), named


def _keeps_cache(module: nn.Module) -> bool:
    """True if a model of transformers would return the keys and values of all its layers, as for generating a text.

    They are no predictions, and a block that is computed again for its gradient would add to them twice.
    """
    if getattr(getattr(module, "config", None), "use_cache", False) is not True:
        return False
    wrapped: Any = module
    base = wrapped.get_base_model() if hasattr(wrapped, "get_base_model") else wrapped  # as peft's have
    return "use_cache" in inspect.signature(base.forward).parameters


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
