"""`Watch`: observes, while a step is traced, what a replay of its graph would leave out."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Hashable
from threading import get_ident
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..utils.counters import note_line
from ..utils.random import RNGState
from ..utils.strict import LENIENT, Strict
from ..utils.user_code import find_calling_lines
from . import device_counters
from .driver import driver, on_device
from .ops.dtypes import check_one_dtype
from .slow_steps import find_cure

_READS = frozenset(
    getattr(Tensor, name)
    for name in ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__", "__array__")
)
# The functions that optimizers and modules call most often, and that need no value.
_WITHOUT_VALUE = frozenset(
    [getattr(Tensor, name).__get__ for name in ("_version", "device", "dtype", "grad", "is_sparse", "shape")]
    + [Tensor.dim, Tensor.is_complex]
)
_PRODUCTS = frozenset(
    [getattr(F, name) for name in ("linear", "bilinear", "conv1d", "conv2d", "conv3d", "scaled_dot_product_attention")]
    + [torch.matmul, torch.mm, torch.bmm, torch.einsum, Tensor.matmul, Tensor.__matmul__, Tensor.mm, Tensor.bmm]
)
# Functions that take one dtype in PyTorch, but two in torch_xla. `runtime.ops` checks other functions.
_OF_ONE_DTYPE = frozenset(
    getattr(place, name)
    for place in (torch, Tensor)
    for name in ("addmm", "baddbmm", "bmm", "dot", "einsum", "mm", "mv")
    if hasattr(place, name)
)
_TORCH_DRAWS = frozenset(
    [getattr(torch, name) for name in ("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial")]
    + [getattr(Tensor, name) for name in ("bernoulli", "bernoulli_", "multinomial", "normal_", "random_", "uniform_")]
)
_READ_OPERATION = "aten::_local_scalar_dense"
_NUMPY_DRAWS = {
    name: function
    for name, function in vars(np.random).items()
    if isinstance(getattr(function, "__self__", None), np.random.RandomState) and name != "get_state"
}


class Watch(TorchFunctionMode):
    """Notes where the traced code reads a value from the device, falls back to the host, or draws a number there.

    It watches only this thread, because another may draw for the data at the same time. It doesn't see NumPy functions
    imported by name (`from numpy.random import rand`), nor Python's `random` while a profiler runs.

    Args:
        strict: The policy on reads and fallbacks.
        step: The name of the code in errors, e.g. `"the train step"`.
        refuses_draws: True to refuse random numbers of the host too, which are harmless in the first traces.

    Attributes:
        read_at: The line that first read a value, e.g. `train.py:12`, or "".
        fell_back: The operations that ran on the host, each with the line that first called it.
        drew_at: The line that first drew a random number, or "".
        drew_unseen: True if NumPy's global generator was used otherwise, as by scipy, or by another thread.
        products: The dtypes in which matrix products were computed.
    """

    def __init__(self, strict: Strict = LENIENT, step: str = "the step", refuses_draws: bool = False) -> None:
        super().__init__()
        self._strict = strict
        self._step = step
        self._draws_strict = strict if refuses_draws else LENIENT
        self.read_at = self.drew_at = ""
        self.drew_unseen = False
        self._has_read = False  # True if the traced code has read a value
        self.fell_back: dict[str, str] = {}
        self.products: set[torch.dtype] = set()
        self._counts_before: tuple[Counter[str], Hashable] = Counter(), ()
        self._fallbacks: Counter[str] = Counter()
        self._thread = get_ident()
        self._profiles = False

    def __enter__(self) -> Watch:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._counts_before = device_counters.count_fallbacks(), device_counters.count_reads()
        self._fallbacks = self._counts_before[0]
        self._profiles = sys.getprofile() is None  # else another profiler runs
        if self._profiles:
            sys.setprofile(self._profile)
        self._numpy = np.random.get_state()
        for name, function in _NUMPY_DRAWS.items():  # profilers don't see these, because Cython calls no hook
            setattr(np.random, name, self._noting(function))
        return self

    def __exit__(self, *error: Any) -> None:
        for name, function in _NUMPY_DRAWS.items():
            setattr(np.random, name, function)
        pairs = zip(self._numpy, np.random.get_state(), strict=True)
        self.drew_unseen = not self.drew_at and not all(np.array_equal(before, after) for before, after in pairs)
        if self._profiles:
            sys.setprofile(None)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    @property
    def traced_code_reads(self) -> bool:
        """True if the traced code, and not only another thread, has read a value."""
        return bool(self._has_read or self.fell_back)

    @property
    def may_have_drawn(self) -> bool:
        """True if the traced code drew a random number on the host."""
        return bool(self.drew_at)

    def describe_read(self) -> str:
        """Describe where the code has read a value; "" if it hasn't."""
        fallbacks, reads_before = self._counts_before
        if not self.read_at and device_counters.count_reads() == reads_before:
            return ""
        operations = sorted(device_counters.count_fallbacks() - fallbacks)
        if operations and not self.read_at:
            lines = " and ".join(sorted(set(self.fell_back.values())))
            called = f", called at {lines}" if lines else ""
            return (
                f"it reads a value from the device: {driver().name} runs {' and '.join(operations)} on the host{called}"
            )
        return f"it reads a value from the device{self.read_at and f' at {self.read_at}'}"

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
        self.drew_at = self.drew_at or find_calling_lines()
        self._draws_strict.refuse(
            f"{self._step} draws a random number on the host at {find_calling_lines()}, so it can't be replayed, "
            "and may need a graph for each outcome. Draw it on the device (torch.rand(..., "
            "device=x.device) and torch.where), or in the data set"
        )

    def _note_read(self) -> None:
        line = find_calling_lines()
        note_line("read", line)
        self.read_at = self.read_at or line
        self._strict.refuse(
            f"{self._step} reads a value from the device at {line}, for which every step would wait. "
            + find_cure(f"it reads a value at {line}")
        )

    def _note_fallbacks(self, before: Counter[str]) -> None:
        """Note the operations that have run on the host since `before`."""
        operations = sorted(device_counters.count_fallbacks() - before)
        for operation in operations:
            if operation not in (_READ_OPERATION, *self.fell_back):
                line = self.fell_back[operation] = find_calling_lines()
                note_line(operation, line)
                self._strict.refuse(
                    f"{driver().name} has no {operation} for the device, which {self._step} calls at "
                    f"{line}: it would run on the host at every step. {find_cure(operation)}"
                )
        if operations in ([], [_READ_OPERATION]):  # without other operations it is a read, e.g. for printing
            self._note_read()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _WITHOUT_VALUE:
            return func(*args)
        reads = func in _READS and on_device(args[0])
        if reads:
            self._has_read = True
            self._note_read()
        fallbacks = self._fallbacks
        reads_before = device_counters.count_reads()
        if func in _OF_ONE_DTYPE and not torch.is_autocast_enabled(driver().device_type):
            operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            check_one_dtype(func.__name__, *filter(on_device, operands))
        result = func(*args, **(kwargs or {}))
        if device_counters.count_reads() != reads_before:
            self._fallbacks = device_counters.count_fallbacks()
            if not reads:
                self._note_fallbacks(fallbacks)
        if func in _PRODUCTS:
            self.products.add(result.dtype)
        if func in _TORCH_DRAWS and result.device.type == "cpu":
            self._note_draw()
        return result


class Glance:
    """A `Watch` without details, which takes a microsecond less for each operation.

    It doesn't know the line of a draw, and can't tell the traced code from other threads: `may_have_drawn` may come
    from the data's thread, and a read from any thread.
    """

    drew_at = ""
    may_have_drawn = drew_unseen = traced_code_reads = False
    products: frozenset[torch.dtype] = frozenset()

    def __enter__(self) -> Glance:
        self._random = RNGState.now()
        self._reads_before = device_counters.count_reads()
        return self

    def __exit__(self, *error: Any) -> None:
        self.may_have_drawn = not self._random.is_now()

    def describe_read(self) -> str:
        """Say that a value has been read; "" if none has."""
        return "it reads a value from the device" if device_counters.count_reads() != self._reads_before else ""
