"""Is memory freed, and can the process train again after a step that is too large?"""

import gc
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ..errors import OutOfMemoryError
from ..runtime import count_live_tensors, device_memory, memory_used
from ..utils.text import format_bytes
from . import nets
from .check import Figure, Setting

_FITS = 5
_SETTLED = 2  # fits until everything is compiled and every buffer was created once
_WIDE = 1 << 16
_DEVICE_GROWTH = 1 << 18  # bytes: less than the state of one of these trainings
_HOST_GROWTH = 64 << 20  # bytes, because the allocator keeps some; a net of this check has 0.3 MB


def check_release(setting: Setting) -> Iterator[Figure]:
    """Fit several new models, and measure what remains: tensors on the device, device memory, host memory."""
    tensors: list[int] = []
    device: list[int] = []
    host: list[int] = []
    for _ in range(_FITS):
        net, x, y = nets.gpt().build()
        model = nets.compile_model(nets.gpt(), net)
        model.fit(x, y, nets.batch_size(setting.cores), epochs=4, shuffle=False, verbose=0)
        del model, net
        gc.collect()
        tensors.append(count_live_tensors())
        device.append(memory_used() or 0)
        host.append(_measure_resident())
    yield Figure("more tensors on the device, fits 3 to 5", tensors[-1] - tensors[_SETTLED - 1], at_most=0)
    yield Figure("more host memory, fits 3 to 5", host[-1] - host[_SETTLED - 1], at_most=_HOST_GROWTH, unit="bytes")
    if device[-1]:
        yield Figure("device memory in use", device[-1], unit="bytes")
        yield Figure(
            "more device memory, fits 3 to 5", device[-1] - device[_SETTLED - 1], at_most=_DEVICE_GROWTH, unit="bytes"
        )


class Wide(nn.Module):
    """A hidden layer so wide that few rows fill a core's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, _WIDE), nn.SiLU(), nn.Linear(_WIDE, 1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


def count_excessive_rows(limit: int) -> int:
    """Return the rows per core whose hidden layer needs twice a core's memory of `limit` bytes."""
    return 2 * limit // (4 * _WIDE)


def check_too_large(setting: Setting) -> Iterator[Figure]:
    """Check that a step that doesn't fit raises an error, and that the next training succeeds."""
    # With several cores the memory is unknown; no TPU core has more than 95 GB.
    rows = count_excessive_rows(device_memory() or 95 << 30)
    model = nets.Model(Wide())
    model.compile("sgd", "mse", scale_lr=None)
    x = torch.zeros(rows * setting.count, 16)
    message = ""
    try:
        model.fit(x, x[:, :1], rows, epochs=1, verbose=0)
    except OutOfMemoryError as error:
        message = str(error).splitlines()[0]
    yield Figure(f"OutOfMemoryError, hidden layer of {format_bytes(4 * rows * _WIDE)}", int(bool(message)), at_least=1)
    if message:
        yield Figure("message", message)
    first, *_, last = nets.losses_on_device(nets.conv(), setting.cores)
    yield Figure("the next training: last loss / first", last / first, at_most=1.0)


def _measure_resident() -> int:
    """Return this process's memory on the host, in bytes."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("VmRSS"))
    return int(line.split()[1]) << 10
