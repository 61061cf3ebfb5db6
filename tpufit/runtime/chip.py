"""Which kind of TPU this is, asked of nobody: neither the runtime nor the network."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_GOOGLE = "0x1ae0"
_BY_DEVICE = {"0x005e": "v4", "0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e"}  # v2 and v3 have one number


def chip() -> str:
    """The kind of TPU, e.g. `"v3"`, or nothing if there is none or it can't be told."""
    devices = Path("/sys/bus/pci/devices").glob("*/vendor")
    found = (path.with_name("device").read_text().strip() for path in devices if path.read_text().strip() == _GOOGLE)
    return chip_of(os.environ.get("TPU_ACCELERATOR_TYPE", ""), found)


def chip_of(accelerator: str, devices: Iterable[str]) -> str:
    """The kind of TPU, by what its host says of it.

    Args:
        accelerator: The accelerator's type in the environment, e.g. `"v3-8"` or `"v5litepod-8"`, or nothing.
        devices: The numbers of Google's PCI devices, e.g. `"0x0063"`.

    Example:
        >>> chip_of("v3-8", ["0x0027"]), chip_of("v5litepod-8", []), chip_of("", ["0x006f"]), chip_of("", ["0x0027"])
        ('v3', 'v5e', 'v6e', '')
    """
    name = accelerator.partition("-")[0]
    if name:
        return {"v5litepod": "v5e"}.get(name, name)
    return next((_BY_DEVICE[device] for device in devices if device in _BY_DEVICE), "")
