"""`call`: runs a module on a batch's x."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..errors import ArgumentError, BatchError
from ..runtime import translate
from ..utils.user_code import warn
from .batch_errors import explain_layer_failure, explain_misfit, explain_one_row


def call(
    module: nn.Module,
    x: Any,
    compiled: nn.Module | None = None,
    further: Sequence[Any] = (),
    keywords: Mapping[str, Any] | None = None,
) -> Any:
    """Run a module, or its form `compiled` by `torch.compile`, on a batch's x; see `make_arguments`.

    Raises:
        ArgumentError: x is a dict, and there are further positional arguments.
        BatchError: The module takes other arguments, or one of its layers fails, e.g. on rows of the wrong shape.
    """
    args, named = make_arguments(module, x, further, keywords)
    try:
        run = module if compiled is None else compiled  # not `or`: bool(compiled) fails on PyTorch 2.13
        return run(*args, **named)
    except (TypeError, AttributeError) as error:
        reason = explain_misfit(module, args, named, error, bool(further or keywords))
        if not reason:
            raise
        raise BatchError(reason) from error
    except ValueError as error:
        reason = explain_one_row(x, error)
        if not reason:
            raise
        raise BatchError(reason) from error
    except RuntimeError as error:
        # Wrong shapes raise a plain RuntimeError. An error of the runtime isn't the batch's fault.
        if type(error) is not RuntimeError or translate(error) is not None:
            raise
        raise BatchError(explain_layer_failure(module, x, error)) from error


def make_arguments(
    module: nn.Module, x: Any, further: Sequence[Any] = (), keywords: Mapping[str, Any] | None = None
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Turn a batch's x into the positional and the keyword arguments of a module's `forward`.

    A tuple or list is passed by position, a dict by keyword. Entries that `forward` doesn't name are left out, with a
    warning if they are tensors other than `"labels"`. If `forward` takes one argument and names no key, it gets the
    whole dict. The `further` positional arguments follow, and the `keywords`, which replace a dict's entries of the
    same name. A transformers model gets `use_cache=False`, unless `use_cache` is given.

    Raises:
        ArgumentError: x is passed by keyword, and there are further positional arguments.

    Example:
        >>> make_arguments(nn.Identity(), {"input": 1, "id": "a"}), make_arguments(nn.Identity(), {"a": 1, "b": 2})
        (((), {'input': 1}), (({'a': 1, 'b': 2},), {}))
        >>> make_arguments(nn.Bilinear(1, 1, 1), 1, [2])
        ((1, 2), {})
    """
    keywords = keywords or {}
    args, by_name = _of_batch(module, x, len(further), keywords)
    if further and by_name:
        raise ArgumentError(
            f"x is a dict, which {type(module).__name__} gets by keyword: pass the further arguments by keyword, too, "
            "as in model(x, scale=0.5)"
        )
    named = {**by_name, **keywords}
    if "use_cache" not in named and _keeps_cache(module):
        named["use_cache"] = False
    return (*args, *further), named


def _of_batch(
    module: nn.Module, x: Any, further: int, keywords: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    if not isinstance(x, dict):
        return (x if isinstance(x, (tuple, list)) else (x,)), {}
    parameters = inspect.signature(module.forward).parameters.values()
    slots = {p.name: p.default is p.empty for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    for name in [*list(slots)[1 : 1 + further], *keywords]:  # the caller fills these
        slots.pop(name, None)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if keywords:
        x = {name: value for name, value in x.items() if name not in keywords}
    named = {name: value for name, value in x.items() if name in slots}
    others = {name: value for name, value in x.items() if name not in slots and _has_tensors(value)}
    if not named and (sum(slots.values()) == 1 or (len(slots) == 1 and not takes_any)):
        return (x,), {}
    if takes_any or not named:
        return (), named | others
    others.pop("labels", None)
    if others:
        warn(
            f"x has {', '.join(map(repr, others))}, but {type(module).__name__}.forward has no such parameter and "
            "doesn't get it: leave it out of the batches, or give forward a parameter of this name"
        )
    return (), named


def _keeps_cache(module: nn.Module) -> bool:
    """True if a transformers model would return the cache of keys and values that generating a text needs.

    The cache isn't a prediction, and a rematerialized block would add to it twice.
    """
    if getattr(getattr(module, "config", None), "use_cache", False) is not True:
        return False
    wrapped: Any = module
    base = wrapped.get_base_model() if hasattr(wrapped, "get_base_model") else wrapped  # of a peft model
    return "use_cache" in inspect.signature(base.forward).parameters


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
