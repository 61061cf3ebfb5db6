"""Outputs of a module by name or position: picking their parts of a nest, and checking the form of a nest."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..data.batches import has_parts
from ..errors import ArgumentError, TpufitError

# The usual names of targets in a dict.
_TARGETS = ("labels", "label", "targets", "target", "y")

# One of a module's outputs: its key in a dict, its position in a tuple or list, or in a deeper nest the path to it.
Output = str | int | tuple[str | int, ...]


def to_path(output: Output) -> tuple[str | int, ...]:
    """Return the keys and positions that lead to an output."""
    return output if isinstance(output, tuple) else (output,)


def output_name(output: Output) -> str:
    """Return the name of an output as it appears in the names of logs.

    Example:
        >>> output_name("mask"), output_name(1), output_name(("heads", 0))
        ('mask', 'output_1', 'heads/output_0')
    """
    return "/".join(key if isinstance(key, str) else f"output_{key}" for key in to_path(output))


def is_nest(value: Any) -> bool:
    """True for a dict, tuple or list."""
    return isinstance(value, (Mapping, tuple, list))


def flatten_outputs(nest: Any) -> dict[Output, Any]:
    """Return the leaves of a nest by output.

    Example:
        >>> flatten_outputs({"a": (1, 2), "b": 3}), flatten_outputs([1, 2])
        ({('a', 0): 1, ('a', 1): 2, 'b': 3}, {0: 1, 1: 2})
    """
    leaves: dict[Output, Any] = {}
    for key, value in nest.items() if isinstance(nest, Mapping) else enumerate(nest):
        below = flatten_outputs(value) if is_nest(value) else {}
        inner: dict[Output, Any] = {(key, *to_path(output)): leaf for output, leaf in below.items()}
        leaves |= inner or {key: value}
    return leaves


def pick(nest: Any, output: Output) -> Any:
    """Pick the part of an output from a nest: by name from a dict, by position from a tuple or list; None if missing.

    Example:
        >>> pick({"a": 1}, "a"), pick((1, 2), 1), pick((1, 2), "a"), pick({"a": (1, 2)}, ("a", 1))
        (1, 2, None, 2)
    """
    for key in to_path(output):
        if isinstance(key, str):
            nest = nest.get(key) if isinstance(nest, Mapping) else None
        else:
            nest = nest[key] if isinstance(nest, (tuple, list)) and key < len(nest) else None
    return nest


def check_form(
    nest: Any,
    outputs: Sequence[Output],
    what: str,
    needed: Collection[Output] | None = None,
    error: type[TpufitError] = ArgumentError,
    like: str = "loss is",
) -> None:
    """Raise an error unless a nest, named `what`, has the form of `like`: a dict by output name, or a list by position.

    `needed` are the outputs that a dict must have (default: all).

    Example:
        >>> check_form([0.5], [0, 1], "loss_weights")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        tpufit.errors.ArgumentError: loss_weights must be a tuple or list of 2, as loss is, got a list of 1...
    """
    below: dict[str | int, list[Output]] = {}
    for output in outputs:
        first, *rest = to_path(output)
        below.setdefault(first, []).extend([tuple(rest)] if rest else [])
    required = {to_path(output)[0] for output in (outputs if needed is None else needed)}
    if any(isinstance(key, str) for key in below):
        fits = isinstance(nest, Mapping) and required <= set(nest) <= set(below)
        wanted = f"a dict of {_list_names(below)}"
    else:
        fits = isinstance(nest, (tuple, list)) and len(nest) == len(below)
        wanted = f"a tuple or list of {len(below)}"
    if not fits:
        hint = ". (Where an output has no loss, loss has None.)" if like == "loss is" else ""
        raise error(f"{what} must be {wanted}, as {like}, got {describe_nest(nest)}{hint}")
    for key, inner in below.items():
        value = pick(nest, key)
        if inner and (value is not None or key in required):
            needed_below = None if needed is None else [to_path(o)[1:] for o in needed if to_path(o)[0] == key]
            check_form(value, inner, f"{what} under {key!r}", needed_below, error, like)


def align(y_pred: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Squeeze a last dimension of 1 that only one of output and target has, as Keras does, instead of broadcasting.

    Example:
        >>> from torch import ones
        >>> [tensor.shape for tensor in align(ones(4, 1), ones(4))]
        [torch.Size([4]), torch.Size([4])]
    """
    if y_pred.shape == (*y.shape, 1):
        return y_pred.squeeze(-1), y
    return y_pred, y.squeeze(-1) if y.shape == (*y_pred.shape, 1) else y


def extract_logits(y_pred: Any) -> Any:
    """Return the logits of a Hugging Face model's output or of a dict of loss and logits, else the output itself."""
    is_output = isinstance(y_pred, Mapping) and "logits" in y_pred and (is_dataclass(y_pred) or "loss" in y_pred)
    return y_pred["logits"] if is_output else y_pred


def find_targets(x: Any, y: Any) -> Any:
    """Return the targets of a batch: y, or the `"labels"` in a dict x."""
    return x.get("labels") if y is None and isinstance(x, Mapping) else y


def count_targets(batch: Any, rows: int) -> int:
    """Count the rows of a batch's targets, which may be fewer than the rows of x, e.g. graphs with several nodes.

    The targets are y, or `"labels"`, `"targets"` or the like in a dict x. Without targets the result is `rows`.

    Example:
        >>> from torch import ones
        >>> count_targets((ones(30, 2), ones(4)), 30), count_targets({"nodes": ones(30, 2), "y": ones(4)}, 30)
        (4, 4)
    """
    x, y = (*batch, None)[:2] if has_parts(batch) else (batch, None)
    if y is None and isinstance(x, Mapping):
        y = next((x[name] for name in _TARGETS if name in x), None)
    return next((len(leaf) for leaf in tree_leaves(y) if isinstance(leaf, Tensor) and leaf.dim()), rows)


def describe_nest(nest: Any) -> str:
    """Describe a nest for an error.

    Example:
        >>> describe_nest({"a": 1, "b": 2}), describe_nest([1, 2]), describe_nest(0.5)
        ("a dict of 'a' and 'b'", 'a list of 2', '0.5')
    """
    if isinstance(nest, Mapping):
        return f"a dict of {_list_names(nest)}"
    if isinstance(nest, (tuple, list)):
        return f"a {type(nest).__name__} of {len(nest)}"
    return f"one tensor of shape {tuple(nest.shape)}" if isinstance(nest, Tensor) else repr(nest)


def _list_names(names: Collection[object]) -> str:
    *others, last = map(repr, names) if names else ("nothing",)
    return f"{', '.join(others)} and {last}" if others else last
