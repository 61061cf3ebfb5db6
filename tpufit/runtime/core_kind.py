"""`find_kind`: the kind of core that a step is traced for, which determines the best form of some operations."""

import torch

from .driver import driver
from .trace_context import trace_context

# The kinds on which programs were measured to be faster and smaller with these tensors in bfloat16; on a v3 they are
# slower and larger.
_IN_BFLOAT16 = ("TPU v5 lite", "TPU v6 lite")
_WITHOUT_FLASH = ("TPU v2", "TPU v3")


def find_kind(device: torch.device) -> str:
    """Return the runtime's name of a device's kind, e.g. `"TPU v5 lite"` or `"cpu"`."""
    kind = trace_context().kind
    if kind is not None:
        return kind
    return driver().find_kind() if device.type == driver().device_type else device.type


def keeps_bfloat16(kind: str) -> bool:
    """True if attention should keep the tensors for its backward pass in bfloat16.

    Example:
        >>> keeps_bfloat16("TPU v6 lite"), keeps_bfloat16("TPU v3")
        (True, False)
    """
    return kind in _IN_BFLOAT16


def has_flash(kind: str) -> bool:
    """True if there is a kernel for flash attention, which the compilers for v2 and v3 refuse.

    Example:
        >>> has_flash("TPU v6 lite"), has_flash("TPU v3"), has_flash("cpu")
        (True, False, False)
    """
    return kind.startswith("TPU") and not kind.startswith(_WITHOUT_FLASH)


def repeats_bits(device: torch.device) -> bool:
    """True if a value has the same bits in whichever loop XLA computes it.

    A CPU's loops differ: one rounds a product before it adds to it, another only rounds the sum.

    Example:
        >>> repeats_bits(torch.device("cpu"))
        False
    """
    return find_kind(device).startswith("TPU")
