"""`UserObjects`: the state of the user's objects during a `fit`, other than tensors, for checkpoints."""

import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..data import Stream
from ..errors import join_few
from ..metrics import is_collection, is_metric
from ..step import MODEL_ATTRIBUTES, Engine, named_tensors
from ..utils.json_codec import is_json
from ..utils.saved_attributes import ItemsExcept, SavedAttributes
from ..utils.user_code import is_user_module, warn

# The attributes of `Callback` itself.
_CALLBACKS = {"model", "params", "checkpoint_writer"}

# The modules of tpufit's callbacks, and of their default `state_dict`.
_TPUFITS_CALLBACKS = "tpufit.callbacks."
_BASE = "tpufit.callbacks.base"


class UserObjects:
    """The state, other than tensors, of the user's objects: module, loss, metrics, model, optimizers and callbacks.

    Attributes that change after this object is made are state; others come from the script. A callback's `state_dict`
    takes precedence, and data streams save the state of their objects.
    """

    def __init__(self, engine: Engine, callbacks: Iterable[Any], streams: Iterable[Stream]) -> None:
        model = engine.model
        config = engine.config
        optimizers = engine.state.named_optimizers()
        tracked = [name for name, value in vars(model).items() if is_metric(value) or is_collection(value)]
        roots: dict[str, Any] = {
            "module": model.module,
            "loss": config.loss and config.loss.user_code,
            "model": ItemsExcept(vars(model), {*MODEL_ATTRIBUTES, *tracked}),
            **optimizers,
            **{metric.name: metric.user_code for metric in config.metrics},
        }
        for name, optimizer in optimizers.items():
            for i, group in enumerate(optimizer.param_groups):  # the other entries are saved with the optimizer
                plain = [key for key, value in group.items() if key == "params" or is_json(value)]
                roots[f"{name}.param_groups[{i}]"] = ItemsExcept(group, plain)
        self._engine = engine
        self._warned = set[str]()
        self._streams = list(streams)
        for stream in self._streams:
            stream.track_objects()
        self._names = set(named_tensors(model.module))
        self._attributes = SavedAttributes({**roots, **dict(_collect_callbacks(callbacks))}, skip=[model, engine])

    def state_dict(self) -> dict[str, Any]:
        """Return the changed values, as JSON values; warn once for each name about values that can't be saved."""
        self._attributes.refresh()
        every = [
            *self._attributes.list_unsaved(),
            *_list_lost_optimizer_values(self._engine.state.named_optimizers()),
            *(name for stream in self._streams for name in stream.list_lost_values()),
        ]
        lost = [name for name in every if name not in self._warned]
        if lost:
            self._warned.update(lost)
            warn_of_lost(lost)
        made = [name for name in named_tensors(self._engine.model.module) if name not in self._names]
        if made:
            self._names.update(made)
            warn(
                f"the module has created {join_few(made)} in its steps, so a new module, which lacks it, can't resume "
                "from the checkpoints: register it in __init__, or run the module once before fit"
            )
        return self._attributes.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the changed values."""
        homeless = self._attributes.load_state_dict(state)
        if homeless:
            warn(f"the checkpoint has values of objects that no longer exist: {join_few(homeless)}")


def _list_lost_optimizer_values(optimizers: Mapping[str, Optimizer]) -> list[str]:
    """Return the names of the optimizers' state values that can't be saved."""
    return [
        f"{name}.state[...][{key!r}]"
        for name, optimizer in optimizers.items()
        for key in dict.fromkeys(key for state in optimizer.state.values() for key in state)
        if not all(isinstance(state.get(key), Tensor) or is_json(state.get(key)) for state in optimizer.state.values())
    ]


def warn_of_lost(names: list[str]) -> None:
    """Warn about attributes that training changes and checkpoints can't save."""
    warn(
        f"checkpoints can't save {join_few(names)}, changed by training: a resumed fit starts with your script's "
        "value. Use numbers, strings, random generators and small tensors or lists of them; or buffers, in a module; "
        "or give the object state_dict and load_state_dict"
    )


def _collect_callbacks(callbacks: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the callbacks without a `state_dict`, by class name; of tpufit's callbacks only the user's functions."""
    counts: Counter[str] = Counter()
    for callback in callbacks:
        kind = type(callback)
        counts[kind.__name__] += 1
        name = kind.__name__ if counts[kind.__name__] == 1 else f"{kind.__name__} {counts[kind.__name__]}"
        if _has_state(callback):
            continue
        attributes = getattr(callback, "__dict__", None)
        if not is_user_module(kind.__module__):
            functions = (types.FunctionType, types.MethodType, partial)
            yield from ((f"{name}.{k}", v) for k, v in (attributes or {}).items() if isinstance(v, functions))
        else:
            yield name, callback if attributes is None else ItemsExcept(attributes, _CALLBACKS)


def _has_state(callback: Any) -> bool:
    """True if a callback's class has a `state_dict`; for a user's class, one that isn't inherited from tpufit."""
    kind = type(callback)
    method: Callable[..., Any] | None = getattr(kind, "state_dict", None)
    ours = _BASE if not is_user_module(kind.__module__) else _TPUFITS_CALLBACKS
    return method is not None and not method.__module__.startswith(ours)
