"""Does the device compute what PyTorch does on the host, and with the requested precision?"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..model import Model
from . import nets
from .check import Figure, Setting

# The options of `compile`, each with the factor by which its difference from PyTorch may exceed that of float32.
_PRECISIONS: dict[str, tuple[dict[str, Any], float]] = {
    "fp32, highest": ({"matmul_precision": "highest"}, 1),
    "fp32, default": ({"matmul_precision": "default"}, 20),
    "bf16": ({"precision": "bf16"}, 100),
}
_SIZE = 512
_FULL = 1e-5  # the error of a product in float32, relative to its largest number


def check_conv(setting: Setting) -> Iterator[Figure]:
    """Compare convolutions with batch norm."""
    yield from _compare_with_pytorch(nets.conv(), setting)


def check_lstm(setting: Setting) -> Iterator[Figure]:
    """Compare an LSTM."""
    yield from _compare_with_pytorch(nets.lstm(), setting)


def check_gpt(setting: Setting) -> Iterator[Figure]:
    """Compare a GPT."""
    yield from _compare_with_pytorch(nets.gpt(blocks=2), setting)


def _compare_with_pytorch(task: nets.Task, setting: Setting) -> Iterator[Figure]:
    theirs = nets.losses_on_host(task)
    for name, (options, factor) in _PRECISIONS.items():
        ours = nets.losses_on_device(task, setting.cores, **options)
        yield Figure(name, nets.difference(ours, theirs), at_most=task.exact * factor)


def check_precisions(setting: Setting) -> Iterator[Figure]:
    """Measure the errors of a product at each precision, twice in one process: the second time, a program compiled with
    another precision could be reused."""
    torch.manual_seed(0)
    weights = torch.randn(_SIZE, _SIZE)
    x = torch.randn(nets.ROWS, _SIZE)
    exact = x.double() @ weights.double()
    for time in ("first", "second"):
        errors = {
            name: _measure_error(multiply_on_device(x, weights, name, setting), exact)
            for name in ("default", "high", "highest")
        }
        for name, error in errors.items():
            yield Figure(f"{name}, {time} time", error, at_most={"default": 1e-2, "high": 1e-4, "highest": _FULL}[name])
        ratio = {"default / high": errors["default"] / errors["high"]}
        ratio["high / highest"] = errors["high"] / errors["highest"]
        for name, found in ratio.items():
            yield Figure(f"{name}, {time} time", found, at_least=2.0 if name.startswith("default") else 1.0)


def multiply_on_device(x: Tensor, weights: Tensor, precision: str, setting: Setting) -> Tensor:
    """Compute `x @ weights` on the device, with this `matmul_precision` of `compile`."""
    layer = nn.Linear(weights.shape[0], weights.shape[1], bias=False)
    with torch.no_grad():
        layer.weight.copy_(weights.T)
    model = Model(layer)
    model.compile(None, "mse", matmul_precision=precision)
    return torch.as_tensor(model.predict(x, nets.batch_size(setting.cores), verbose=0))


def _measure_error(ours: Tensor, exact: Tensor) -> float:
    return float((ours.double() - exact).abs().max() / exact.abs().max())


class Attention(nn.Module):
    """Attention over long rows, between two layers with trained weights."""

    def __init__(self, width: int = 64, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, 10)

    def forward(self, rows: Tensor) -> Tensor:
        q, k, v = self.qkv(rows).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits: Tensor = self.out(attended.transpose(1, 2).flatten(2).mean(1))
        return logits


def check_attention(setting: Setting) -> Iterator[Figure]:
    """Compare `scaled_dot_product_attention` over rows of the length for which a TPU uses its own kernel."""
    length = 2048 if setting.on_tpu else 256

    def data(rows: int) -> tuple[Tensor, Tensor]:
        return 2 * torch.randn(rows, length, 64), torch.randint(10, (rows,))

    # At this rate, products rounded to bfloat16 exceed the allowed difference four times.
    task = nets.Task("attention", Attention, data, 1.0, 1e-4)
    rows = max(8, setting.count)
    steps = 5
    net, x, y = task.build(rows)
    theirs = nets.train_in_pytorch(task, net, [(x, y)] * steps)
    for options, factor in ({"matmul_precision": "highest"}, 1), ({"precision": "bf16"}, 100):
        net, x, y = task.build(rows)
        model = nets.compile_model(task, net, **options)
        history = model.fit(x, y, nets.batch_size(setting.cores, rows), epochs=steps, shuffle=False, verbose=0).history
        (form,) = model.report().attention.values()
        how = "" if factor == 1 else f", bf16, {form.partition(':')[0]} attention"
        found = nets.difference(list(history["loss"]), theirs)
        yield Figure(f"losses of {steps} steps, length {length}{how}", found, at_most=task.exact * factor)
