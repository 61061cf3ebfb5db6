"""The blocks of a module that compute their activations again in the backward pass: `compile(remat=...)`."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TypeAlias

from torch import nn

from ..errors import ArgumentError, few
from ..utils.blocks import outermost, repeated

RematArgument: TypeAlias = "bool | str | list[str] | tuple[str, ...] | None"


def blocks(remat: RematArgument, module: nn.Module) -> tuple[str, ...]:
    """Find the blocks that `compile(remat=...)` names, without those inside of others.

    Args:
        remat: True for the blocks that the module repeats, patterns of their names, or None.
        module: The module.

    Returns:
        Their names, as `named_modules` has them.

    Raises:
        ArgumentError: There are no such blocks.

    Example:
        >>> net = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 1), 2, enable_nested_tensor=False)
        >>> blocks(True, net), blocks("*.linear1", net)
        (('layers.0', 'layers.1'), ('layers.0.linear1', 'layers.1.linear1'))
    """
    if remat is None or remat is False:
        return ()
    if remat is True:
        found = [
            name for name in repeated(module) if any(p.requires_grad for p in module.get_submodule(name).parameters())
        ]
        if not found:
            raise ArgumentError(
                f"remat=True looks for blocks that {type(module).__name__} repeats, as a ModuleList or Sequential of "
                f"several layers of one class, each made of layers, and finds none: name them, as in "
                f"remat={_some_names(module)}"
            )
        return outermost(found)
    patterns = [remat] if isinstance(remat, str) else remat
    if not isinstance(patterns, (list, tuple)) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ArgumentError(f"remat must be None, True or patterns of module names, as in 'blocks.*', got {remat!r}")
    names = [name for name, _ in module.named_modules() if name]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ArgumentError(
                f"remat names {pattern!r}, but {type(module).__name__} has no such module; it has "
                f"{few(names) or 'none'}"
            )
    return outermost([name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)])


def _some_names(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_children()][:1] or ["*"]
