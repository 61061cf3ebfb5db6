"""`Unsharding`: gathers weights that are split over the cores where a step uses them, and only there.

By itself XLA's partitioner may gather activations instead, to compute with each core's part of a weight. Here each
function that takes a split weight and another tensor gets the whole weight, and its gradient is split again at once, so
that the partitioner sums only the part that a core keeps. A product keeps no whole weight for its backward pass, which
gathers it again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary

from ..backend import Placement, Sharding
from .pending_tensors import put_behind_barrier

# Names of functions: first, products, which autocast computes in its own dtype.
_PRODUCTS = re.compile(
    r"linear|bilinear|(__r?)?matmul(__)?|mm|bmm|mv|addmm|baddbmm|addmv|einsum|tensordot|conv(_transpose)?[123]d"
)
# Functions, such as products, whose gradient doesn't need their result, and that draw no random numbers: if they are
# traced again, the device only has to gather the weight again.
_GATHERED_AGAIN = re.compile(rf"{_PRODUCTS.pattern}|embedding|embedding_bag|index_select|(__r?)?mul(__)?")
# Functions that return a view of a weight or of its part.
_VIEWS = re.compile(
    r"t|transpose|swapaxes|permute|movedim|adjoint|view|view_as|reshape|flatten|unflatten|squeeze|unsqueeze|expand"
    r"|__getitem__|narrow|select|chunk|split|tensor_split|unbind|contiguous|to|float|bfloat16|type_as"
)
# Functions that take a weight but compute nothing with it.
_NOT_COMPUTING = frozenset(("backward", "grad", "_make_subclass"))
_VIEWING = frozenset((Tensor.T.__get__, Tensor.mT.__get__))  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _WeightView:
    """A split weight, or a view of one."""

    weight: Tensor
    make: Callable[[Tensor], Tensor]  # makes the view from the whole weight


@dataclass(frozen=True)
class _Call:
    """A call of a function that takes split weights."""

    func: Callable[..., Any]
    leaves: Sequence[Any]  # its arguments, with None in place of tensors
    spec: TreeSpec  # the nest of its arguments
    indices: Sequence[int]  # of its tensors among the leaves
    views: Mapping[int, _WeightView]  # of its split weights, by the tensor's index
    shardings: Mapping[int, Sharding]  # of its split weights, by the tensor's index
    placement: Placement
    dtype: torch.dtype | None  # in which autocast computes it

    def __call__(self, tensors: Sequence[Tensor], after: Tensor | None = None) -> Any:
        """Call the function with its tensors, including the split weights.

        Weights are gathered after the tensor `after`, or else whenever the compiler chooses.
        """
        leaves = list(self.leaves)
        for index, tensor in zip(self.indices, tensors, strict=True):
            view = self.views.get(index)
            leaves[index] = tensor if view is None else view.make(self._unshard(tensor, self.shardings[index], after))
        args, kwargs = tree_unflatten(leaves, self.spec)
        return self.func(*args, **kwargs)

    def _unshard(self, weight: Tensor, sharding: Sharding, after: Tensor | None) -> Tensor:
        if after is not None:
            weight = _After.apply(self.placement, sharding, weight, after)  # type: ignore[no-untyped-call]
        if self.dtype is not None and weight.dtype is torch.float32:
            weight = weight.to(self.dtype)  # before the transfer, which it halves
        whole: Tensor = _Whole.apply(self.placement, sharding, weight)  # type: ignore[no-untyped-call]
        return whole


class _Whole(torch.autograd.Function):
    """Gathers a split weight on every core. Its gradient is split like the weight."""

    @staticmethod
    def forward(ctx: Any, placement: Placement, sharding: Sharding, weight: Tensor) -> Tensor:
        ctx.placement = placement
        ctx.sharding = sharding
        return placement.gather(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, None, ctx.placement.lay_out(gradient, ctx.sharding)


class _After(torch.autograd.Function):
    """Returns a weight behind a barrier, so that it isn't gathered before another tensor is computed."""

    @staticmethod
    def forward(ctx: Any, placement: Placement, sharding: Sharding, weight: Tensor, other: Tensor) -> Tensor:
        behind, _ = put_behind_barrier([weight, other])
        return placement.lay_out(behind, sharding)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, None, gradient, None


class _GatheredAgain(torch.autograd.Function):
    """A function of split weights, which are gathered again for its backward pass.

    The function is traced again there. Only its gradients are used, so the compiler computes nothing else again.
    """

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> Any:
        ctx.call = call
        ctx.autocast = _autocast(tensors[0].device.type)
        ctx.save_for_backward(*tensors)
        return call(tensors)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        further = torch.is_grad_enabled()  # True for gradients of gradients
        needed = ctx.needs_input_grad[1:]
        with torch.enable_grad(), ctx.autocast():
            inputs = [
                (t.view_as(t) if further else t.detach().requires_grad_()) if needs else t.detach()
                for t, needs in zip(ctx.saved_tensors, needed, strict=True)
            ]
            result = ctx.call(inputs, after=gradient)
            wanted = [t for t, needs in zip(inputs, needed, strict=True) if needs]
            gradients = iter(torch.autograd.grad(result, wanted, gradient, create_graph=further, allow_unused=True))
        return None, *(next(gradients) if needs else None for needs in needed)


