"""`choose_attention`: decides which attention of a step the flash kernel computes, and says why not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from types import FrameType

import torch
from torch import Tensor, nn

from ...backend.attention import AttentionForms
from ...utils import releases
from ...utils.user_code import warn
from ..core_kind import find_kind, has_flash
from ..placement import CorePlacement
from ..trace_context import trace_context, tracing_with
from .masks import Masks, Pattern

# The kernel is faster from this number of queries and keys on. If it runs at half of its peak, at twice the estimated
# time, 1,024 take 0.75 to 0.88 of plain attention's cycles, and 512 take 1.2 to 1.5 (libtpu 0.0.21, v5e and v6e).
_MIN_LENGTH = 1024
_OTHER_MASK = (
    "the kernel takes masks of positions (causal, a window), of padding, and of texts packed in a row, if they are "
    "equal for all heads and the step computes them from booleans or -inf"
)


@contextmanager
def choose_attention(forms: AttentionForms, placement: CorePlacement) -> Iterator[None]:
    """A context of a trace in which attention takes the requested forms, and `forms` records each layer's form."""
    # Watching masks costs time, so it is done only where the kernel is possible.
    watches = forms.requested != "plain" and _has_kernel(find_kind(placement.device))
    masks = Masks() if watches else None
    with tracing_with(attention=forms, placement=placement, masks=masks), masks.watch() if masks else nullcontext():
        yield


def _has_kernel(kind: str) -> bool:
    return trace_context().interprets_flash or has_flash(kind)


def count_cores() -> int:
    """Return the number of cores that share the rows of the current step."""
    placement = trace_context().placement
    return 1 if placement is None else placement.count


def choose_flash(
    query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, dropout: float
) -> tuple[CorePlacement, Pattern] | None:
    """Return the placement and the mask's pattern for the flash kernel; None if attention stays plain."""
    context = trace_context()
    forms, placement = context.attention, context.placement
    if forms is None or placement is None or forms.requested == "plain":
        return None
    obstacle = _find_obstacle(query, dropout)
    pattern = Pattern(right=0 if is_causal else None)
    if not obstacle and forms.requested == "auto":
        obstacle = _find_disadvantage(query, key)
    if not obstacle and mask is not None:
        masks = context.masks
        derived = None if masks is None else masks.pattern(mask, len(query), query.shape[-2], key.shape[-2])
        obstacle, pattern = ("", derived) if derived is not None else (_OTHER_MASK, pattern)
    layer = _find_calling_layer()
    if layer is not None:
        forms.of_layers[layer] = f"plain: {obstacle}" if obstacle else "flash"
    if obstacle and forms.requested == "flash" and obstacle not in forms.warned:
        forms.warned.add(obstacle)
        name = "the step" if layer is None else type(layer).__name__
        warn(f"attention='flash', but {name} uses plain attention: {obstacle}")
    return None if obstacle else (placement, pattern)


def _find_obstacle(query: Tensor, dropout: float) -> str:
    """Say why the kernel can't compute an attention with any mask; "" if it can."""
    kind = find_kind(query.device)
    if find_spec("jax") is None:
        cure = releases.make_install_command(releases.find_compiler_versions(), "jax", "jaxlib")
        return f"the kernel needs JAX, which isn't installed: {cure}"
    if not _has_kernel(kind):
        return f"there is no kernel for a {kind}"
    if dropout:
        return "the kernel has no dropout; set the dropout of attention to 0"
    if query.dim() != 4:
        return f"the kernel takes (rows, heads, time, width), got {query.dim()} dimensions"
    if not trace_context().interprets_flash and query.dtype is not torch.bfloat16:
        return f"the kernel isn't exact in {str(query.dtype).removeprefix('torch.')}; compile with precision='bf16'"
    return ""


def _find_disadvantage(query: Tensor, key: Tensor) -> str:
    """Say why plain attention is better, though the kernel could compute this one; "" if the kernel is better."""
    length = min(query.shape[-2], key.shape[-2])
    compiler = releases.find_compiler_versions()
    if length < _MIN_LENGTH:
        return f"{length} positions are fewer than {_MIN_LENGTH}"
    # A kernel that the compiler can't read would end the training.
    if not trace_context().interprets_flash and not releases.is_tested(compiler):
        return releases.explain_untested(compiler)
    return ""


def _find_calling_layer() -> nn.Module | None:
    """Return the innermost module whose `forward` is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "forward" and frame.f_code.co_varnames:
            owner = frame.f_locals.get(frame.f_code.co_varnames[0])  # the first argument, whatever its name
            if isinstance(owner, nn.Module):
                return owner
        frame = frame.f_back
    return None
