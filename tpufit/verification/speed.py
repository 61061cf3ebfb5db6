"""How long does a step take, compared with its prediction, and how long does the host work on it?"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ..callbacks import Diagnostics, TensorBoard
from ..errors import PreflightError
from ..model import Model
from ..preflight.tpu_slices import SLICES, Slice, find_slice_of_chips
from ..runtime import make_placement, memory_used, to_device, to_host
from ..utils.hardware import find_chips
from . import nets
from .check import Figure, Setting

_PREDICTED = "predicted"
_SENT = 64 << 20  # bytes
_STEPS = 30
_COMPILING = 150.0  # seconds for all predictions; a slow host omits some
_SLOWEST = 3.0  # measured time / the compiler's estimate, which excludes the host and waiting for memory


# Each task, large for a TPU or small for a CPU, and a core's rows on a TPU.
_NETS: dict[str, tuple[Callable[[bool], nets.Task], int]] = {
    # Deep, so that a step takes longer than sending its images.
    "conv net": (lambda large: nets.conv(256, 32, more=8) if large else nets.conv(8), 128),
    "LSTM": (lambda large: nets.lstm(1024, 32) if large else nets.lstm(16), 256),
    "GPT": (lambda large: nets.gpt(512, 6, 512, 8192) if large else nets.gpt(64), 16),
}
_ROWS_ON_CPU = 8


def find_local_slice() -> Slice | None:
    """Return this host's slice, or None if it isn't known; without chips, that of one v5e."""
    found = find_chips()
    if not found:
        return SLICES["v5e-1"]
    # The PCI bus doesn't distinguish a v2 from a v3: assume a v3.
    return find_slice_of_chips(found, sum(chip.devices for chip in found), SLICES["v3-8"].chip.memory)


class _Repeated:
    """A core's batch, repeated: an epoch waits only at its end."""

    def __init__(self, x: Tensor, y: Tensor, count: int) -> None:
        self._batch = (x, y)
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter([self._batch] * self._count)


def _build_model(name: str, large: bool, cores: int) -> tuple[Model, Tensor, Tensor, int]:
    make_task, rows_on_tpu = _NETS[name]
    task = make_task(large)
    rows = rows_on_tpu if large else _ROWS_ON_CPU
    net, x, y = task.build(rows * cores)
    return nets.compile_model(task, net, precision="bf16"), x, y, rows


def predict_speed(setting: Setting) -> Iterator[Figure]:
    """Compile the steps of three nets for this host's TPU, before a process uses it."""
    began = perf_counter()
    large = bool(find_chips())
    tpu = find_local_slice()
    if tpu is None:
        yield Figure("preflight", "this TPU isn't known")
        return
    yield Figure("predicted for", tpu.name)
    predictions = dict[str, Any]()
    for name in _NETS:
        model, x, y, rows = _build_model(name, large, tpu.devices)
        remaining = _COMPILING - (perf_counter() - began)
        try:
            # The limit applies to tracing and to compiling.
            report = model.preflight(x, y, rows, tpu=tpu.name, verbose=0, timeout=max(1.0, remaining / 2))
        except PreflightError as error:
            yield Figure("preflight", str(error))
            break
        predictions[name] = {
            "seconds": report.seconds,
            "memory": report.step.memory.total,
            "flops": report.step.cost.flops / report.step.steps,
            "peak": tpu.chip.peak,
        }
    (setting.folder / _PREDICTED).write_text(json.dumps(predictions))


def measure_nets(setting: Setting) -> Iterator[Figure]:
    """Train the three nets, and compare with the predictions."""
    path = setting.folder / _PREDICTED
    predictions = json.loads(path.read_text()) if path.exists() else {}
    for name in _NETS:
        yield from measure_net(name, setting, predictions.get(name))


def measure_net(name: str, setting: Setting, before: dict[str, float] | None) -> Iterator[Figure]:
    """Train one net, and compare with its prediction."""
    model, x, y, rows = _build_model(name, setting.on_tpu, setting.count)
    x = x[:rows]
    y = y[:rows]
    began = perf_counter()
    model.fit(_Repeated(x, y, 3 * setting.count), verbose=0)
    yield Figure(f"{name}: first three steps, with compiling", perf_counter() - began, unit="s")
    began = perf_counter()
    model.fit(_Repeated(x, y, _STEPS * setting.count), verbose=0, callbacks=Diagnostics())
    step = (perf_counter() - began) / _STEPS
    counts = model.report().counts
    yield Figure(f"{name}: step", 1000 * step, unit="ms")
    yield Figure(f"{name}: the host's part of it", 1000 * counts.seconds["steps"] / _STEPS, unit="ms")
    if before is None:
        return
    yield Figure(f"{name}: predicted step", 1000 * before["seconds"], unit="ms")
    yield Figure(f"{name}: measured / predicted", step / before["seconds"], at_most=_SLOWEST, at_least=0.3, on_tpu=True)
    yield Figure(f"{name}: predicted memory of a core", before["memory"] / 2**20, unit="MiB")
    if used := memory_used():
        yield Figure(f"{name}: memory in use between steps", used / 2**20, unit="MiB")
    if setting.on_tpu:
        yield Figure(f"{name}: share of the chip's peak", before["flops"] / step / before["peak"], at_most=1.0)


def measure_transfers(setting: Setting) -> Iterator[Figure]:
    """Measure the transfer rate to the device and back."""
    assert setting.cores is not None
    place = make_placement(setting.cores)
    tensor = torch.arange(_SENT // 4, dtype=torch.float32)
    to_host(to_device([tensor], place), "bandwidth")
    began = perf_counter()
    (back,) = to_host(to_device([tensor + 1], place), "bandwidth")
    yield Figure("to the device and back", 2 * _SENT / (perf_counter() - began) / 1e9, unit="GB/s")
    yield Figure("numbers that changed on the way", int((torch.as_tensor(back) != tensor + 1).sum()), at_most=0)


def check_profile(setting: Setting) -> Iterator[Figure]:
    """Profile three steps; the profile is kept next to the report."""
    task = nets.gpt()
    net, x, y = task.build(8 * nets.ROWS)
    model = nets.compile_model(task, net)
    board = TensorBoard(setting.folder / "board", write_graph=False, profile_batch=(4, 6))
    model.fit(x, y, nets.batch_size(setting.cores), epochs=1, shuffle=False, verbose=0, callbacks=[board])
    traces = [path for path in (setting.folder / "board").rglob("*") if path.name.endswith(".xplane.pb")]
    yield Figure("profiles written", len(traces), at_least=1)
    for path in traces:
        kept: Path = setting.artifacts / "steps.xplane.pb"  # its original name contains the host's
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, kept)
        yield Figure("its size", kept.stat().st_size / 2**20, unit="MiB")
