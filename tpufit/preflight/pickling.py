"""`pickled`: a training on its way to another process, without the values of its weights.

Another process has to trace it, because a process settles its cores once, and the user's goes on to train on others.
"""

from __future__ import annotations

import io
import marshal
from collections.abc import Collection
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.optim import Optimizer

from ..errors import PreflightError

# Of the model: its engine is built anew where it goes, and histories keep callbacks, which no step looks at.
_LEFT_BEHIND = {"_engine": None, "history": None}


def pickled(training: Any, model: Any, state: Collection[int]) -> bytes:
    """Pickle a training: any object that refers to the user's model.

    Classes and functions of the user's script or notebook go along by value. Of tensors that training changes, whose
    `id` is in `state`, only shape and dtype go along.

    Raises:
        PreflightError: Something in the model can't be pickled.
    """
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if obj is model:
                return _bare, (type(obj),), vars(obj) | _LEFT_BEHIND
            if isinstance(obj, Tensor) and (id(obj) in state or obj.device.type != "cpu"):
                kind = type(obj) if isinstance(obj, nn.Parameter) else Tensor
                return _without_value, (kind, tuple(obj.shape), obj.dtype, obj.requires_grad, vars(obj))
            if isinstance(obj, Optimizer):  # whose own way leaves out what a subclass adds
                kept = {name: value for name, value in vars(obj).items() if name not in ("step", "zero_grad")}
                return _bare, (type(obj),), kept
            if isinstance(obj, CodeType):  # cloudpickle from 3.1.3 on leaves out the file that an error's line is in
                return marshal.loads, (marshal.dumps(obj),)
            if isinstance(obj, nn.Module) and is_parametrized(obj):  # which refuses to be pickled by others
                return _bare, (type(obj),), vars(obj)
            return super().reducer_override(obj)

    def dumped(part: Any) -> bytes:
        file = io.BytesIO()
        Pickler(file).dump(part)
        return file.getvalue()

    def culprit(name: str, whole: Any) -> str:
        """The name of the innermost part that can't be pickled."""
        for key, part in _parts(whole).items():
            try:
                dumped(part)
            except Exception:
                return culprit(f"{name}.{key}", part)
        return f"{name.removeprefix('.')} is a {type(whole).__name__}"

    try:
        return dumped(training)
    except Exception as error:  # the user's own `__getstate__` and `__reduce__` may raise any
        raise PreflightError(
            f"the model can't be sent to the process that compiles it: {culprit('', training)}, and {error}. Keep "
            "open files, locks and the like out of the model, the loss and the metrics, or give their class a "
            "__getstate__ that leaves them out"
        ) from error


def _parts(whole: Any) -> dict[Any, Any]:
    """The parts of an object by their names; the layers of a module by theirs."""
    if isinstance(whole, (list, tuple)):
        return dict(enumerate(whole))
    if isinstance(whole, dict):
        return whole
    parts = {name: part for name, part in getattr(whole, "__dict__", {}).items() if name not in _LEFT_BEHIND}
    return parts.pop("_modules") | parts if isinstance(whole, nn.Module) else parts


def _bare(kind: Any) -> Any:
    """An object of a class as it is before `__init__`."""
    return kind.__new__(kind)


def _without_value(
    kind: type, shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool, attributes: dict[str, Any]
) -> Tensor:
    tensor = torch.empty(shape, dtype=dtype, device="meta")
    if issubclass(kind, nn.Parameter):
        tensor = torch.Tensor._make_subclass(kind, tensor, requires_grad)
    vars(tensor).update(attributes)
    return tensor
