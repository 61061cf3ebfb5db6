"""The train step of a network as TorchTPU compiles it by itself: its `SingleTraceTrainer` with its own AdamW.

The step has no metric, because this trainer returns only a loss. It is written in the form of a preflight's trace.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from networks import Training
from torch import Tensor
from torch.nn import functional as F

from tpufit import runtime
from tpufit.drivers.torchtpu.programs import shard_text
from tpufit.preflight.preflight_plan import TRACED

_INPUTS = 2  # x and y, the last arguments


def trace_alone(training: Training, cores: int, folder: Path) -> None:
    """Write the step of a training on a number of cores, and its facts. TorchTPU's device must be registered."""
    runtime.start(1, "the benchmark")
    net = training.make().to("tpu")
    batch = tuple(tensor.to("tpu") for tensor in training.batch(cores))
    loss = F.cross_entropy if training.loss == "cross_entropy" else training.loss
    assert callable(loss)
    traced: list[tuple[str, Sequence[Tensor]]] = []

    def loss_of(model: Callable[[Tensor], Tensor], args: tuple[Tensor, Tensor], _: Any) -> Tensor:
        x, y = args
        with torch.autocast("tpu", torch.bfloat16, enabled=training.precision == "bf16"):
            return loss(model(x), y)

    def keep(graph: torch.fx.GraphModule, arguments: Sequence[Tensor]) -> torch.fx.GraphModule:
        from torch_tpu._internal.export import fx_to_mlir

        traced.append((fx_to_mlir(graph, list(arguments)).serialize_text(), arguments))
        return graph

    ours: Any = torch
    # Moments in bfloat16, its default, need weights in bfloat16.
    optimizer = ours.tpu.optimizers.AdamW(use_bfloat16_moments=False)
    trainer = ours.tpu.optimizers.SingleTraceTrainer(net, optimizer, keep, loss_of)
    trainer.make_compiled_train_step(batch)
    ((text, arguments),) = traced
    state = len(arguments) - _INPUTS
    axes = [None] * state + [0] * _INPUTS
    (folder / "0.hlo").write_text(shard_text(_donating(text, state), axes, cores))
    described = [
        {
            "source": "state" if axis is None else "input",
            "name": "",
            "shape": list(tensor.shape),
            "nbytes": tensor.nbytes,
            "donated": axis is None,
            "axis": axis,
        }
        for tensor, axis in zip(arguments, axes, strict=True)
    ]
    facts = {"role": "train", "cause": "", "rows": len(batch[0]), "steps": 1, "arguments": described, "lines": []}
    facts |= {"precision": training.precision, "remat": None, "attention": {}}
    (folder / TRACED).write_text(json.dumps({"0": facts}))


def _donating(text: str, state: int) -> str:
    """Return the text with donation: results after the first, the loss, overwrite the state's arguments in order."""
    head, arrow, rest = text.partition(") -> ")

    def donated(match: re.Match[str]) -> str:
        number = int(match[1])
        return f"{match[0]} {{tf.aliasing_output = {number + 1} : i32}}" if number < state else match[0]

    return re.sub(r"%arg(\d+): tensor<[^>]*>", donated, head) + arrow + rest
