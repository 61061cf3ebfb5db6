"""`Watch`: sees, while a step is traced, what a replay of its graph would leave out."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from threading import get_ident
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_LOOKS = frozenset(
    getattr(Tensor, name)
    for name in ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__", "__array__")
)
_PRODUCTS = frozenset(
    [getattr(F, name) for name in ("linear", "bilinear", "conv1d", "conv2d", "conv3d", "scaled_dot_product_attention")]
    + [torch.matmul, torch.mm, torch.bmm, torch.einsum, Tensor.matmul, Tensor.__matmul__, Tensor.mm, Tensor.bmm]
)
_TORCH_DRAWS = frozenset(
    [getattr(torch, name) for name in ("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial")]
    + [getattr(Tensor, name) for name in ("bernoulli", "bernoulli_", "multinomial", "normal_", "random_", "uniform_")]
)
_NUMPY_DRAWS = {
    name: function
    for name, function in vars(np.random).items()
    if isinstance(getattr(function, "__self__", None), np.random.RandomState) and name != "get_state"
}


class Watch(TorchFunctionMode):
    """Notes where the code being traced first looks at a value on the device, or draws a number on the host.

    Only this thread's doings count: another may draw for the data at the same time. Not seen are functions of NumPy's
    that were imported by name (`from numpy.random import rand`), and Python's `random` while a profiler runs.

    Attributes:
        where: The line that looked, e.g. `train.py:12`, or nothing.
        drew: The line that drew, or nothing.
        products: The formats in which matrix products were computed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.where = self.drew = ""
        self.products: set[torch.dtype] = set()
        self._thread = get_ident()
        self._profiles = False

    def __enter__(self) -> Watch:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._profiles = sys.getprofile() is None  # else somebody measures
        if self._profiles:
            sys.setprofile(self._profile)
        for name, function in _NUMPY_DRAWS.items():  # written in C in a way that no profiler sees
            setattr(np.random, name, self._noting(function))
        return self

    def __exit__(self, *error: Any) -> None:
        for name, function in _NUMPY_DRAWS.items():
            setattr(np.random, name, function)
        if self._profiles:
            sys.setprofile(None)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _profile(self, frame: Any, event: str, called: Any) -> None:
        if event == "c_call" and isinstance(getattr(called, "__self__", None), random.Random):
            self._note_draw()

    def _noting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any, **kwargs: Any) -> Any:
            if get_ident() == self._thread:
                self._note_draw()
            return function(*args, **kwargs)

        return noting

    def _note_draw(self) -> None:
        self.drew = self.drew or _users_line()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _LOOKS and not self.where and args[0].device.type == "xla":
            self.where = _users_line()
        result = func(*args, **(kwargs or {}))
        if func in _PRODUCTS:
            self.products.add(result.dtype)
        if func in _TORCH_DRAWS and result.device.type == "cpu":
            self._note_draw()
        return result


def _users_line() -> str:
    """The innermost line of the stack that is neither ours nor a library's, e.g. `train.py:12`."""
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
    pythons = os.path.dirname(os.__file__) + os.sep
    frame = sys._getframe(1)
    while frame.f_back is not None:
        path = frame.f_code.co_filename
        if not path.startswith((ours, pythons)) and f"{os.sep}site-packages{os.sep}" not in path:
            return f"{os.path.basename(path)}:{frame.f_lineno}"
        frame = frame.f_back
    return "a library's code"
