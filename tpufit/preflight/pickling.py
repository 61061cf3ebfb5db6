"""`pickle_training`: pickles a training for another process, without the values of its weights.

Another process traces it, because a process can choose its cores only once, and the user's process may train on other
cores.
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

# Omitted from the model: the other process builds a new engine, and the history keeps callbacks, which no step reads.
_OMITTED = {"_engine": None, "history": None}


def pickle_training(training: Any, model: Any, state: Collection[int]) -> bytes:
    """Pickle a training, which is any object that refers to the user's model.

    Classes and functions of the user's script or notebook are pickled by value. Tensors that training changes, whose
    `id` is in `state`, are pickled as shape and dtype.

    Raises:
        PreflightError: Something in the model can't be pickled.
    """
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if obj is model:
                return _make_bare, (type(obj),), vars(obj) | _OMITTED
            if isinstance(obj, Tensor) and (id(obj) in state or obj.device.type != "cpu"):
                kind = type(obj) if isinstance(obj, nn.Parameter) else Tensor
                return _without_value, (kind, tuple(obj.shape), obj.dtype, obj.requires_grad, vars(obj))
            if isinstance(obj, Optimizer):  # its `__getstate__` omits attributes of subclasses
                kept = {name: value for name, value in vars(obj).items() if name not in ("step", "zero_grad")}
                return _make_bare, (type(obj),), kept
            if isinstance(obj, CodeType):  # cloudpickle omits the file name since 3.1.3, which errors need for lines
                return marshal.loads, (marshal.dumps(obj),)
            if isinstance(obj, nn.Module) and is_parametrized(obj):  # it refuses to be pickled otherwise
                return _make_bare, (type(obj),), vars(obj)
            return super().reducer_override(obj)

    def dump(part: Any) -> bytes:
        file = io.BytesIO()
        Pickler(file).dump(part)
        return file.getvalue()

    def culprit(name: str, whole: Any) -> str:
        """Return the name and the class of the innermost part that can't be pickled."""
        for key, part in _parts(whole).items():
            try:
                dump(part)
            except Exception:
                return culprit(f"{name}.{key}", part)
        return f"{name.removeprefix('.')} is a {type(whole).__name__}"

    try:
        return dump(training)
    except Exception as error:  # the user's `__getstate__` and `__reduce__` may raise any error
        raise PreflightError(
            f"the model can't be sent to the process that compiles it: {culprit('', training)}, and {error}. Keep "
            "open files, locks and the like out of the model, the loss and the metrics, or give their class a "
            "__getstate__ that omits them"
        ) from error


def _parts(whole: Any) -> dict[Any, Any]:
    """Return the parts of an object by name; of a module, also its layers."""
    if isinstance(whole, (list, tuple)):
        return dict(enumerate(whole))
    if isinstance(whole, dict):
        return whole
    parts = {name: part for name, part in getattr(whole, "__dict__", {}).items() if name not in _OMITTED}
    return parts.pop("_modules") | parts if isinstance(whole, nn.Module) else parts


def _make_bare(kind: Any) -> Any:
    """Return an object of a class without calling `__init__`."""
    return kind.__new__(kind)


def _without_value(
    kind: type, shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool, attributes: dict[str, Any]
) -> Tensor:
    tensor = torch.empty(shape, dtype=dtype, device="meta")
    if issubclass(kind, nn.Parameter):
        tensor = torch.Tensor._make_subclass(kind, tensor, requires_grad)
    vars(tensor).update(attributes)
    return tensor
