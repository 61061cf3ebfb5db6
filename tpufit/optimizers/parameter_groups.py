"""Parameter groups: exclusion from weight decay, and learning rates by depth."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from torch import nn
from torch.optim import Optimizer

from ..errors import ArgumentError, join_few, require_number, short_repr
from ..utils.repeated_blocks import find_repeated_blocks, keep_outermost

ExcludeArgument: TypeAlias = "bool | str | Sequence[str] | None"


@dataclass(frozen=True)
class GroupConfig:
    """The options of `Model.compile` for parameter groups.

    Raises:
        ArgumentError: A value has the wrong type, or is out of range.
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
        """True if an option is set."""
        return self._excludes or self.layer_decay is not None

    def split(self, optimizer: Optimizer, module: nn.Module) -> None:
        """Split the groups of an optimizer, before its first step, by weight decay and rate.

        The first group then has parameters with the full rate, with weight decay if possible.

        Raises:
            ArgumentError: The optimizer has no weight decay, a pattern matches nothing, or there are no blocks.
        """
        if self._excludes and "weight_decay" not in optimizer.defaults:
            raise ArgumentError(
                f"exclude_from_weight_decay: {type(optimizer).__name__} has no weight decay; leave it out"
            )
        excluded = self._find_excluded(module)
        scales = self._compute_scales(module)
        groups = []
        for group in optimizer.param_groups:
            parts: dict[tuple[float, bool], list[nn.Parameter]] = {}
            for p in group["params"]:
                parts.setdefault((scales.get(id(p), 1.0), id(p) not in excluded), []).append(p)
            for scale, decays in sorted(parts, reverse=True):
                options = {"lr": group["lr"] * scale} | ({} if decays else {"weight_decay": 0.0})
                groups.append(group | options | {"params": parts[scale, decays]})
        optimizer.param_groups[:] = groups

    def _find_excluded(self, module: nn.Module) -> set[int]:
        """Return the `id`s of the parameters without weight decay."""
        named = dict(module.named_parameters())
        if self.exclude is True:
            return {id(p) for p in named.values() if p.dim() < 2}
        for pattern in self._patterns:
            if not any(fnmatchcase(name, pattern) for name in named):
                raise ArgumentError(
                    f"exclude_from_weight_decay names {pattern!r}, but {type(module).__name__} has no such parameter; "
                    f"it has {join_few([*named]) or 'none'}"
                )
        return {id(p) for name, p in named.items() if any(fnmatchcase(name, pattern) for pattern in self._patterns)}

    def _compute_scales(self, module: nn.Module) -> dict[int, float]:
        """Return the factor of each parameter's rate, by `id`: parameters before the blocks have the smallest."""
        if self.layer_decay is None:
            return {}
        blocks = keep_outermost(find_repeated_blocks(module))
        if not blocks:
            raise ArgumentError(
                f"layer_decay looks for blocks that {type(module).__name__} repeats, as a ModuleList or Sequential "
                "of several layers of one class, and finds none: give the optimizer groups with different rates"
            )
        depth = 0
        scales = {}
        for name, parameter in module.named_parameters():
            block_depth = next((i for i, block in enumerate(blocks, 1) if name.startswith(f"{block}.")), None)
            if block_depth is None:  # a parameter between two blocks has the depth of the first
                depth += depth == len(blocks)
            else:
                depth = block_depth
            scales[id(parameter)] = self.layer_decay ** (len(blocks) + 1 - depth)
        return scales
