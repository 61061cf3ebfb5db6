"""Groups of parameters: those without weight decay, and a learning rate by depth."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from torch import nn
from torch.optim import Optimizer

from ..errors import ArgumentError, few, require_number, short_repr
from ..utils.blocks import outermost, repeated

ExcludeArgument: TypeAlias = "bool | str | Sequence[str] | None"


@dataclass(frozen=True)
class GroupConfig:
    """The options of `Model.compile` for groups of parameters.

    Raises:
        ArgumentError: A value is of the wrong kind, or out of range.
    """

    exclude: ExcludeArgument = None  # `exclude_from_weight_decay`
    layer_decay: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.exclude, bool) and not all(isinstance(pattern, str) for pattern in self._patterns):
            raise ArgumentError(
                "exclude_from_weight_decay must be None, True or patterns of parameter names, as in '*.bias', got "
                f"{short_repr(self.exclude)}"
            )
        decay: Any = self.layer_decay
        if decay is not None:
            decay = require_number("layer_decay", decay, "a factor above 0 and up to 1", lambda x: 0 < x <= 1)
            object.__setattr__(self, "layer_decay", decay)

    @property
    def _patterns(self) -> Sequence[Any]:
        if isinstance(self.exclude, (bool, str)) or self.exclude is None:
            return [self.exclude] if isinstance(self.exclude, str) else []
        return self.exclude if isinstance(self.exclude, (list, tuple)) else [self.exclude]

    @property
    def _excludes(self) -> bool:
        return self.exclude is not None and self.exclude is not False

    @property
    def wanted(self) -> bool:
        """True if there is anything to do."""
        return self._excludes or self.layer_decay is not None

    def split(self, optimizer: Optimizer, module: nn.Module) -> None:
        """Split the groups of an optimizer, which has taken no step, by what their parameters are to have in common.

        The first group then holds parameters with the whole rate, and weight decay if any have it.

        Raises:
            ArgumentError: The optimizer has no weight decay, a pattern matches nothing, or there are no blocks.
        """
        if self._excludes and "weight_decay" not in optimizer.defaults:
            raise ArgumentError(
                f"exclude_from_weight_decay: {type(optimizer).__name__} has no weight decay; leave it out"
            )
        excluded = self._excluded(module)
        scales = self._scales(module)
        groups = []
        for group in optimizer.param_groups:
            parts: dict[tuple[float, bool], list[nn.Parameter]] = {}
            for p in group["params"]:
                parts.setdefault((scales.get(id(p), 1.0), id(p) not in excluded), []).append(p)
            for scale, decays in sorted(parts, reverse=True):
                options = {"lr": group["lr"] * scale} | ({} if decays else {"weight_decay": 0.0})
                groups.append(group | options | {"params": parts[scale, decays]})
        optimizer.param_groups[:] = groups

    def _excluded(self, module: nn.Module) -> set[int]:
        """Return the `id`s of the parameters without weight decay."""
        named = dict(module.named_parameters())
        if self.exclude is True:
            return {id(p) for p in named.values() if p.dim() < 2}
        for pattern in self._patterns:
            if not any(fnmatchcase(name, pattern) for name in named):
                raise ArgumentError(
                    f"exclude_from_weight_decay names {pattern!r}, but {type(module).__name__} has no such parameter; "
                    f"it has {few([*named]) or 'none'}"
                )
        return {id(p) for name, p in named.items() if any(fnmatchcase(name, pattern) for pattern in self._patterns)}

    def _scales(self, module: nn.Module) -> dict[int, float]:
        """Return the factor of each parameter's rate, by its `id`: what comes before the blocks has the least."""
        if self.layer_decay is None:
            return {}
        blocks = outermost(repeated(module))
        if not blocks:
            raise ArgumentError(
                f"layer_decay goes by the blocks that {type(module).__name__} repeats, as a ModuleList or Sequential "
                "of several layers of one class, and finds none: give the optimizer groups with rates of their own"
            )
        depth = 0
        found = {}
        for name, parameter in module.named_parameters():
            own = next((i for i, block in enumerate(blocks, 1) if name.startswith(f"{block}.")), None)
            if own is None:  # between two blocks it counts to the first one
                depth += depth == len(blocks)
            else:
                depth = own
            found[id(parameter)] = self.layer_decay ** (len(blocks) + 1 - depth)
        return found
