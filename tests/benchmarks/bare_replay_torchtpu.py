"""The lower bound of the engine on TorchTPU: the program of a tpufit step, called in a loop with only its transfers."""

from __future__ import annotations

from typing import Any

import torch
from measure import Clock

from tpufit.drivers.torchtpu.compute_modes import computing
from tpufit.runtime.driver import driver


def replay_program_of(model: Any, loader: Any, rate: float, clock: Clock) -> None:
    """Run one pass over the data with the program that a tpufit model replays. The step must draw no random numbers."""
    role = model._engine.roles["train"]
    (graph,) = role.program._graphs.values()
    if graph.consumed or graph.places:
        raise ValueError("this step writes over the model's state, or takes seeds")
    program: Any = driver()
    run = program._programs[graph.hash].run
    state, sums = list(model._engine.state.device.values), list(role.sums.tensors)
    clock.begin_epoch()
    for x, y in loader:
        with computing():
            inputs = [x.to("tpu"), y.to("tpu"), torch.tensor([rate]).to("tpu")]
        outputs = run(list(graph.pick([*state, *sums, *inputs, *graph.constants])))
        for i, value in zip(graph.changed, outputs, strict=False):
            state[i] = value
        sums = outputs[len(graph.changed) : len(graph.changed) + len(graph.summed)]
    with computing():
        total = float(sums[0])
    clock.end_epoch(total)
