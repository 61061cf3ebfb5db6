"""Finds the blocks that a module repeats, such as a transformer's layers."""

from collections import Counter

from torch import nn


def find_repeated_blocks(module: nn.Module) -> list[str]:
    """List the modules with children and a sibling of their class in a `ModuleList` or `Sequential`.

    Example:
        >>> find_repeated_blocks(nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 1), 2, enable_nested_tensor=False))
        ['layers.0', 'layers.1']
    """
    names = []
    for name, group in module.named_modules():
        if isinstance(group, (nn.ModuleList, nn.Sequential)):
            kinds = Counter(type(part) for part in group)
            for key, part in group.named_children():
                if kinds[type(part)] > 1 and any(part.children()):
                    names.append(f"{name}.{key}" if name else key)
    return names


def keep_outermost(names: list[str]) -> tuple[str, ...]:
    """Drop names inside other names. Expects the order of `named_modules`, where a module precedes its parts."""
    kept: list[str] = []
    for name in names:
        if not any(name.startswith(f"{outer}.") for outer in kept):
            kept.append(name)
    return tuple(kept)
