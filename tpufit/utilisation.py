"""How much of a TPU a training uses: rows a second, floating-point operations a second, and their share of its peak."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from .errors import ArgumentError

_PEAKS = {"v2": 45e12, "v3": 123e12, "v4": 275e12, "v5e": 197e12, "v5p": 459e12, "v6e": 918e12}
_CORES_A_CHIP = {"v2": 2, "v3": 2}  # as the runtime counts them; the two of a v4 or v5p are one to it


def peak(chip: str) -> float | None:
    """The most bfloat16 operations a second that one core can do, as the vendor gives it, or None if it is not known.

    Args:
        chip: The kind of TPU: `"v2"`, `"v3"`, `"v4"`, `"v5e"`, `"v5p"` or `"v6e"`.

    Example:
        >>> peak("v3")
        61500000000000.0

    Source: "Peak compute per chip" on the page of each version, docs.cloud.google.com/tpu/docs/v2 to /v6e, read in
    November 2026, but for v2's page, which could not be found.
    """
    return _PEAKS[chip] / _CORES_A_CHIP.get(chip, 1) if chip in _PEAKS else None


@dataclass(frozen=True)
class Utilisation:
    """What a training achieved.

    Attributes:
        rows: Rows a second, over all cores.
        flops: Floating-point operations a second of the module's forward and backward pass, over all cores.
        share: Which share of the cores' peak in bfloat16 that is, from 0 to 1; None if the peak is not known.
    """

    rows: float
    flops: float
    share: float | None

    @classmethod
    def of(cls, flops: float, rows: float, seconds: float, cores: int, chip: str) -> Utilisation:
        """The rates.

        Args:
            flops: Operations for one row, as `flops_of` counts them.
            rows: How many rows there were.
            seconds: How long they took.
            cores: On how many cores.
            chip: As for `peak`.

        Example:
            >>> Utilisation.of(flops=6e9, rows=10_000, seconds=2.0, cores=8, chip="v3").share
            0.06097560975609756
        """
        most = peak(chip)
        achieved = flops * rows / seconds
        return cls(rows / seconds, achieved, None if most is None else achieved / (most * cores))

    def __str__(self) -> str:
        share = "the device's peak is not known" if self.share is None else f"{self.share:.1%} of the peak in bfloat16"
        return f"{self.rows:,.0f} rows/s, {self.flops / 1e9:,.4g} GFLOP/s ({share})"


def flops_of(module: nn.Module, x: Any) -> float:
    """The floating-point operations of a module's forward and backward pass, counted without computing anything.

    What counts are products of matrices, convolutions and attention, as is usual.

    Args:
        module: The module.
        x: What it is called with: a tensor, a tuple or list of them (positional arguments) or a dict (keywords).
            Only shapes and dtypes matter.

    Raises:
        ArgumentError: The module looks at values, which a pass over shapes alone has not.

    Example:
        >>> flops_of(nn.Linear(10, 20), torch.zeros(5, 10))  # 2 x 5 x 10 x 20, and again for the weight's gradient
        4000.0
    """

    def empty(value: Any) -> Any:
        return torch.empty_like(value, device="meta") if isinstance(value, Tensor) else value

    state = {
        name: empty(tensor).requires_grad_(tensor.requires_grad)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
    }
    x = tree_map(empty, x)
    counter = FlopCounterMode(display=False)
    args, kwargs = ((), x) if isinstance(x, dict) else (tuple(x) if isinstance(x, (tuple, list)) else (x,), {})
    try:
        with counter, torch.enable_grad():
            y = functional_call(module, state, args, kwargs)
            outputs = [leaf.float().sum() for leaf in tree_leaves(y) if isinstance(leaf, Tensor) and leaf.requires_grad]
            if outputs:
                torch.stack(outputs).sum().backward()
    except RuntimeError as error:
        raise ArgumentError(
            f"the operations of {type(module).__name__} can't be counted: its forward pass looks at values, or at a "
            f"tensor that is neither a parameter nor a buffer. PyTorch says: {error}"
        ) from error
    return float(counter.get_total_flops())
