"""Measures the cost of 64-bit numbers: unchanged models of transformers, and models with 32-bit ranges and words.

python tests/benchmarks/narrow.py ["GPT-2 of transformers" ...]
"""

from __future__ import annotations

import sys
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers_networks import PAIRS

import tpufit

_arange = torch.arange


def _narrow_arange(*limits: Any, **options: Any) -> Tensor:
    if options.get("dtype") in (None, torch.long) and all(isinstance(limit, int) for limit in limits):
        options["dtype"] = torch.int32
    return _arange(*limits, **options)


class Narrow(nn.Module):
    """Return a model whose ranges and input words have 32 bits; labels are unchanged."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, labels: Tensor, **words: Tensor) -> Any:
        with patch.object(torch, "arange", _narrow_arange):
            return self.net(labels=labels, **{name: given.int() for name, given in words.items()})


def main() -> None:
    for name in sys.argv[1:] or ["GPT-2 of transformers", "Llama of transformers"]:
        training = PAIRS[name]
        for narrow in (False, True):
            net = Narrow(training.make()) if narrow else training.make()
            model = tpufit.Model(net)
            model.compile(torch.optim.AdamW(net.parameters()), training.loss, precision=training.precision)
            x, y = training.batch(8)
            step = model.preflight(x, y, batch_size=training.rows, tpu="v5e-8", verbose=0).step
            said = step.warnings.get("64-bit", "none").partition(",")[0]
            how = "32 bits" if narrow else "as it comes"
            print(f"{name}, {how}: {step.cost.cycles:,} cycles, {step.cost.nbytes / 1e6:,.0f} MB, {said}")


if __name__ == "__main__":
    main()
