"""tpufit and its alternatives for users of PyTorch, each as in its own documentation."""

from __future__ import annotations

import inspect
import os
import statistics
from collections.abc import Callable, Iterable
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from typing import Any

if "TPU_LIBRARY_PATH" not in os.environ:  # else TorchTPU computes on the CPU
    os.environ["PJRT_DEVICE"] = "CPU"

import torch
from measure import READ_AT, WARM_UP, Clock, Missing
from torch import Tensor, nn
from workloads import WORKLOADS

Spec = dict[str, Any]


def eager(clock: Clock, spec: Spec) -> Spec:
    """PyTorch on the CPU, without XLA."""
    workload = WORKLOADS[spec["workload"]]
    net, loader = workload.build(), workload.loader(spec["steps"])
    optimizer = workload.optimizer(net.parameters(), lr=workload.rate)
    _loop(clock, spec, "cpu", net, optimizer, lambda: loader)
    return {}


def hand(clock: Clock, spec: Spec) -> Spec:
    """A manual loop with torch_xla, as in its guides; SPMD with several cores."""
    workload, cores = WORKLOADS[spec["workload"]], spec.get("cores", 1)
    net, loader = workload.build(), workload.loader(spec["steps"])
    clock.begin()
    torch_xla = _start(cores)
    import torch_xla.core.xla_model as xm
    import torch_xla.distributed.parallel_loader as parallel_loader
    import torch_xla.distributed.spmd as spmd

    device = torch_xla.device()
    sharded: Spec = {}
    if cores > 1:
        mesh = spmd.Mesh(list(range(cores)), (cores,), ("data",))
        sharded["input_sharding"] = spmd.ShardingSpec(
            mesh, ("data", None)
        )  # the labels, with one dimension, stay whole
    net.to(device)
    optimizer = workload.optimizer(net.parameters(), lr=workload.rate)
    _loop(
        clock,
        spec,
        device,
        net,
        optimizer,
        lambda: parallel_loader.MpDeviceLoader(loader, device, **sharded),
        step=lambda: xm.optimizer_step(optimizer),
        launch=torch_xla.sync,
    )
    return _graphs()


def accelerate(clock: Clock, spec: Spec) -> Spec:
    """Accelerate, which detects torch_xla."""
    from accelerate import Accelerator

    workload = WORKLOADS[spec["workload"]]
    accelerator = Accelerator()
    _require_xla(accelerator.device)
    net = workload.build()
    optimizer = workload.optimizer(net.parameters(), lr=workload.rate)
    net, optimizer, loader = accelerator.prepare(net, optimizer, workload.loader(spec["steps"]))
    _loop(clock, spec, accelerator.device, net, optimizer, lambda: loader, backward=accelerator.backward)
    return _graphs()


