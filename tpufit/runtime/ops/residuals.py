"""`residual`: results that a region keeps for its repetition in the backward pass, which computes the rest again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

Results = Sequence[Tensor]


class Residuals:
    """The results that a region keeps, in the order in which it computes them."""

    def __init__(self) -> None:
        self.kept: list[Results] = []  # of each computation; none of one that was forgotten
        self._given: Iterator[Results] | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """All that is kept."""
        return [tensor for results in self.kept for tensor in results]

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """A context in which the region is computed for the first time."""
        with _set(self):
            yield

    @contextmanager
    def giving(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """A context in which the region is repeated, with these tensors instead of `tensors`."""
        left = iter(tensors)
        self._given = iter([[next(left) for _ in results] for results in self.kept])
        with _set(self):
            yield

    def take(self, compute: Callable[[], Results]) -> tuple[Results, Callable[[], None]]:
        """See `residual`."""
        if self._given is not None:
            return next(self._given) or compute(), _nothing
        results = compute()
        place = len(self.kept)
        # Copies, which cost nothing: what is written into a result isn't what the repetition begins with.
        self.kept.append([result.clone() for result in results])

        def forget() -> None:
            self.kept[place] = []

        return results, forget


_current: Residuals | None = None


def keeps() -> bool:
    """True inside of a region that keeps results."""
    return _current is not None


def residual(compute: Callable[[], Results]) -> tuple[Results, Callable[[], None]]:
    """Compute tensors, without random numbers, or take those that the region has kept.

    With them comes a function to call if they aren't used after all, so that they aren't kept either.

    Example:
        >>> import torch
        >>> region, x = Residuals(), torch.ones(2)
        >>> with region.keeping():
        ...     _ = residual(lambda: [x + 1])
        >>> with region.giving(region.tensors):
        ...     residual(lambda: [x * 0])[0]
        [tensor([2., 2.])]
    """
    return (compute(), _nothing) if _current is None else _current.take(compute)


@contextmanager
def _set(region: Residuals) -> Iterator[None]:
    global _current
    before = _current
    _current = region
    try:
        yield
    finally:
        _current = before


def _nothing() -> None:
    """Forget what isn't kept."""
