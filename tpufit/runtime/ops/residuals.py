"""`compute_residual`: results that a region keeps for its backward pass, which recomputes the other results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from ..trace_context import Results, trace_context, tracing_with


class Residuals:
    """The results that a region keeps, in the order in which it computes them."""

    def __init__(self) -> None:
        self.kept: list[Results] = []  # the results of each computation; an empty list if they were dropped
        self._reused: Iterator[Results] | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that are kept."""
        return [tensor for results in self.kept for tensor in results]

    @contextmanager
    def keep(self) -> Iterator[None]:
        """A context in which the region is computed for the first time."""
        with tracing_with(residual=self.take):
            yield

    @contextmanager
    def reuse(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """A context in which the region is recomputed, and these tensors are used in place of `tensors`."""
        remaining = iter(tensors)
        self._reused = iter([[next(remaining) for _ in results] for results in self.kept])
        with tracing_with(residual=self.take):
            yield

    def take(self, compute: Callable[[], Results]) -> tuple[Results, Callable[[], None]]:
        """See `compute_residual`."""
        if self._reused is not None:
            return next(self._reused) or compute(), _drop_nothing
        results = compute()
        index = len(self.kept)
        # Copies, which cost nothing in a graph, so that later writes into a result don't reach the recomputation.
        self.kept.append([result.clone() for result in results])

        def forget() -> None:
            self.kept[index] = []

        return results, forget


def keeps_residuals() -> bool:
    """True inside of a region that keeps results."""
    return trace_context().residual is not None


def compute_residual(compute: Callable[[], Results]) -> tuple[Results, Callable[[], None]]:
    """Compute tensors, without random numbers, or return the tensors that the region has kept.

    The second result is a function that drops the kept tensors; call it if they aren't used.

    Example:
        >>> import torch
        >>> region, x = Residuals(), torch.ones(2)
        >>> with region.keep():
        ...     _ = compute_residual(lambda: [x + 1])
        >>> with region.reuse(region.tensors):
        ...     compute_residual(lambda: [x * 0])[0]
        [tensor([2., 2.])]
    """
    take = trace_context().residual
    return (compute(), _drop_nothing) if take is None else take(compute)


def _drop_nothing() -> None:
    """Drop nothing, because nothing is kept."""
