"""`kind_of`: the kind of core that a step is traced for, on which the best words for some operations depend."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..utils import hardware
from .bindings import xla

# Those whose programs were seen to be faster and smaller so; those of a v3 are slower and larger.
_IN_BFLOAT16 = ("TPU v5 lite", "TPU v6 lite")
_WITHOUT_FLASH = ("TPU v2", "TPU v3")
_KINDS = {"v4": "TPU v4", "v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite"}  # by the chip on the PCI bus
_absent: str | None = None


def kind_of(device: torch.device) -> str:
    """The kind of a device in the runtime's words, e.g. `"TPU v5 lite"` or `"cpu"`."""
    if _absent is not None:
        return _absent
    if device.type != "xla":
        return device.type
    import torch_xla.runtime as runtime

    if not runtime.is_spmd():
        return str(xla()._xla_device_kind(str(device)))
    # Of several cores torch_xla doesn't tell: they are one device, which its runtime doesn't know.
    chips = hardware.chips() if runtime.device_type() == "TPU" else []
    return _KINDS.get(chips[0].name, chips[0].name) if chips else "cpu"


def keeps_bfloat16(kind: str) -> bool:
    """True if attention had better keep in bfloat16 what its backward pass needs.

    Example:
        >>> keeps_bfloat16("TPU v6 lite"), keeps_bfloat16("TPU v3")
        (True, False)
    """
    return kind in _IN_BFLOAT16


def has_flash(kind: str) -> bool:
    """True if there is a kernel for flash attention: the compilers of a v2 and a v3 refuse it.

    Example:
        >>> has_flash("TPU v6 lite"), has_flash("TPU v3"), has_flash("cpu")
        (True, False, False)
    """
    return kind.startswith("TPU") and not kind.startswith(_WITHOUT_FLASH)


@contextmanager
def traced_for(kind: str) -> Iterator[None]:
    """A context in which steps are traced for a kind of device, wherever they are traced.

    Example:
        >>> with traced_for("TPU v3"):
        ...     kind_of(torch.device("cpu"))
        'TPU v3'
    """
    global _absent
    before = _absent
    _absent = kind
    try:
        yield
    finally:
        _absent = before
