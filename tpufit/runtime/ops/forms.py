"""`choosing`: which attention of a step is computed by the flash kernel, and why another isn't."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from types import FrameType

import torch
from torch import Tensor, nn

from ...backend.attention import AttentionForms
from ...utils import releases
from ...utils.users_code import warn
from ..kinds import has_flash, kind_of
from ..placement import CorePlacement
from .flash import is_interpreted
from .masks import Pattern, pattern_of, seeing_masks

# From so many queries and keys on it is worth it: with a kernel at half of its peak, which is twice the estimated time,
# 1,024 take 0.75 to 0.88 of the cycles of plain attention, and 512 take 1.2 to 1.5 (libtpu 0.0.21, v5e and v6e).
_WORTH = 1024
_OTHER_MASK = (
    "the kernel takes masks of places (causal, a window), of padding, and of texts joined in a row, the same for all "
    "heads, which the step makes of booleans or of -inf"
)


@dataclass(frozen=True)
class _Choosing:
    forms: AttentionForms
    placement: CorePlacement


_now: _Choosing | None = None


@contextmanager
def choosing(forms: AttentionForms, placement: CorePlacement) -> Iterator[None]:
    """A context of a trace in which attention takes the forms asked for; what each layer gets is noted there."""
    global _now
    before = _now
    _now = _Choosing(forms, placement)
    # To see masks costs time, which is for those alone who may get the kernel.
    sees = forms.asked != "plain" and _has_kernel(kind_of(placement.device))
    try:
        with seeing_masks() if sees else nullcontext():
            yield
    finally:
        _now = before


def _has_kernel(kind: str) -> bool:
    return is_interpreted() or has_flash(kind)


def cores() -> int:
    """The number of cores that share the rows of the step that is traced."""
    return 1 if _now is None else _now.placement.count


def flash_form(
    query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, dropout: float
) -> tuple[CorePlacement, Pattern] | None:
    """The cores on which the kernel is to compute an attention, and what it looks at; None if it is to be plain."""
    now = _now
    if now is None or now.forms.asked == "plain":
        return None
    obstacle = _obstacle(query, dropout)
    pattern = Pattern(right=0 if is_causal else None)
    if not obstacle and now.forms.asked == "auto":
        obstacle = _not_worth(query, key)
    if not obstacle and mask is not None:
        found = pattern_of(mask, query, key)
        obstacle, pattern = ("", found) if found is not None else (_OTHER_MASK, pattern)
    layer = _calling_layer()
    if layer is not None:
        now.forms.of_layers[layer] = f"plain: {obstacle}" if obstacle else "flash"
    if obstacle and now.forms.asked == "flash" and obstacle not in now.forms.told:
        now.forms.told.add(obstacle)
        name = "the step" if layer is None else type(layer).__name__
        warn(f"attention='flash', but {name} has plain attention: {obstacle}")
    return None if obstacle else (now.placement, pattern)


def _obstacle(query: Tensor, dropout: float) -> str:
    """Why the kernel can't compute an attention, whatever its mask; nothing if it can."""
    kind = kind_of(query.device)
    if find_spec("jax") is None:
        return f"its kernel is JAX's, which is not installed: {releases.command(releases.compiler(), 'jax', 'jaxlib')}"
    if not _has_kernel(kind):
        return f"there is no kernel for a {kind}"
    if dropout:
        return "the kernel drops no weights; set the dropout of attention to 0"
    if query.dim() != 4:
        return f"the kernel takes (rows, heads, time, width), got {query.dim()} dimensions"
    if not is_interpreted() and query.dtype is not torch.bfloat16:
        return f"the kernel isn't exact in {str(query.dtype).removeprefix('torch.')}; compile with precision='bf16'"
    return ""


def _not_worth(query: Tensor, key: Tensor) -> str:
    """Why an attention had better be plain, though the kernel could compute it; nothing if it had not."""
    length = min(query.shape[-2], key.shape[-2])
    found = releases.compiler()
    if length < _WORTH:
        return f"{length} places are few"
    if not is_interpreted() and not releases.tried(found):  # a kernel that it can't read would end the training
        return releases.untried(found)
    return ""


def _calling_layer() -> nn.Module | None:
    """The innermost module whose `forward` is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "forward" and frame.f_code.co_varnames:
            owner = frame.f_locals.get(frame.f_code.co_varnames[0])  # the first argument, whatever its name
            if isinstance(owner, nn.Module):
                return owner
        frame = frame.f_back
    return None
