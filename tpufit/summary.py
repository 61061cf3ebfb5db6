"""The table of a module's layers and parameters."""

from __future__ import annotations

import io
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

_WIDTH = 100  # columns


def table(module: nn.Module) -> str:
    """The layers of a module that hold parameters or buffers, and the totals, as text.

    Args:
        module: Any module. A tensor that several layers share is counted at the first.

    Example:
        >>> print(table(nn.Linear(2, 3)).splitlines()[-1])
        9 parameters (36 B), 9 of them trainable
    """
    rows = Table("layer", "type", "parameters", "shapes", "dtype", box=None, header_style="bold")
    seen: set[int] = set()
    for name, layer in module.named_modules():
        own = [p for p in layer.parameters(recurse=False) if id(p) not in seen]
        seen.update(map(id, own))
        leaf = not any(True for _ in layer.children())
        if own or leaf:
            shapes = ", ".join("x".join(map(str, p.shape)) or "1" for p in own)
            dtypes = ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in own}))
            rows.add_row(name or "(module)", type(layer).__name__, f"{_count(own):,}", shapes, dtypes)
    text = io.StringIO()
    Console(file=text, width=_WIDTH).print(rows)
    parameters = list(module.parameters())
    trainable = [p for p in parameters if p.requires_grad]
    totals = f"{_count(parameters):,} parameters ({_bytes(parameters)}), {_count(trainable):,} of them trainable"
    return text.getvalue() + totals


def _count(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() for t in tensors)


def _bytes(tensors: Iterable[Tensor]) -> str:
    size = float(sum(t.numel() * t.element_size() for t in tensors))
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
