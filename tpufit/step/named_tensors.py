"""A module's tensors by name, and their comparison with given weights."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import CheckpointMismatchError, WeightsError, few
from ..utils.users_code import warn


def named_tensors(module: torch.nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a module's `state_dict`, not detached, so that a tied tensor is one object.

    Raises:
        WeightsError: The module's state has something other than tensors, which only a pickle could hold.
    """
    state = module.state_dict(keep_vars=True)
    foreign = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if foreign:
        raise WeightsError(
            f"the module's state holds something other than tensors under {foreign}, which can't be saved"
        )
    return dict(state)


def match_weights(
    own: Mapping[str, Tensor], given: Mapping[str, Tensor], skip_mismatch: bool = False
) -> dict[str, Tensor]:
    """Compare weights with a module's by name, and return those that fit, in the module's dtypes.

    With `skip_mismatch`, tensors that don't fit are left out with a warning.

    Raises:
        WeightsError: A name is missing or unknown, a shape differs, or two names of one tensor have different values.
    """
    shapes = [
        f"{name}: {tuple(given[name].shape)} in the weights, {tuple(tensor.shape)} in the module"
        for name, tensor in own.items()
        if name in given and given[name].shape != tensor.shape
    ]
    conflicts = _conflicting_ties(own, given)
    problems = {
        "missing in the weights": [name for name in own if name not in given],
        "unknown to the module": [name for name in given if name not in own],
        "of another shape": shapes,
        "tied in the module, but with different values in the weights": [f"{a} and {b}" for a, b in conflicts],
    }
    found = [f"{what}: {few(names)}" for what, names in problems.items() if names]
    if found:
        message = f"the weights don't fit the module. {'; '.join(found)}"
        if not skip_mismatch:
            raise WeightsError(f"{message}. skip_mismatch=True loads the rest")
        warn(message)
    doubtful = {name for pair in conflicts for name in pair}  # one tensor can't have both values, and which is right?
    return {
        name: given[name].to(tensor.dtype)
        for name, tensor in own.items()
        if name in given and given[name].shape == tensor.shape and name not in doubtful
    }


def check_weights(own: Mapping[str, Tensor], given: Mapping[str, Tensor], dtypes: bool = True) -> None:
    """Check that a checkpoint's weights fit a module, by default in their dtypes, too.

    Raises:
        CheckpointMismatchError: The weights don't fit; the message names the differences.
    """
    try:
        match_weights(own, given)
    except WeightsError as error:
        raise CheckpointMismatchError(
            f"the checkpoint is of another net: {error}".removesuffix(". skip_mismatch=True loads the rest")
            + ". model.load_weights(..., skip_mismatch=True) loads the weights that fit, and training starts over"
        ) from error
    others = [f"{n}: {given[n].dtype} then, {t.dtype} now" for n, t in own.items() if given[n].dtype != t.dtype]
    if dtypes and others:
        raise CheckpointMismatchError(
            f"the checkpoint has other dtypes: {few(others)}. compile with the precision that it was made with"
        )


def _conflicting_ties(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    """Return the names of one tied tensor with different given values: the last one loaded would silently win."""
    first: dict[int, str] = {}
    found = []
    for name, tensor in own.items():
        if name in given and given[name].shape == tensor.shape:
            owner = first.setdefault(id(tensor), name)
            if owner != name and not torch.equal(given[owner].to(tensor.dtype), given[name].to(tensor.dtype)):
                found.append((owner, name))
    return found
