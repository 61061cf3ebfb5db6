"""Inner optimizers, which other optimizers such as SAM and Lookahead contain, and which optimizers' rates count."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch.optim import Optimizer


def find_optimizers(attributes: Mapping[str, Any], depth: int = 3) -> Iterator[tuple[str, Optimizer]]:
    """Yield the optimizers among attributes, in their lists, tuples and dicts, and in these optimizers, by name."""
    for name, value in attributes.items():
        items: Iterable[tuple[Any, Any]]
        if not isinstance(value, (Optimizer, list, tuple, dict)):
            continue
        if isinstance(value, Optimizer):
            items = [("", value)]
        elif isinstance(value, (list, tuple)):
            items = enumerate(value)
        else:
            items = value.items()
        for key, item in items:
            if isinstance(item, Optimizer):
                full = f"{name}.{key}" if item is not value else name
                yield full, item
                if depth:
                    yield from ((f"{full}.{name}", inner) for name, inner in find_optimizers(vars(item), depth - 1))


def find_rated(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers whose rates count: inner optimizers, and the outer one if it alone has some parameters.

    An inner optimizer that shares the outer optimizer's groups isn't listed, because it shares the rates too.

    Example:
        >>> import torch
        >>> class Sam(torch.optim.Optimizer):
        ...     def __init__(self, parameters, lr):
        ...         super().__init__(parameters, {"rho": 0.05})
        ...         self.base_optimizer = torch.optim.SGD(self.param_groups[0]["params"], lr)
        >>> [type(rated).__name__ for rated in find_rated(Sam([torch.zeros(1)], 0.1))]
        ['SGD']
    """
    kept = [inner for _, inner in find_optimizers(vars(optimizer), depth=0) if inner is not optimizer]
    if not kept:  # a shortcut for most optimizers: schedules call this at each step
        return [optimizer]
    outer = _parameter_ids(optimizer)
    groups = set(map(id, optimizer.param_groups))
    inside = [
        inner
        for inner in kept
        if outer.issuperset(_parameter_ids(inner)) and groups.isdisjoint(map(id, inner.param_groups))
    ]
    if not inside:
        return [optimizer]
    only_outer = outer.difference(*map(_parameter_ids, inside))
    rated = [*([optimizer] if only_outer else []), *(found for inner in inside for found in find_rated(inner))]
    return list(dict.fromkeys(rated))


def find_rated_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the groups of the optimizers whose rates count, see `find_rated`."""
    return [group for rated in find_rated(optimizer) for group in rated.param_groups]


def _parameter_ids(optimizer: Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}
