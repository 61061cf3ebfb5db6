"""A module's tensors by name, and checks that given weights fit them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import CheckpointMismatchError, WeightsError, join_few
from ..utils.user_code import warn

# The prefixes of names outside the module's `state_dict` and the optimizers' states.
OTHER_PREFIXES = ("buffer/", "loss/", "kept/", "params/")


def named_tensors(module: torch.nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a module's `state_dict`, not detached, so that all names of a tied tensor share one object.

    Raises:
        WeightsError: The module's state has objects other than tensors, which only a pickle could save.
    """
    state = module.state_dict(keep_vars=True)
    foreign = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if foreign:
        raise WeightsError(
            f"the module's state has values other than tensors, which can't be saved, under {foreign}: keep tensors in "
            "buffers, and other values in attributes, not in the state_dict"
        )
    return dict(state)


def match_weights(
    expected: Mapping[str, Tensor], given: Mapping[str, Tensor], skip_mismatch: bool = False
) -> dict[str, Tensor]:
    """Compare given weights with a module's by name, and return the fitting weights in the module's dtypes.

    With `skip_mismatch`, other weights are left out with a warning.

    Raises:
        WeightsError: A name is missing or unknown, a shape differs, or a tied tensor's names have different values.
    """
    shapes = [
        f"{name}: {tuple(given[name].shape)} in the weights, {tuple(tensor.shape)} in the module"
        for name, tensor in expected.items()
        if name in given and given[name].shape != tensor.shape
    ]
    conflicts = _find_conflicting_ties(expected, given)
    problems = {
        "missing in the weights": [name for name in expected if name not in given],
        "unknown to the module": [name for name in given if name not in expected],
        "of another shape": shapes,
        "tied in the module, but with different values in the weights": [f"{a} and {b}" for a, b in conflicts],
    }
    mismatches = [f"{what}: {join_few(names)}" for what, names in problems.items() if names]
    if mismatches:
        message = f"the weights don't fit the module. {'; '.join(mismatches)}"
        if not skip_mismatch:
            raise WeightsError(f"{message}. skip_mismatch=True loads the rest")
        warn(message)
    doubtful = {name for pair in conflicts for name in pair}  # nothing says which value is right
    return {
        name: given[name].to(tensor.dtype)
        for name, tensor in expected.items()
        if name in given and given[name].shape == tensor.shape and name not in doubtful
    }


# The prefixes that PyTorch's data parallelism, Lightning and `torch.compile` add to the names of weights.
_PREFIXES = ("module.", "model.", "_orig_mod.")


def strip_prefixes(expected: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights without the prefixes that wrappers have added to all names.

    Strips the number of prefixes with which the most names match the module's.

    Example:
        >>> weights = {"module.model.bias": torch.zeros(1)}
        >>> [*strip_prefixes({"bias": torch.zeros(1)}, weights)]
        ['bias']
        >>> [*strip_prefixes({"model.bias": torch.zeros(1)}, weights)]
        ['model.bias']
    """
    forms = [dict(given)]
    while prefix := next((p for p in _PREFIXES if forms[-1] and all(name.startswith(p) for name in forms[-1])), ""):
        forms.append({name.removeprefix(prefix): value for name, value in forms[-1].items()})
    return max(forms, key=lambda form: len(form.keys() & expected.keys()))


def check_weights(expected: Mapping[str, Tensor], given: Mapping[str, Tensor], dtypes: bool = True) -> None:
    """Check that a checkpoint's weights fit a module, by default including their dtypes.

    Raises:
        CheckpointMismatchError: The weights don't fit; the message names the differences.
    """
    try:
        match_weights(expected, given)
    except WeightsError as error:
        raise CheckpointMismatchError(
            f"the checkpoint is of another net: {error}".removesuffix(". skip_mismatch=True loads the rest")
            + ". model.load_weights(..., skip_mismatch=True) loads the weights that fit, and training starts over"
        ) from error
    others = [f"{n}: {given[n].dtype} then, {t.dtype} now" for n, t in expected.items() if given[n].dtype != t.dtype]
    if dtypes and others:
        raise CheckpointMismatchError(
            f"the checkpoint has other dtypes: {join_few(others)}. Call compile with the checkpoint's precision"
        )


def _find_conflicting_ties(expected: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    """Return pairs of names of a tied tensor whose given values differ: the last loaded value would silently win."""
    first: dict[int, str] = {}
    conflicts = []
    for name, tensor in expected.items():
        if name in given and given[name].shape == tensor.shape:
            owner = first.setdefault(id(tensor), name)
            if owner != name and not torch.equal(given[owner].to(tensor.dtype), given[name].to(tensor.dtype)):
                conflicts.append((owner, name))
    return conflicts


def readable_name(name: str) -> str:
    """Return a tensor's name in the user's terms.

    Example:
        >>> readable_name("kept/teacher/0.weight"), readable_name("loss/0/centers"), readable_name("0.weight")
        ('teacher.0.weight', 'centers of the loss', '0.weight')
    """
    kind, _, rest = name.partition("/")
    if kind == "loss":
        return f"{rest.partition('/')[2]} of the loss"
    return rest.replace("/", ".") if f"{kind}/" in OTHER_PREFIXES else name
