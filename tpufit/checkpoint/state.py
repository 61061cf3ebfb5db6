"""What `state.json` holds: `Progress`, the point that a `fit` has reached, and the form that all of it must have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..data.position import Position
from ..errors import CheckpointDamagedError
from ..step import SavedState
from ..utils.json_codec import decode
from ..utils.random import RNGState
from .format import Checkpoint, is_whole

# What parsing a state of a wrong form may raise.
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True, slots=True)
class Progress:
    """The point that a `fit` has reached. Each is its own: the last checkpoint's is compared with the newest."""

    epoch: int  # from 0
    batches: int | None = None  # of the epoch, already trained on; None if it has not begun
    trained: Mapping[str, Any] | None = None  # the epoch's logs, if only its validation is left
    # The last validation: the number of the epoch's batches before it, and its logs.
    validated: dict[str, Any] | None = None
    stopped: bool = False  # by a callback
    epochs: int = 0  # asked for
    updates: int = 0  # the optimizer's steps in this training


PROGRESS = [field.name for field in fields(Progress)]


def progress_of(checkpoint: Checkpoint, first: int = 0) -> Progress:
    """Return the point that `fit` had reached at a checkpoint, or the start of epoch `first` outside of `fit`."""
    own = checkpoint.state["progress"]
    if own is None:
        return Progress(first)
    return Progress(**{name: decode(own[name], checkpoint.training) for name in PROGRESS if name in own})


def saved_state(checkpoint: Checkpoint) -> SavedState:
    """Return the part of a checkpoint that `TrainState` loads."""
    state = checkpoint.state
    return SavedState(checkpoint.weights, checkpoint.training, state["model"], state["optimizers"])


def check_state(checkpoint: Checkpoint) -> None:
    """Check the form of a checkpoint's state before anything is loaded from it: a hash only says that it was written.

    Raises:
        CheckpointDamagedError: A part is missing, or of another kind.
    """
    state = checkpoint.state
    wrong = [name for name, form in _FORM.items() if not _fits(state.get(name, _GONE), form)]
    try:
        if not wrong:
            _check_progress(checkpoint)
            RNGState.of(state["draws"])
            for position in map(Position.of, (state["data"], state["validation"])):
                if not _fits([position.batches, position.number, position.offset], [is_whole]):
                    raise ValueError("the position in the data")
            for own in state["callbacks"]:
                decode(own["state"], checkpoint.training)
    except MALFORMED as error:
        wrong = [f"{type(error).__name__}: {str(error)[:100]}"]
    if wrong:
        raise CheckpointDamagedError(
            f"the state of the checkpoint of step {checkpoint.step} can't be what was written: {', '.join(wrong)}"
        )


def _check_progress(checkpoint: Checkpoint) -> None:
    """Raise an error of `MALFORMED` if the progress, or the sums of the epoch so far, can't be gone on with."""
    progress = progress_of(checkpoint)
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


# The form of a nest: a type; a function that says if it fits; a list of one form, for all items; a dict of the forms of
# some of its values, or of one form for all, under `str`.
_Form = type | Callable[[Any], bool] | list[Any] | dict[Any, Any]

_GONE = object()


def _fits(value: Any, form: _Form) -> bool:
    if isinstance(form, dict):
        if not isinstance(value, Mapping):
            return False
        if str in form:
            return all(_fits(item, form[str]) for item in value.values())
        return all(_fits(value.get(name, _GONE), inner) for name, inner in form.items())
    if isinstance(form, list):
        return isinstance(value, (list, tuple)) and all(_fits(item, form[0]) for item in value)
    return isinstance(value, form) if isinstance(form, type) else form(value)


def _or_none(form: _Form) -> Callable[[Any], bool]:
    return lambda value: value is None or _fits(value, form)


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2


_PROGRESS: _Form = {
    "epoch": is_whole,
    "batches": _or_none(is_whole),
    "trained": _or_none(dict),
    "validated": _or_none({"batches": is_whole, "logs": dict}),
    "stopped": bool,
    "epochs": is_whole,
    "updates": is_whole,
}
_FORM: dict[str, _Form] = {
    "progress": _or_none(dict),
    "data": dict,
    "validation": dict,
    "callbacks": [{"class": str, "state": lambda state: state is not _GONE}],
    "objects": {str: dict},
    "metrics": _or_none(
        {
            "keys": [_is_pair],
            "means": [str],
            "updated": {str: is_whole},
            "rows": is_whole,
            "batches": [[is_whole]],
            "metrics": [{"name": str}],
        }
    ),
    "draws": dict,
    "compile": lambda arguments: arguments is _GONE or arguments is None or isinstance(arguments, dict),
    "model": {
        **dict.fromkeys(("step", "updates", "batches_waiting", "passes"), is_whole),
        "seed": lambda seed: (
            is_whole(seed) or (type(seed) is int and 1 << 63 <= seed < 1 << 64)
        ),  # as PyTorch draws one
        "chosen_steps": {str: is_whole},
        "swapped": {str: bool},
    },
    "optimizers": {str: {"class": str, "groups": [{"params": [str]}], "numbers": {str: dict}}},
    "settings": dict,
}
