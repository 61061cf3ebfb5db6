"""The content of `state.json`: `Progress`, the point that a `fit` has reached, and the check of its form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..data.data_position import Position
from ..errors import CheckpointDamagedError
from ..step import SavedState
from ..utils.json_codec import decode
from ..utils.random import RNGState
from .format import Checkpoint, fits_int64

# The errors that parsing a malformed state may raise.
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True, slots=True)
class Progress:
    """The point that a `fit` has reached. Immutable, since the last checkpoint's is compared with the newest."""

    epoch: int  # from 0
    batches: int | None = None  # of the epoch, already trained on; None if it hasn't begun
    trained: Mapping[str, Any] | None = None  # the epoch's logs, if only its validation is pending
    # The last validation: the number of the epoch's batches before it, and its logs.
    validated: dict[str, Any] | None = None
    stopped: bool = False  # by a callback
    epochs: int = 0  # requested
    updates: int = 0  # the optimizer's steps in this training


PROGRESS = [field.name for field in fields(Progress)]


def read_progress(checkpoint: Checkpoint, first: int = 0) -> Progress:
    """Return the point that `fit` had reached at a checkpoint; for one outside `fit` the start of epoch `first`."""
    saved = checkpoint.state["progress"]
    if saved is None:
        return Progress(first)
    return Progress(**{name: decode(saved[name], checkpoint.training) for name in PROGRESS if name in saved})


def extract_saved_state(checkpoint: Checkpoint) -> SavedState:
    """Return the part of a checkpoint that `TrainState` loads."""
    state = checkpoint.state
    return SavedState(checkpoint.weights, checkpoint.training, state["model"], state["optimizers"])


def check_state(checkpoint: Checkpoint) -> None:
    """Check the form of a checkpoint's state before loading it: a hash doesn't prove that the content is valid.

    Raises:
        CheckpointDamagedError: A part is missing, or has a wrong type.
    """
    state = checkpoint.state
    wrong = [name for name, form in _FORM.items() if not _fits(state.get(name, _MISSING), form)]
    try:
        if not wrong:
            _check_progress(checkpoint)
            RNGState.of(state["draws"])
            for position in map(Position.of, (state["data"], state["validation"])):
                if not _fits([position.batches, position.number, position.offset], [fits_int64]):
                    raise ValueError("the position in the data")
            for entry in state["callbacks"]:
                decode(entry["state"], checkpoint.training)
    except MALFORMED as error:
        wrong = [f"{type(error).__name__}: {str(error)[:100]}"]
    if wrong:
        raise CheckpointDamagedError(
            f"the state of the checkpoint of step {checkpoint.step} is invalid: {', '.join(wrong)}"
        )


def _check_progress(checkpoint: Checkpoint) -> None:
    """Raise an error of `MALFORMED` if the progress, or the sums of the epoch so far, are invalid."""
    progress = read_progress(checkpoint)
    if not _fits({name: getattr(progress, name) for name in PROGRESS}, _PROGRESS):
        raise ValueError("progress")
    sums = checkpoint.state["metrics"]
    if progress.batches is None or progress.trained is not None:
        return
    if sums is None:
        raise ValueError("metrics")
    names = [f"metric/{kind}/{i}" for kind in ("default", "sum") for i in range(len(sums["keys"]))]
    names += [
        f"metric/batch/{slot}/{i}/{j}"
        for slot, sizes in enumerate(sums["batches"])
        for i, size in enumerate(sizes)
        for j in range(min(size, len(checkpoint.training)))
    ]
    for name in names:
        checkpoint.training[name]


# The form of a nest: a type; a predicate; a list of one form, for all items; a dict of forms for some values, or under
# `str` for all values.
_Form = type | Callable[[Any], bool] | list[Any] | dict[Any, Any]

_MISSING = object()


def _fits(value: Any, form: _Form) -> bool:
    if isinstance(form, dict):
        if not isinstance(value, Mapping):
            return False
        if str in form:
            return all(_fits(item, form[str]) for item in value.values())
        return all(_fits(value.get(name, _MISSING), inner) for name, inner in form.items())
    if isinstance(form, list):
        return isinstance(value, (list, tuple)) and all(_fits(item, form[0]) for item in value)
    return isinstance(value, form) if isinstance(form, type) else form(value)


def _or_none(form: _Form) -> Callable[[Any], bool]:
    return lambda value: value is None or _fits(value, form)


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2


_PROGRESS: _Form = {
    "epoch": fits_int64,
    "batches": _or_none(fits_int64),
    "trained": _or_none(dict),
    "validated": _or_none({"batches": fits_int64, "logs": dict}),
    "stopped": bool,
    "epochs": fits_int64,
    "updates": fits_int64,
}
_CHANGES: _Form = {
    "requires_grad": {str: bool},
    "layers": {str: _or_none(lambda layer: _is_pair(layer) and isinstance(layer[0], str) and fits_int64(layer[1]))},
}
_FORM: dict[str, _Form] = {
    "progress": _or_none(dict),
    "data": dict,
    "validation": dict,
    "callbacks": [{"class": str, "state": lambda state: state is not _MISSING}],
    "objects": {str: dict},
    "changes": lambda changes: changes is _MISSING or _fits(changes, _CHANGES),
    "metrics": _or_none(
        {
            "keys": [_is_pair],
            "returned": [str],
            "slots": {str: fits_int64},
            "rows": fits_int64,
            "batches": [[fits_int64]],
            "metrics": [{"name": str}],
        }
    ),
    "draws": dict,
    "compile": lambda arguments: arguments is _MISSING or arguments is None or isinstance(arguments, dict),
    "model": {
        **dict.fromkeys(("step", "updates", "batches_waiting", "passes"), fits_int64),
        "seed": lambda seed: (
            fits_int64(seed) or (type(seed) is int and 1 << 63 <= seed < 1 << 64)
        ),  # as PyTorch draws seeds
        "chosen_steps": {str: fits_int64},
        "swapped": {str: bool},
    },
    "optimizers": {str: {"class": str, "groups": [{"params": [str]}], "numbers": {str: dict}}},
    "settings": dict,
}
