"""`recomputing`: blocks of a module keep only some activations, and rematerialize the rest in the backward pass.

The same holds for functions that the user's code passes to `torch.utils.checkpoint`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as checkpoints
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from ..utils.replacing_attributes import replacing_attributes
from ..utils.user_code import warn
from .driver import driver
from .ops.residuals import Residuals
from .pending_tensors import put_behind_barrier
from .trace_context import trace_context, tracing_with
from .trace_seeds import TraceSeeds

# PyTorch's `checkpoint` without its wrapper. Callers have references to the wrapper, which calls whatever function is
# in this attribute: replacing it redirects even old references, as in transformers' and timm's layers.
_checkpoint: Any = inspect.unwrap(checkpoints.checkpoint)
_CALLED_ATTRIBUTE = "__dynamo_disable"


@contextmanager
def recomputing(blocks: Mapping[nn.Module, str], seeds: object) -> Iterator[None]:
    """A context for a trace in which each call of a block is computed again when its gradients are needed.

    Results and gradients don't change: the second time a block draws the same random numbers, and reads its buffers as
    they were before the first time, without changing them. Its Python runs twice, unless only its attention is computed
    again.

    Functions called by `torch.utils.checkpoint` are computed again, too. They change buffers as in PyTorch: a batch
    norm counts each batch twice.

    Args:
        blocks: Modules that don't contain each other, each with its policy; see `step/remat.py`.
        seeds: The argument `seed` of the traced body: a `TraceSeeds` in a trace; a function on the host, where nothing
            is changed; None outside of traces, where `checkpoint` calls its function directly.

    Source: `torch.utils.checkpoint`, and the policies of `jax.checkpoint`.
    """
    if seeds is None:
        with _checkpointing(_call_once):
            yield
        return
    if not isinstance(seeds, TraceSeeds):
        yield
        return
    with ExitStack() as stack:
        known = driver().device_module()  # `checkpoint` looks up a module named like the device
        if blocks:
            stack.enter_context(known)
        for block, policy in blocks.items():
            forward = _with_attention_in_regions if policy == "attention" else _in_regions
            stack.enter_context(replacing_attributes(block, forward=forward(block, seeds, policy)))
        prepared = bool(blocks)

        def checkpointed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            nonlocal prepared
            if not prepared:  # only when needed, because PyTorch looks up this name in other places too
                stack.enter_context(known)
                prepared = True
            return _run_user_region(seeds, function, *args, **kwargs)

        stack.enter_context(_checkpointing(checkpointed))
        yield


def _checkpointing(call: Callable[..., Any]) -> AbstractContextManager[None]:
    """A context in which `torch.utils.checkpoint.checkpoint` is this function."""
    return replacing_attributes(_checkpoint, **{_CALLED_ATTRIBUTE: call})


def _call_once(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool | None = None,
    context_fn: Any = None,
    determinism_check: Any = None,
    debug: Any = None,
    early_stop: Any = None,
    preserve_rng_state: Any = None,
    **kwargs: Any,
) -> Any:
    """Call a function passed to `checkpoint` directly."""
    return function(*args, **kwargs)


def _run_user_region(
    seeds: TraceSeeds,
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool | None = None,
    context_fn: Any = checkpoints.noop_context_fn,
    determinism_check: Any = None,
    debug: bool = False,
    early_stop: bool = True,
    preserve_rng_state: bool = True,
    **kwargs: Any,
) -> Any:
    """Call a function passed to `checkpoint` as a region, which always draws the same random numbers again."""
    reentrant = use_reentrant in (True, None)  # PyTorch's default, with a warning
    if reentrant and kwargs:
        raise ValueError("Unexpected keyword arguments: " + ",".join(kwargs))
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if reentrant and not any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
        warn("None of the inputs have requires_grad=True. Gradients will be None")
        with torch.no_grad():
            return function(*args)
    leaves, spec = tree_flatten((args, kwargs))

    def compute(leaves: Sequence[Any], weights: dict[str, Tensor] | None = None) -> Any:
        args, kwargs = tree_unflatten(leaves, spec)
        return function(*args, **kwargs)

    return _Region(compute, {}, seeds, context_fn=context_fn).call(leaves)


def _in_regions(block: nn.Module, seeds: TraceSeeds, policy: str) -> Callable[..., Any]:
    """Return a `forward` for a block that makes each call a region."""
    itself = _WithOriginalForward(block)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return itself(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        weights: dict[str, Tensor] = dict(itself.named_parameters())
        # Copies, because the repetition must begin with the buffers from before the call.
        weights |= {name: buffer.clone() for name, buffer in itself.named_buffers()}

        def compute(leaves: Sequence[Any], weights: dict[str, Tensor] | None = None) -> Any:
            args, kwargs = tree_unflatten(leaves, spec)
            if weights is None:
                return itself(*args, **kwargs)
            return torch.func.functional_call(itself, weights, args, kwargs)

        return _Region(compute, weights, seeds, keeps=policy == "dots").call(leaves)

    return forward


def _with_attention_in_regions(block: nn.Module, seeds: TraceSeeds, policy: str) -> Callable[..., Any]:
    """Return a `forward` for a block that makes each attention a region that keeps its result."""
    own = block.forward

    def in_region(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def attend_in_region(*args: Any) -> Tensor:
            if not torch.is_grad_enabled():
                return attend(*args)
            y: Tensor = _Region(lambda leaves, weights=None: attend(*leaves), {}, seeds, keeps=True).call(args)
            return y

        return attend_in_region

    def forward(*args: Any, **kwargs: Any) -> Any:
        with tracing_with(attention_region=in_region):
            return own(*args, **kwargs)

    return forward


class _WithOriginalForward(nn.Module):
    """A block with its original `forward`, for `functional_call`."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self._forward = block.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)