def _autocast(kind: str) -> Callable[[], Any]:
    """Return a function that makes contexts with the current autocast."""
    dtype = torch.get_autocast_dtype(kind)
    enabled = torch.is_autocast_enabled(kind)
    return lambda: torch.autocast(kind, dtype=dtype, enabled=enabled)


class Unsharding(TorchFunctionMode):
    """Passes whole weights to the functions that a step calls."""

    def __init__(self, shardings: Mapping[int, Sharding], placement: Placement) -> None:
        super().__init__()
        self._shardings = dict(shardings)
        self._placement = placement
        self._views: Any = WeakIdKeyDictionary()
        self._in_block = self._paused = False
        self._behind: Tensor | None = None

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """A context in which functions get the split weights themselves: each core computes with its own part."""
        before = self._paused
        self._paused = True
        try:
            yield
        finally:
            self._paused = before

    @contextmanager
    def in_block(self) -> Iterator[None]:
        """A context for a block that will be computed again as a whole, including the gathering of its weights."""
        before = self._in_block
        self._in_block = True
        try:
            yield
        finally:
            self._in_block = before

    @contextmanager
    def computing_again(
        self, weights: Mapping[str, Tensor], copies: dict[str, Tensor], behind: Tensor | None = None
    ) -> Iterator[None]:
        """A context in which a block is computed again, in a backward pass, where function modes are off.

        The block is computed with copies of its weights, which are split like the weights. If its weights aren't known,
        the split weights that it uses are gathered again, after the tensor `behind`.
        """
        split = {name: self._shardings[id(w)] for name, w in weights.items() if id(w) in self._shardings}
        for name, sharding in split.items():
            learns = copies[name].requires_grad
            copies[name] = self._placement.lay_out(copies[name].detach(), sharding).requires_grad_(learns)
            self._shardings[id(copies[name])] = sharding
        before = self._behind
        self._behind = behind
        try:
            with self, self.in_block():
                yield
        finally:
            self._behind = before
            for name in split:
                del self._shardings[id(copies[name])]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self._paused or name in _NOT_COMPUTING or (name in ("__get__", "__set__") and func not in _VIEWING):
            return func(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        views = {i: view for i in at if (view := self._view_of(leaves[i])) is not None}
        if not views:
            return func(*args, **kwargs)
        if len(views) == len(at):
            result = func(*args, **kwargs)
            if len(at) == 1 and (_VIEWS.fullmatch(name) or func in _VIEWING):
                self._note_views(func, leaves, spec, at[0], views[at[0]], result)
            return result
        if (name.endswith("_") and not name.endswith("__")) or kwargs.get("out") is not None:
            return func(*args, **kwargs)  # the function writes into a tensor
        return self._call(func, name, leaves, spec, at, views)

    def _view_of(self, tensor: Tensor) -> _WeightView | None:
        if id(tensor) in self._shardings:
            return _WeightView(tensor, lambda whole: whole)
        view: _WeightView | None = self._views.get(tensor)
        return view

    def _note_views(
        self, func: Any, leaves: list[Any], spec: TreeSpec, at: int, base: _WeightView, result: Any
    ) -> None:
        """Note how a function makes views of a split weight."""
        several = isinstance(result, (tuple, list))

        def make(whole: Tensor, index: int) -> Tensor:
            args, kwargs = tree_unflatten([*leaves[:at], base.make(whole), *leaves[at + 1 :]], spec)
            views = func(*args, **kwargs)
            view: Tensor = views[index] if several else views
            return view

        leaves = [*leaves[:at], None, *leaves[at + 1 :]]
        for index, tensor in enumerate(result if several else [result]):
            if isinstance(tensor, Tensor) and tensor.dtype.is_floating_point and id(tensor) not in self._shardings:
                # The view of a view applies both functions to the whole weight.
                self._views[tensor] = _WeightView(base.weight, partial(make, index=index))

    def _call(
        self, func: Any, name: str, leaves: list[Any], spec: TreeSpec, at: list[int], views: dict[int, _WeightView]
    ) -> Any:
        tensors = [views[i].weight if i in views else leaves[i] for i in at]
        kind = tensors[0].device.type
        casts = _PRODUCTS.fullmatch(name) and torch.is_autocast_enabled(kind)
        call = _Call(
            func=func,
            leaves=[None if i in at else leaf for i, leaf in enumerate(leaves)],
            spec=spec,
            indices=at,
            views=views,
            shardings={i: self._shardings[id(view.weight)] for i, view in views.items()},
            placement=self._placement,
            dtype=torch.get_autocast_dtype(kind) if casts else None,
        )
        learns = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        if learns and not self._in_block and _GATHERED_AGAIN.fullmatch(name):
            return _GatheredAgain.apply(call, *tensors)  # type: ignore[no-untyped-call]
        return call(tensors, self._behind)
