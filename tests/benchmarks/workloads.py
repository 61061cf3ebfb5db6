"""The networks and the data, in plain PyTorch on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from measure import BATCH, CLASSES, LAYERS, MOMENTUM, RATE, WIDTH
from torch import Tensor, nn
from torch.utils.data import DataLoader


@dataclass(frozen=True)
class Workload:
    """A network, its batches and its optimizer. The loss is cross-entropy, the metric accuracy.

    Attributes:
        net: Builds the network.
        inputs: Makes a number of rows of input.
        batch: Rows per step, on all cores together.
        optimizer: Builds the optimizer of the parameters.
        rate: Its learning rate.
    """

    net: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    batch: int
    optimizer: Callable[..., torch.optim.Optimizer]
    rate: float

    def build(self) -> nn.Module:
        """Build the network, with the same weights in every process."""
        torch.manual_seed(0)
        return self.net()

    def arrays(self, steps: int) -> tuple[Tensor, Tensor]:
        """Return the rows of a number of steps and their labels, the same in every process."""
        torch.manual_seed(1)
        rows = steps * self.batch
        return self.inputs(rows), torch.randint(0, CLASSES, (rows,))

    def loader(self, steps: int) -> DataLoader[tuple[Tensor, Tensor]]:
        """Return the same rows as ready batches in host memory, so that no benchmark row includes collating."""
        x, y = self.arrays(steps)
        return DataLoader(list(zip(x.split(self.batch), y.split(self.batch), strict=True)), batch_size=None)


def mlp() -> nn.Module:
    hidden = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, CLASSES))


def convnet() -> nn.Module:
    """17 convolutions with batch norm: with AdamW's moments and counters, 264 tensors of state."""

    def block(channels_in: int) -> list[nn.Module]:
        conv = nn.Conv2d(channels_in, 8, 3, padding=1, bias=False)
        return [conv, nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1)]

    blocks = [layer for channels_in in (1, *[8] * 16) for layer in block(channels_in)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES))


class Transformer(nn.Module):
    """Four layers of width 64 over 32 tokens, whose mean is classified."""

    def __init__(self, vocabulary: int = 256, length: int = 32, width: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        self.layers = nn.Sequential(
            *[nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True) for _ in range(4)]
        )
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.tokens(x) + self.positions).mean(1))


def large() -> nn.Module:
    """50 million weights: 600 MB with AdamW's moments."""
    return nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(3)], nn.Linear(4096, CLASSES))


_adamw = partial(torch.optim.AdamW, eps=1e-6)

WORKLOADS = {
    "mlp": Workload(
        mlp, lambda rows: torch.randn(rows, WIDTH), BATCH, partial(torch.optim.SGD, momentum=MOMENTUM), RATE
    ),
    "convnet": Workload(convnet, lambda rows: torch.randn(rows, 1, 8, 8), 64, _adamw, 1e-3),
    "transformer": Workload(Transformer, lambda rows: torch.randint(0, 256, (rows, 32)), 16, _adamw, 1e-3),
    "large": Workload(large, lambda rows: torch.randn(rows, 4096), 8, _adamw, 1e-4),
}