class _Region:
    """One computation, and its repetitions in the backward pass.

    Args:
        compute: Computes the region from tensors and other arguments, and from given weights instead of its own.
        weights: The weights, by name.
        seeds: The random numbers of the trace.
        keeps: True if repetitions reuse the products and the outputs of attention (default False).
        context_fn: The argument of `checkpoint` by which a user chooses what to keep.
    """

    def __init__(
        self,
        compute: Callable[..., Any],
        weights: dict[str, Tensor],
        seeds: TraceSeeds,
        keeps: bool = False,
        context_fn: Any = checkpoints.noop_context_fn,
    ) -> None:
        self._compute = compute
        self._weights = weights
        self._seeds = seeds
        self._context_fn = context_fn
        self._residuals = Residuals() if keeps else None
        self._seed_position = seeds.position()
        self._called = self._drew = False
        self._unsharding = trace_context().unsharding
        self.gradients: list[Tensor] = []  # of its outputs, once the backward pass has reached them

    def call(self, leaves: Sequence[Any]) -> Any:
        """Compute it for the first time."""
        # The region handles random numbers itself, because PyTorch doesn't know this device's generator.
        options = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": self._context_fn}
        outputs = _checkpoint(self._run, *leaves, **options)
        return tree_map_only(Tensor, self._mark_end, outputs)

    def _run(self, *leaves: Any) -> Any:
        with _checkpointing(_call_once):  # a region inside this one would gain little
            return self.compute_again(leaves) if self._called else self._first(leaves)

    def _first(self, leaves: Sequence[Any]) -> Any:
        self._called = True
        whole = self._unsharding
        residuals = self._residuals
        in_block = nullcontext() if whole is None else whole.in_block()
        with in_block, nullcontext() if residuals is None else residuals.keep():
            outputs = self._compute(leaves)
        self._drew = self._seeds.has_drawn_since(self._seed_position)
        return outputs

    def _mark_end(self, output: Tensor) -> Tensor:
        """Return an output of the call whose gradient is noted in the backward pass."""
        if not output.requires_grad:
            return output
        marked: Tensor = _RegionEnd.apply(output, self)  # type: ignore[no-untyped-call]
        return marked

    def compute_again(self, leaves: Sequence[Any]) -> Any:
        # Behind a barrier, because the compiler would otherwise reuse and keep the first results. The gradients are
        # behind it too, because the region could otherwise be computed long before it is needed.
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)] + list(self._weights.values())
        kept = [] if self._residuals is None else self._residuals.tensors
        seed = [self._seed_position.base] if self._drew else []
        copies = put_behind_barrier([*tensors, *kept, *self.gradients, *seed])
        inputs = iter([copy.requires_grad_(t.requires_grad) for copy, t in zip(copies, tensors, strict=False)])
        leaves = tuple(next(inputs) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        weights = {name: next(inputs) for name in self._weights}
        with ExitStack() as stack:
            if self._unsharding is not None:
                behind = copies[0] if copies and not weights else None
                stack.enter_context(self._unsharding.computing_again(self._weights, weights, behind))
            if self._residuals is not None:
                stack.enter_context(self._residuals.reuse(copies[len(tensors) : len(tensors) + len(kept)]))
            masks = trace_context().masks
            if masks is not None:
                stack.enter_context(masks.watch_again(zip(copies, tensors, strict=False)))
            if self._drew:
                stack.enter_context(self._seeds.repeating(self._seed_position, copies[-1]))
            return self._compute(leaves, weights)


class _RegionEnd(torch.autograd.Function):
    """The end of a region, which the backward pass reaches before it needs the region's activations."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, region: _Region) -> Tensor:
        ctx.region = region
        return output.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.region.gradients.append(gradient)
        return gradient, None
