"""Traces a training step as users of torch_xla write it: `tpu_by_hand.py NAME FOLDER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch_xla
import torch_xla.distributed.spmd as spmd
import torch_xla.runtime
from networks import TRAININGS, Training
from torch.nn import functional as F

from tpufit.preflight.preflight_plan import TRACED
from tpufit.runtime import tracing_for


def traced(training: Training) -> tuple[bytes, dict[str, Any]]:
    """Return the program of a step, and the facts about it."""
    torch_xla.runtime.use_spmd()
    device, mesh = torch_xla.device(), spmd.get_1d_mesh("data")
    net = training.make().to(device)
    optimizer = torch.optim.AdamW(net.parameters())
    for parameter in net.parameters():  # as after a first step
        moments = {name: torch.zeros(parameter.shape).to(device) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}
    total, hits = torch.zeros(()).to(device), torch.zeros((), dtype=torch.long).to(device)
    moments = [value for state in optimizer.state.values() for value in state.values() if value.is_xla]
    state = [*net.parameters(), *net.buffers(), *moments, total, hits]
    x, y = batch = [tensor.to(device) for tensor in training.batch(mesh.size())]
    for tensor in batch:
        spmd.mark_sharding(tensor, mesh, ("data", *[None] * (tensor.ndim - 1)))
    xla = torch_xla._XLAC
    torch_xla.sync()  # so that everything is on the device
    held, sent = (set(xla._get_tensors_handle(tensors)) for tensors in (state, batch))
    loss_of = F.cross_entropy if training.loss == "cross_entropy" else training.loss

    with tracing_for("TPU"):
        optimizer.zero_grad()
        with torch.autocast("xla", torch.bfloat16, enabled=training.precision == "bf16"):
            predicted = net(x)
            loss = loss_of(predicted, y)
        loss.backward()
        optimizer.step()
        total += loss.detach() * len(x)
        hits += (predicted.argmax(-1) == y).sum()

        # What `torch_xla.sync()` would compute: all live tensors, including gradients.
        roots = [*state, *(parameter.grad for parameter in net.parameters())]
        _, values = xla._get_tensors_xla_device_data_node(roots)
        arguments = []
        for value, handle in zip(values, xla._get_tensors_handle(values), strict=True):
            source = "state" if handle in held else "input" if handle in sent else "constant"
            facts = {"source": source, "name": "", "shape": list(value.shape), "nbytes": value.nbytes}
            arguments.append(facts | {"donated": source == "state", "axis": 0 if source == "input" else None})
        facts = {"role": "train", "cause": "", "rows": len(x), "steps": 1, "arguments": arguments, "lines": []}
        return xla._get_xla_tensors_hlo_proto(roots), facts | {"precision": training.precision, "remat": False}


def main(name: str, folder: Path) -> None:
    program, facts = traced(TRAININGS[name])
    (folder / "0.hlo").write_bytes(program)
    (folder / TRACED).write_text(json.dumps({"0": facts}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
