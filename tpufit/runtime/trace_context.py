"""`TraceContext`: what the operations of a step need to know about the current trace.

PyTorch's dispatcher, autograd and modes call these operations and can't pass further arguments. So `trace_context`
returns the context, and only `tracing_with` changes it. A process traces one step at a time, in any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..backend import AttentionForms
from .ops.masks import Masks
from .placement import CorePlacement
from .trace_seeds import Draw
from .unsharding import Unsharding

Attend = Callable[..., Tensor]
Results = Sequence[Tensor]


@dataclass(frozen=True)
class TraceContext:
    """What the operations of a step need to know about the current trace. The defaults hold outside of traces.

    Attributes:
        tracing: True while the Python of a step runs.
        began: The time, by `time.perf_counter`, when the current capture began.
        finite: True in `assuming_finite`.
        uses_kernels: True if `ops.kernels` computes norms, products, attention and others.
        kind: The kind of core that the step is traced for, if it differs from the actual cores.
        placement: The cores that share the rows of the step.
        attention: The forms of attention that the user has requested, where each layer's actual form is noted.
        masks: Observes how masks of attention are made.
        interprets_flash: True if a CPU interprets the kernel of flash attention.
        draw: Returns the random numbers of the next dropout. Without it, dropout is PyTorch's.
        attention_region: Turns a function that computes attention into a region, whose activations are rematerialized.
        residual: Computes tensors that the current region keeps, or returns its kept tensors; see `residuals`.
        unsharding: The mode that gathers split weights. Recomputations enter it again, because autograd disables modes.
    """

    tracing: bool = False
    began: float | None = None
    finite: bool = False
    uses_kernels: bool = False
    kind: str | None = None
    placement: CorePlacement | None = None
    attention: AttentionForms | None = None
    masks: Masks | None = None
    interprets_flash: bool = False
    draw: Callable[[], Draw] | None = None
    attention_region: Callable[[Attend], Attend] | None = None
    residual: Callable[[Callable[[], Results]], tuple[Results, Callable[[], None]]] | None = None
    unsharding: Unsharding | None = None


_current = TraceContext()


def trace_context() -> TraceContext:
    """Return the context of the current trace, or the defaults."""
    return _current


def tracing() -> bool:
    """True while a step is being traced, when reading a value from the device would break its graph."""
    return _current.tracing


def tracing_since() -> float | None:
    """Return the time, by `time.perf_counter`, when the current capture began; None outside of captures."""
    return _current.began


def without_unsharding() -> AbstractContextManager[None]:
    """A context in which split weights aren't gathered: each core computes with its part of them."""
    return nullcontext() if _current.unsharding is None else _current.unsharding.pausing()


def assuming_finite() -> AbstractContextManager[None]:
    """A context in which extremes and sums of exponentials get only finite numbers, and needn't handle others."""
    return tracing_with(finite=True)


@contextmanager
def tracing_with(**changes: Any) -> Iterator[None]:
    """A context in which `trace_context` returns some changed attributes.

    Example:
        >>> with tracing_with(kind="TPU v3"):
        ...     trace_context().kind
        'TPU v3'
    """
    global _current
    before = _current
    _current = replace(before, **changes)
    try:
        yield
    finally:
        _current = before
