"""`recomputing`: blocks of a module keep their inputs alone, and compute the rest again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.checkpoint import checkpoint

from ..utils.replaced import replaced
from . import unsharding
from .lazy import behind_barrier
from .ops.masks import seeing_again
from .trace_seeds import TraceSeeds


@contextmanager
def recomputing(blocks: Iterable[nn.Module], seeds: object) -> Iterator[None]:
    """A context of a trace in which each call of a block is computed again when its gradients are needed.

    Results and gradients are those of the block as it is: the second time it draws the same random numbers, sees its
    buffers as they were before the first, and leaves them alone. Its Python runs twice.

    Args:
        blocks: Modules, none of them inside of another.
        seeds: The random numbers of the trace, `seed` of its body; on the host it is a function: nothing to do.

    Source: `torch.utils.checkpoint`.
    """
    if not isinstance(seeds, TraceSeeds):
        yield
        return
    import torch_xla

    with ExitStack() as stack:
        stack.enter_context(replaced(torch, xla=torch_xla))  # `checkpoint` looks for a module by the device's name
        for block in blocks:
            stack.enter_context(replaced(block, forward=_in_regions(block, seeds)))
        yield


def _in_regions(block: nn.Module, seeds: TraceSeeds) -> Callable[..., Any]:
    """Return another `forward` for a block, each call of which is a region."""
    itself = _AsItIs(block)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return itself(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        region = _Region(itself, spec, seeds)
        # The random numbers are the region's own matter: PyTorch knows no generator of this device.
        outputs = checkpoint(region, *leaves, use_reentrant=False, preserve_rng_state=False)
        return tree_map_only(Tensor, region.leave, outputs)

    return forward


class _AsItIs(nn.Module):
    """A block with its own `forward`, for `functional_call`."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self._forward = block, block.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)


class _Region:
    """One call of a block, and its repetitions in the backward pass.

    Args:
        block: The block.
        spec: The nest of its arguments.
        seeds: The random numbers of the trace.

    Attributes:
        gradients: Those of its outputs, once the backward pass has come to them.
    """

    def __init__(self, block: nn.Module, spec: Any, seeds: TraceSeeds) -> None:
        self._block, self._spec, self._seeds = block, spec, seeds
        self._weights: dict[str, Tensor] = dict(block.named_parameters())
        # Copies: what the call writes into a buffer isn't what its repetition begins with.
        self._weights |= {name: buffer.clone() for name, buffer in block.named_buffers()}
        self._begun = self._ended = seeds.position()
        self._called = False
        self._unsharding = unsharding.current()
        self.gradients: list[Tensor] = []

    def __call__(self, *leaves: Any) -> Any:
        if self._called:
            return self._again(leaves)
        self._called = True
        args, kwargs = tree_unflatten(leaves, self._spec)
        with nullcontext() if self._unsharding is None else self._unsharding.in_block():
            outputs = self._block(*args, **kwargs)
        self._ended = self._seeds.position()
        return outputs

    def leave(self, output: Tensor) -> Tensor:
        """Return an output of the call, whose gradient is noted on its way back."""
        if not output.requires_grad:
            return output
        left: Tensor = _Leave.apply(output, self)  # type: ignore[no-untyped-call]
        return left

    def _again(self, leaves: tuple[Any, ...]) -> Any:
        # Behind a barrier, or the compiler would find that it has all of this already, and keep it. The gradients are
        # behind it too, or this could be computed long before it is needed.
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)] + list(self._weights.values())
        names = list(self._weights)
        apart = behind_barrier([*tensors, *self.gradients])
        inputs = iter([copy.requires_grad_(t.requires_grad) for copy, t in zip(apart, tensors, strict=False)])
        leaves = tuple(next(inputs) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        weights = {name: next(inputs) for name in names}
        args, kwargs = tree_unflatten(leaves, self._spec)
        whole = self._unsharding
        with (
            nullcontext() if whole is None else whole.computing_again(self._weights, weights),
            seeing_again(zip(apart, tensors, strict=False)),
        ):
            if self._ended == self._begun:
                return torch.func.functional_call(self._block, weights, args, kwargs)
            now = self._seeds.position()
            self._seeds.return_to(self._begun)
            try:
                return torch.func.functional_call(self._block, weights, args, kwargs)
            finally:
                self._seeds.return_to(now)


class _Leave(torch.autograd.Function):
    """The end of a region. The backward pass comes here before it needs anything of the region."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, region: _Region) -> Tensor:
        ctx.region = region
        return output.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.region.gradients.append(gradient)
        return gradient, None
