"""Outputs of a module, by name or by position: their parts of a nest, and the form that a nest must have."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..errors import ArgumentError, TpufitError

# One of a module's outputs: its key in a dict, or its position in a tuple or list.
Output = str | int


def output_name(output: Output) -> str:
    """The name of an output in the names of logs.

    Example:
        >>> output_name("mask"), output_name(1)
        ('mask', 'output_1')
    """
    return output if isinstance(output, str) else f"output_{output}"


def part(nest: Any, output: Output) -> Any:
    """Pick the part of a nest that belongs to an output; None if it has none.

    Args:
        nest: A dict for an output by name, a tuple or list for one by position.
        output: The output.

    Example:
        >>> part({"a": 1}, "a"), part((1, 2), 1), part((1, 2), "a")
        (1, 2, None)
    """
    if isinstance(output, str):
        return nest.get(output) if isinstance(nest, Mapping) else None
    return nest[output] if isinstance(nest, (tuple, list)) and output < len(nest) else None


def check_form(
    nest: Any,
    outputs: Sequence[Output],
    what: str,
    needed: Collection[Output] | None = None,
    error: type[TpufitError] = ArgumentError,
) -> None:
    """Raise an error for a nest that isn't of the outputs' form.

    Args:
        nest: A dict for outputs by name, a tuple or list for outputs by position.
        outputs: The outputs that there are.
        what: The nest's name, for the error.
        needed: The outputs that a dict must have (default: all).
        error: The class of the error, raised where a part is missing, unknown, or of another form.

    Example:
        >>> check_form([0.5], [0, 1], "loss_weights")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        tpufit.errors.ArgumentError: loss_weights must be a tuple or list of 2, as loss is, got a list of 1...
    """
    if isinstance(outputs[0], str):
        required = outputs if needed is None else needed
        fits = isinstance(nest, Mapping) and set(required) <= set(nest) <= set(outputs)
        wanted = f"a dict of {_listed(outputs)}"
    else:
        fits = isinstance(nest, (tuple, list)) and len(nest) == len(outputs)
        wanted = f"a tuple or list of {len(outputs)}"
    if not fits:
        raise error(
            f"{what} must be {wanted}, as loss is, got {described(nest)}. (Where an output has no loss, loss has None.)"
        )


def described(nest: Any) -> str:
    """Describe a nest in a few words.

    Example:
        >>> described({"a": 1, "b": 2}), described([1, 2]), described(0.5)
        ("a dict of 'a' and 'b'", 'a list of 2', '0.5')
    """
    if isinstance(nest, Mapping):
        return f"a dict of {_listed(nest)}"
    if isinstance(nest, (tuple, list)):
        return f"a {type(nest).__name__} of {len(nest)}"
    return f"one tensor of shape {tuple(nest.shape)}" if isinstance(nest, Tensor) else repr(nest)


def _listed(names: Collection[object]) -> str:
    *others, last = map(repr, names) if names else ("nothing",)
    return f"{', '.join(others)} and {last}" if others else last