def lightning(clock: Clock, spec: Spec) -> Spec:
    """Lightning's TPU trainer. It requires a TPU; this makes its check succeed, and then it runs on XLA:CPU."""
    import lightning
    import torchmetrics
    from lightning.fabric.accelerators import XLAAccelerator as FabricXLA
    from lightning.pytorch.accelerators import XLAAccelerator as TrainerXLA

    for accelerator in (FabricXLA, TrainerXLA):
        accelerator.is_available = staticmethod(lambda: True)
        accelerator.auto_device_count = staticmethod(lambda: 1)
    workload = WORKLOADS[spec["workload"]]

    class Peer(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = workload.build()
            self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=10, validate_args=False)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return workload.optimizer(self.parameters(), lr=workload.rate)

        def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
            x, y = batch
            predicted = self.net(x)
            loss = nn.functional.cross_entropy(predicted, y)
            self.accuracy(predicted, y)
            self.log("loss", loss, on_step=False, on_epoch=True)
            self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
            return loss

    class Timer(lightning.Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            clock.begin_epoch()

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            _require_xla(module.device)
            clock.end_epoch(float(trainer.callback_metrics["loss"]))

    trainer = lightning.Trainer(
        accelerator="tpu",
        devices=1,
        max_epochs=spec["epochs"],
        callbacks=[Timer()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Peer(), workload.loader(spec["steps"]))
    return _graphs()


def bare_replay(clock: Clock, spec: Spec) -> Spec:
    """The lower bound of tpufit's engine."""
    cores = spec.get("cores", 1)
    _start(cores)
    from bare_replay import train

    workload = WORKLOADS[spec["workload"]]
    train(workload, clock, epochs=spec["epochs"], steps=spec["steps"], cores=cores, donate=spec.get("donate", False))
    return _graphs()


def tpufit(clock: Clock, spec: Spec) -> Spec:
    """tpufit's `fit`."""
    import tpufit

    options = spec.get("compile", {})
    unknown = [name for name in options if name not in inspect.signature(tpufit.Model.compile).parameters]
    if unknown:
        raise Missing(f"this tpufit has no compile({unknown[0]}=)")
    workload, cores = WORKLOADS[spec["workload"]], spec.get("cores", 1)

    class Timer(tpufit.callbacks.Callback):
        reads_weights = False

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            clock.begin_epoch()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            clock.end_epoch(logs["loss"])

    class FirstSteps(tpufit.callbacks.Callback):
        reads_weights = False

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch + 1 in READ_AT:
                float(logs["loss"])
                clock.end_step()

    model = tpufit.Model(workload.build())
    optimizer = partial(workload.optimizer, lr=workload.rate)
    model.compile(optimizer=optimizer, loss="cross_entropy", metrics=["accuracy"], scale_lr=None, **options)
    data: Spec = {"x": workload.loader(spec["steps"])}
    if "fit" in spec:  # arrays instead; the cores share a batch
        x, y = workload.arrays(spec["steps"])
        data = {"x": x, "y": y, "batch_size": workload.batch // cores, **spec["fit"]}
    clock.begin()
    if spec.get("fits"):
        for _ in range(spec["epochs"]):
            clock.begin_epoch()
            history = model.fit(**data, verbose=0, cores=cores).history
            clock.end_epoch(history["loss"][0])
    else:
        callback = FirstSteps() if spec["kind"] == "first" else Timer()
        model.fit(**data, epochs=spec["epochs"], verbose=0, cores=cores, callbacks=[callback])
    counts = tpufit.runtime.counts()
    return _graphs() | {"graphs_by_role": dict(counts.graphs), "waits": dict(counts.waits)}


def tpufit_beside_replay(clock: Clock, spec: Spec) -> Spec:
    """Run tpufit's `fit`, and after each of its epochs as many bare runs of the graph that it has just replayed.

    Both see the same load of the machine, so they differ only by the loop: the feed, the guards, the logs.
    """
    if spec.get("torchtpu"):
        from bare_replay_torchtpu import replay_program_of as replay
    else:
        from bare_replay import replay_graph_of as replay

    import tpufit

    workload, steps = WORKLOADS[spec["workload"]], spec["steps"]
    loader, bare = workload.loader(steps), Clock()

    class InTurn(tpufit.callbacks.Callback):
        reads_weights = False

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            clock.begin_epoch()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            clock.end_epoch(logs["loss"])
            replay(model, loader, workload.rate, bare)

    model = tpufit.Model(workload.build())
    optimizer = partial(workload.optimizer, lr=workload.rate)
    model.compile(optimizer=optimizer, loss="cross_entropy", metrics=["accuracy"], scale_lr=None)
    model.fit(loader, epochs=spec["epochs"], verbose=0, callbacks=[InTurn()])
    pairs = list(zip(clock.wall, bare.wall, strict=True))[WARM_UP:]
    return _graphs() | {
        "own_replay_ms_per_step": 1e3 * statistics.median(seconds for _, seconds in pairs) / steps,
        "own_replay_host_ms_per_step": 1e3 * statistics.median(bare.host[WARM_UP:]) / steps,
        "to_own_replay": statistics.median(ours / theirs for ours, theirs in pairs),
    }


def _loop(
    clock: Clock,
    spec: Spec,
    device: Any,
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Callable[[], Iterable[Any]],
    *,
    backward: Callable[[Tensor], object] = Tensor.backward,
    step: Callable[[], object] | None = None,
    launch: Callable[[], object] = lambda: None,
) -> None:
    """Train for some epochs with a running loss and accuracy, which are read once in each epoch."""
    step = step or optimizer.step
    first = spec["kind"] == "first"
    for _ in range(spec["epochs"]):
        clock.begin_epoch()
        total, correct, rows = torch.zeros((), device=device), torch.zeros((), device=device), 0
        for number, (x, y) in enumerate(batches(), start=1):
            optimizer.zero_grad()
            predicted = net(x)
            loss = nn.functional.cross_entropy(predicted, y)
            backward(loss)
            step()
            total += loss.detach()
            correct += (predicted.argmax(1) == y).sum()
            rows += len(y)
            if first and number in READ_AT:
                launch()  # as one graph, which reading only the loss would split
                loss.item()
                clock.end_step()
        correct.item()
        clock.end_epoch(total.item() / spec["steps"])


def _start(cores: int) -> Any:
    """Import torch_xla, for several virtual cores in SPMD mode."""
    if cores > 1:
        os.environ["CPU_NUM_DEVICES"] = str(cores)
    import torch_xla
    import torch_xla.runtime

    if cores > 1:
        torch_xla.runtime.use_spmd()
    return torch_xla


def _graphs() -> Spec:
    if find_spec("torch_xla") is None:  # another environment than that of the other rows
        return {"versions": {name: metadata.version(name) for name in ("torch", "torch_tpu", "numpy")}}
    import torch_xla.debug.metrics as metrics

    return {"graphs": metrics.counter_value("UncachedCompile") or 0}


def _require_xla(device: Any) -> None:
    if torch.device(device).type != "xla":
        raise RuntimeError(f"this was to run on XLA, and runs on {device}")
