"""`UsersObjects`: what the user's own objects keep while a `fit` trains, besides tensors: for checkpoints."""

import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..data import Stream
from ..errors import few
from ..metrics import is_collection, is_metric
from ..step import Engine, UserModel, named_tensors
from ..utils.json_codec import is_json
from ..utils.kept import ItemsExcept, Kept
from ..utils.users_code import is_users_module, warn

# The attributes of `Model` and of `Callback` themselves.
_MODELS = {*UserModel.__annotations__, "_engine"}
_CALLBACKS = {"model", "params", "checkpoints"}

# Where tpufit's callbacks are defined, and the `state_dict` that says nothing.
_CALLBACKS_OF = "tpufit.callbacks."
_BASE = "tpufit.callbacks.base"


class UsersObjects:
    """What the user's own objects keep besides tensors: module, loss, metrics, model, optimizers and callbacks.

    Their attributes as they are when this object is made are the script's, and those that change later are state. A
    callback that has a `state_dict` of its own speaks for itself, and streams of data save what their objects keep.
    """

    def __init__(self, engine: Engine, callbacks: Iterable[Any], streams: Iterable[Stream]) -> None:
        model = engine.model
        config = engine.config
        optimizers = engine.state.named_optimizers()
        tracked = [name for name, value in vars(model).items() if is_metric(value) or is_collection(value)]
        roots: dict[str, Any] = {
            "module": model.module,
            "loss": config.loss and config.loss.users,
            "model": ItemsExcept(vars(model), {*_MODELS, *tracked}),
            **optimizers,
            **{metric.name: metric.users for metric in config.metrics},
        }
        for name, optimizer in optimizers.items():
            for i, group in enumerate(optimizer.param_groups):  # the others are saved with the optimizer
                plain = [key for key, value in group.items() if key == "params" or is_json(value)]
                roots[f"{name}.param_groups[{i}]"] = ItemsExcept(group, plain)
        self._engine = engine
        self._warned = set[str]()
        self._streams = list(streams)
        for stream in self._streams:
            stream.keep()
        self._names = set(named_tensors(model.module))
        self._kept = Kept({**roots, **dict(_of_callbacks(callbacks))}, leave=[model, engine])

    def state_dict(self) -> dict[str, Any]:
        """Return what has changed, as JSON holds it; once for each name, warn of what can't be saved."""
        self._kept.look_again()
        every = [
            *self._kept.lost(),
            *_lost_of(self._engine.state.named_optimizers()),
            *(name for stream in self._streams for name in stream.lost()),
        ]
        lost = [name for name in every if name not in self._warned]
        if lost:
            self._warned.update(lost)
            warn_of_lost(lost)
        made = [name for name in named_tensors(self._engine.model.module) if name not in self._names]
        if made:
            self._names.update(made)
            warn(
                f"the module has made {few(made)} in its steps, and no checkpoint with it can be resumed from by a new "
                "one, which lacks it: register it in __init__, or run the module once before fit"
            )
        return self._kept.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set back what had changed."""
        homeless = self._kept.load_state_dict(state)
        if homeless:
            warn(f"the checkpoint has values of objects that are no longer there: {few(homeless)}")


def _lost_of(optimizers: Mapping[str, Optimizer]) -> list[str]:
    """Return the names in the optimizers' states of what can't be saved."""
    return [
        f"{name}.state[...][{key!r}]"
        for name, optimizer in optimizers.items()
        for key in dict.fromkeys(key for own in optimizer.state.values() for key in own)
        if not all(isinstance(own.get(key), Tensor) or is_json(own.get(key)) for own in optimizer.state.values())
    ]


def warn_of_lost(names: list[str]) -> None:
    """Warn of attributes that training changes and checkpoints can't hold."""
    warn(
        f"checkpoints can't hold {few(names)}, which changes in training: a resumed fit finds it as your script makes "
        "it. Keep numbers, strings, random generators and small tensors or lists of them; or buffers, in a module; or "
        "give the object state_dict and load_state_dict"
    )


def _of_callbacks(callbacks: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the callbacks without a `state_dict` of their own, by class; of tpufit's own, the user's functions."""
    counts: Counter[str] = Counter()
    for callback in callbacks:
        kind = type(callback)
        counts[kind.__name__] += 1
        name = kind.__name__ if counts[kind.__name__] == 1 else f"{kind.__name__} {counts[kind.__name__]}"
        if _has_state(callback):
            continue
        attributes = getattr(callback, "__dict__", None)
        if not is_users_module(kind.__module__):
            functions = (types.FunctionType, types.MethodType, partial)
            yield from ((f"{name}.{k}", v) for k, v in (attributes or {}).items() if isinstance(v, functions))
        else:
            yield name, callback if attributes is None else ItemsExcept(attributes, _CALLBACKS)


def _has_state(callback: Any) -> bool:
    """True if its class has a `state_dict`; of a class of the user's, one that tpufit's class hasn't given it."""
    kind = type(callback)
    own: Callable[..., Any] | None = getattr(kind, "state_dict", None)
    ours = _BASE if not is_users_module(kind.__module__) else _CALLBACKS_OF
    return own is not None and not own.__module__.startswith(ours)
