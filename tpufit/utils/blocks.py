"""The blocks that a module repeats, such as a transformer's."""

from collections import Counter

from torch import nn


def repeated(module: nn.Module) -> list[str]:
    """Name the modules in a `ModuleList` or `Sequential` of several of their class, if they are made of layers.

    Example:
        >>> repeated(nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 1), 2, enable_nested_tensor=False))
        ['layers.0', 'layers.1']
    """
    found = []
    for name, group in module.named_modules():
        if isinstance(group, (nn.ModuleList, nn.Sequential)):
            kinds = Counter(type(part) for part in group)
            for key, part in group.named_children():
                if kinds[type(part)] > 1 and any(part.children()):
                    found.append(f"{name}.{key}" if name else key)
    return found


def outermost(names: list[str]) -> tuple[str, ...]:
    """Those that are not inside of others, in the order of `named_modules`, where a module comes before its parts."""
    kept: list[str] = []
    for name in names:
        if not any(name.startswith(f"{outer}.") for outer in kept):
            kept.append(name)
    return tuple(kept)
