"""What does a step take, what was predicted, and what does the host do meanwhile?"""

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
from ..preflight.slices import SLICES
from ..runtime import memory_used, placement_on, to_device, to_host
from ..utils.hardware import chips
from . import nets
from .check import Figure, Setting

_PREDICTED = "predicted"
_SENT = 64 << 20  # bytes
_STEPS = 30
_COMPILING = 150.0  # seconds for all predictions; what a slow host doesn't come to is left out
_WITHOUT_A_TPU = "v5e-1"
_SLOWEST = 3.0  # what is measured / what the compiler estimates, which leaves out the host, and what waits for memory


class _Sized:
    """A task of a size at which a TPU is busy, or of one that a CPU can do, and its rows a core."""

    def __init__(self, task: Callable[[bool], nets.Task], on_tpu: int, on_cpu: int) -> None:
        self.task = task
        self._rows = (on_cpu, on_tpu)

    def rows(self, large: bool) -> int:
        return self._rows[large]


_NETS = {
    # So deep that it takes longer than its images do on their way.
    "conv net": _Sized(lambda large: nets.conv(256, 32, more=8) if large else nets.conv(8), 128, 8),
    "LSTM": _Sized(lambda large: nets.lstm(1024, 32) if large else nets.lstm(16), 256, 8),
    "GPT": _Sized(lambda large: nets.gpt(512, 6, 512, 8192) if large else nets.gpt(64), 16, 8),
}


def slice_here() -> str | None:
    """The cloud's name of the slice that this host's chips are, if it is a known one; without chips that of one v5e."""
    found = chips()
    for name, known in SLICES.items():
        alike = found and known.chip.name == _generation(found[0].name)
        if alike and known.hosts == 1 and known.devices == sum(chip.devices for chip in found):
            return name
    return None if found else _WITHOUT_A_TPU


def _generation(name: str) -> str:
    # The bus shows no difference between the two; the report says for which it was predicted.
    return "v3" if name == "v2 or v3" else name


class _Repeated:
    """The batch of a core, over and over: an epoch of it waits only at its end."""

    def __init__(self, x: Tensor, y: Tensor, count: int) -> None:
        self._batch = (x, y)
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter([self._batch] * self._count)


def _model(name: str, large: bool, cores: int) -> tuple[Model, Tensor, Tensor, int]:
    sized = _NETS[name]
    task = sized.task(large)
    rows = sized.rows(large)
    net, x, y = task.made(rows * cores)
    return nets.compiled(task, net, precision="bf16"), x, y, rows


def predicted(setting: Setting) -> Iterator[Figure]:
    """Compile the steps of three nets for the TPU that is here, before anything holds it."""
    began = perf_counter()
    large = bool(chips())
    here = slice_here()
    found = dict[str, Any]()
    if here is None:
        yield Figure("preflight", "what a core of this TPU can do is not known")
    else:
        yield Figure("predicted for", here)
    for name in _NETS if here else ():
        on = SLICES[here or _WITHOUT_A_TPU]
        model, x, y, rows = _model(name, large, on.devices)
        left = _COMPILING - (perf_counter() - began)
        try:
            # Tracing and compiling may each take it.
            report = model.preflight(x, y, rows, tpu=on.name, verbose=0, timeout=max(1.0, left / 2))
        except PreflightError as error:
            yield Figure("preflight", str(error))
            break
        found[name] = {
            "seconds": report.seconds,
            "memory": report.step.memory.total,
            "flops": report.step.cost.flops / report.step.steps,
            "peak": on.chip.peak,
        }
    (setting.folder / _PREDICTED).write_text(json.dumps(found))


def measured(setting: Setting) -> Iterator[Figure]:
    """Train the three nets, beside what was predicted."""
    path = setting.folder / _PREDICTED
    found = json.loads(path.read_text()) if path.exists() else {}
    for name in _NETS:
        yield from measured_net(name, setting, found.get(name))


def measured_net(name: str, setting: Setting, before: dict[str, float] | None) -> Iterator[Figure]:
    """Train one of them, beside what was predicted."""
    model, x, y, rows = _model(name, setting.on_tpu, setting.count)
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
    yield Figure(f"{name}: of that, starting it on the host", 1000 * counts.seconds["steps"] / _STEPS, unit="ms")
    if before is None:
        return
    yield Figure(f"{name}: predicted step", 1000 * before["seconds"], unit="ms")
    yield Figure(f"{name}: measured / predicted", step / before["seconds"], at_most=_SLOWEST, at_least=0.3, on_tpu=True)
    yield Figure(f"{name}: predicted memory of a core", before["memory"] / 2**20, unit="MiB")
    if used := memory_used():
        yield Figure(f"{name}: memory in use between steps", used / 2**20, unit="MiB")
    if setting.on_tpu:
        yield Figure(f"{name}: share of the chip's peak", before["flops"] / step / before["peak"], at_most=1.0)


def sending(setting: Setting) -> Iterator[Figure]:
    """The rate to the device and back."""
    assert setting.cores is not None
    place = placement_on(setting.cores)
    tensor = torch.arange(_SENT // 4, dtype=torch.float32)
    to_host(to_device([tensor], place), "bandwidth")
    began = perf_counter()
    (back,) = to_host(to_device([tensor + 1], place), "bandwidth")
    yield Figure("to the device and back", 2 * _SENT / (perf_counter() - began) / 1e9, unit="GB/s")
    yield Figure("numbers that came back as others", int((torch.as_tensor(back) != tensor + 1).sum()), at_most=0)


def profile(setting: Setting) -> Iterator[Figure]:
    """A profile of three steps, which is kept beside the report."""
    task = nets.gpt()
    net, x, y = task.made(8 * nets.ROWS)
    model = nets.compiled(task, net)
    board = TensorBoard(setting.folder / "board", write_graph=False, profile_batch=(4, 6))
    model.fit(x, y, nets.batch_size(setting.cores), epochs=1, shuffle=False, verbose=0, callbacks=[board])
    traces = [path for path in (setting.folder / "board").rglob("*") if path.name.endswith(".xplane.pb")]
    yield Figure("profiles written", len(traces), at_least=1)
    for path in traces:
        kept: Path = setting.kept / "steps.xplane.pb"  # its own name is that of the host
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, kept)
        yield Figure("its size", kept.stat().st_size / 2**20, unit="MiB")
