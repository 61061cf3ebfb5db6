"""`ShardConfig`: which parameters of a module are split over the cores, and how."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from ..backend import Placement, Sharding
from ..errors import ArgumentError, join_few

ShardArgument = str | Mapping[str, int | None] | None

# Parameters smaller than this many bytes stay whole: gathering them takes longer than splitting saves.
_SMALL = 1 << 15


@dataclass(frozen=True)
class ShardConfig:
    """The parameters that are split over the cores (default: none)."""

    all_large: bool = False  # split each large parameter along its best dimension
    # The dimension to split of each parameter that a pattern fits, by the parameter's first name; None: stays whole.
    dims: Mapping[str, int | None] | None = None

    @classmethod
    def of(cls, shard: Any, module: nn.Module) -> ShardConfig:
        """Check the argument of `compile`.

        Raises:
            ArgumentError: It is neither None, nor "fsdp", nor a dict of patterns that fit the module.

        Example:
            >>> ShardConfig.of({"*.weight": 0}, nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))).dims
            {'0.weight': 0, '1.weight': 0}
        """
        if shard is None or (isinstance(shard, str) and shard == "fsdp"):
            return cls(all_large=shard is not None)
        if not isinstance(shard, Mapping):
            raise ArgumentError(
                "shard must be None, 'fsdp' or a dict of dimensions by patterns of parameters' names, such as "
                f"{{'blocks.*.weight': 0}}, got {shard!r}"
            )
        owners: dict[int, str] = {}
        dims: dict[str, int | None] = {}
        first_fits: dict[str, tuple[str, int | None]] = {}  # the first name of each parameter, and its dimension
        matched: set[str] = set()
        for name, parameter in module.named_parameters(remove_duplicate=False):
            fitting = [pattern for pattern in shard if fnmatchcase(name, pattern)]
            matched.update(fitting)
            dim = _check_dimension(fitting[0], shard[fitting[0]], name, parameter) if fitting else None
            owner = owners.setdefault(id(parameter), name)
            first, other = first_fits.setdefault(owner, (name, dim))
            if other != dim:
                raise ArgumentError(
                    f"shard gives one tied parameter two layouts: {first} {_describe(other)}, {name} {_describe(dim)}. "
                    "Give both names the same dimension"
                )
            if dim is not None:
                dims[owner] = dim
        _check_matched(shard, matched, module)
        return cls(dims=dims)

    @property
    def active(self) -> bool:
        """True if any parameter may be split."""
        return self.all_large or bool(self.dims)

    def shardings(self, module: nn.Module, placement: Placement) -> dict[int, Sharding]:
        """Return the shardings of split parameters, by `id`. On one core and on the host none are split."""
        if not placement.has_mesh or placement.count == 1 or not self.active:
            return {}
        named = ((p, self._axis(name, p, placement.count)) for name, p in module.named_parameters())
        return {id(parameter): Sharding(axis) for parameter, axis in named if axis is not None}

    def _axis(self, name: str, parameter: Tensor, cores: int) -> int | None:
        if not self.all_large:
            return (self.dims or {}).get(name)
        if parameter.nbytes < _SMALL:
            return None
        return choose_dimension(parameter.shape, cores)


def choose_dimension(shape: Iterable[int], cores: int) -> int | None:
    """Choose the dimension to split: the largest whose size is divisible by the number of cores, else the
    largest.

    It is None if every dimension is smaller than the number of cores.

    Example:
        >>> choose_dimension((512, 2048), 8), choose_dimension((50257, 768), 8), choose_dimension((50257, 3), 8)
        (1, 1, 0)
    """
    sizes = [(size % cores == 0, size, -i) for i, size in enumerate(shape) if size >= cores]
    return -max(sizes)[2] if sizes else None


def count_bytes_per_core(tensors: Iterable[Tensor], shardings: Mapping[int, Sharding], cores: int) -> int:
    """Count the bytes of some tensors on each core, given the shardings of the split tensors by `id`."""
    total = 0
    for tensor in tensors:
        shape = list(tensor.shape)
        axis = shardings.get(id(tensor), Sharding.WHOLE).axis
        if axis is not None:
            shape[axis] = -(-shape[axis] // cores)
        total += math.prod(shape) * tensor.element_size()
    return total


def _check_dimension(pattern: str, dim: Any, name: str, parameter: Tensor) -> int | None:
    if dim is None:
        return None
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise ArgumentError(f"shard[{pattern!r}] must be a dimension (a whole number) or None, got {dim!r}")
    if not -parameter.dim() <= dim < parameter.dim():
        raise ArgumentError(
            f"shard[{pattern!r}] is dimension {dim}, and {name} of shape {tuple(parameter.shape)} has "
            f"{parameter.dim()}. Give another dimension, or put {name!r}: None first, because the first "
            "matching pattern counts"
        )
    return dim % parameter.dim()


def _describe(dim: int | None) -> str:
    return "is whole" if dim is None else f"is split along dimension {dim}"


def _check_matched(shard: Mapping[str, Any], matched: set[str], module: nn.Module) -> None:
    for pattern in shard:
        if pattern in matched:
            continue
        names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
        buffers = [name for name, _ in module.named_buffers() if fnmatchcase(name, pattern)]
        if buffers:
            raise ArgumentError(
                f"shard[{pattern!r}] matches only buffers ({join_few(buffers)}), which stay whole: leave it out"
            )
        near = difflib.get_close_matches(str(pattern), names, 3, 0.3) or names[:3]
        raise ArgumentError(
            f"shard[{pattern!r}] matches no parameter's name. A * stands for anything, as in 'blocks.*.weight'; "
            f"some names: {', '.join(near) or 'none, as the module has no parameters'}"
        )
