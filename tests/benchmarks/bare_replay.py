"""The lower bound of the engine: one step's compiled graph, run repeatedly with only its transfers.

Every step sends a batch, a learning rate and a seed to the device, as tpufit does, and runs the graph. Nothing is
checked or written back: this measures the cost of a replay, and isn't a way to train.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as spmd
from measure import MOMENTUM, Clock
from torch import Tensor, nn
from torch_xla import _XLAC
from torch_xla.utils.buffer_donor_context import alias_with_buffer_donor_config
from workloads import Workload

_FIRST_SEED = 1000


class Graph:
    """`body(*inputs)`, which changes `state` in place, captured by tracing it once.

    Args:
        body: The step.
        state: Device tensors; after the capture their values are in `values`, and the tensors must not be used.
        inputs: Device tensors as the step will get them.
        donate: Whether the graph writes the new state over the old.
    """

    def __init__(self, body: Callable[..., None], state: list[Tensor], inputs: list[Tensor], donate: bool) -> None:
        torch_xla.sync()
        xm.wait_device_ops()
        sources: dict[int, tuple[str, Any]] = {_XLAC._get_seed_info_id(): ("seed", None)}
        for kind, tensors in (("state", state), ("input", inputs)):
            sources |= {_XLAC._xla_get_tensor_id(tensor): (kind, i) for i, tensor in enumerate(tensors)}
        self.values = [tensor.detach().clone() for tensor in state]  # the same memory; tracing doesn't change these
        for tensor in state if donate else ():
            _XLAC._set_buffer_donation(tensor, True)
        body(*inputs)
        wanted = zip(*_XLAC._get_tensors_xla_device_data_node(state), strict=True)
        self._arguments = [sources.get(number, ("constant", value)) for number, value in wanted]
        with alias_with_buffer_donor_config():
            self._hash = _XLAC._get_graph_hash(state)
            _XLAC._xla_warm_up_cache(state, [])
        self._device = str(torch_xla.device())
        _XLAC._clear_pending_irs(self._device)

    def __call__(self, inputs: list[Tensor]) -> None:
        arguments = []
        for kind, which in self._arguments:
            if kind == "state":
                arguments.append(self.values[which])
            elif kind == "input":
                arguments.append(inputs[which])
            else:
                arguments.append(which if kind == "constant" else _XLAC._get_base_seed_as_tensor(self._device))
        self.values = _XLAC._run_cached_graph(self._hash, arguments)


def train(workload: Workload, clock: Clock, *, epochs: int, steps: int, cores: int = 1, donate: bool = False) -> None:
    """Train for some epochs, each over the same batches. With several cores, SPMD is already enabled."""
    device = torch_xla.device()
    net = workload.build().to(device)
    update, moments = _optimizer(workload, list(net.parameters()))
    total, correct = torch.zeros(1, device=device), torch.zeros(1, device=device)

    def step(x: Tensor, y: Tensor, rate: Tensor) -> None:
        predicted = net(x)
        loss = nn.functional.cross_entropy(predicted, y)
        net.zero_grad()
        loss.backward()
        update(rate)
        net.zero_grad()
        total.add_(loss.detach())
        correct.add_((predicted.argmax(1) == y).sum())

    send = _sender(str(device), cores)
    loader = workload.loader(steps)
    sums = [total, correct]
    graph = Graph(step, [*sums, *net.parameters(), *net.buffers(), *moments], send(*next(iter(loader)), 0.0), donate)
    done = 0
    for _ in range(epochs):
        clock.begin_epoch()
        graph.values[:2] = _XLAC._xla_tensors_from_aten([torch.zeros(1)] * 2, [str(device)] * 2, None)
        for x, y in loader:
            inputs = send(x, y, workload.rate)
            xm.set_rng_state(_FIRST_SEED + done, str(device))
            graph(inputs)
            done += 1
        loss, _ = (float(value) / steps for value in _XLAC._xla_get_cpu_tensors(graph.values[:2]))
        clock.end_epoch(loss)


def replay_graph_of(model: Any, loader: Any, rate: float, clock: Clock) -> None:
    """Run one pass over the data with the graph that a tpufit model replays, with only its transfers."""
    role = model._engine.roles["train"]
    program, running = role.program, role.sums
    (graph,) = program._graphs.values()
    if graph.consumed:
        raise ValueError("this graph takes the memory of its state, which the model still needs")
    device = str(model._engine.state.placement.device)
    state, sums = list(model._engine.state.device.values), list(running.tensors)
    clock.begin_epoch()
    for number, (x, y) in enumerate(loader):
        inputs = _XLAC._xla_tensors_from_aten([x, y, torch.tensor([rate])], [device] * 3, None)
        xm.set_rng_state(_FIRST_SEED + number, device)
        seed = _XLAC._get_base_seed_as_tensor(device)
        drawn = [seed] if graph.places else []  # a step without random numbers takes none
        arguments = graph.pick([*state, *sums, *inputs, *drawn, *graph.constants])
        out = _XLAC._run_cached_graph(graph.hash, list(arguments))
        state, sums = out[: len(graph.changed)], out[len(graph.changed) : len(graph.changed) + len(graph.summed)]
    (total,) = _XLAC._xla_get_cpu_tensors(sums[:1])
    clock.end_epoch(float(total))


def _sender(device: str, cores: int) -> Callable[[Tensor, Tensor, float], list[Tensor]]:
    """Return a function that sends a batch and a rate, in one call."""
    mesh = spmd.Mesh(np.arange(cores), (cores,), ("data",)) if cores > 1 else None

    def send(x: Tensor, y: Tensor, rate: float) -> list[Tensor]:
        values = [x, y, torch.tensor([rate])]  # not 0-d: that would be a constant of the graph
        return _XLAC._xla_tensors_from_aten(values, [device] * 3, shardings(values))

    known: list[Any] = []

    def shardings(values: list[Tensor]) -> list[Any] | None:
        if mesh is None:
            return None
        if not known:
            axes = [("data",) + (None,) * (value.dim() - 1) for value in values[:2]] + [(None,)]
            known.extend(spmd.ShardingSpec(mesh, axis) for axis in axes)
        return [spec.xla_spec(value) for spec, value in zip(known, values, strict=True)]

    return send


def _optimizer(workload: Workload, parameters: list[nn.Parameter]) -> tuple[Callable[[Tensor], None], list[Tensor]]:
    """Return the optimizer's update with the rate as a tensor, and its state, created before the first step."""
    optimizer = workload.optimizer(parameters, lr=workload.rate)
    if isinstance(optimizer, torch.optim.SGD):  # PyTorch's optimizer would read a tensor rate
        velocities = [torch.zeros_like(parameter) for parameter in parameters]

        @torch.no_grad()
        def sgd(rate: Tensor) -> None:
            for parameter, velocity in zip(parameters, velocities, strict=True):
                velocity.mul_(MOMENTUM).add_(parameter.grad)
                parameter.sub_(rate * velocity)

        return sgd, velocities

    group = optimizer.param_groups[0] | {"capturable": True, "foreach": False}
    optimizer.param_groups[0] = group
    for parameter in parameters:
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.zeros((), device=parameter.device), **moments}

    def adamw(rate: Tensor) -> None:
        group["lr"] = rate
        optimizer.step()

    return adamw, [value for state in optimizer.state.values() for value in state.values()]
