"""Small nets with data, and their training in plain PyTorch on the host, which is the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..backend import Cores
from ..model import Model

ROWS = 64  # of a batch on all cores
STEPS = 20
_WORDS = 61
_CLASSES = 10


def _make_normed(width: int) -> list[nn.Module]:
    return [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.SiLU()]


class Conv(nn.Module):
    """Convolutions with batch norm."""

    def __init__(self, width: int = 16, more: int = 0) -> None:
        super().__init__()
        # No bias before a batch norm: its gradient would be pure rounding error.
        self.layers = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.SiLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.SiLU(),
            *(layer for _ in range(more) for layer in _make_normed(2 * width)),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(2 * width, _CLASSES),
        )

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        return logits


class Recurrent(nn.Module):
    """An LSTM over words."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, _CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.head(self.lstm(self.words(words))[0][:, -1])
        return logits


class _Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        added: Tensor = x + self.dropout(self.feed_forward(self.norm2(x)))
        return added


class GPT(nn.Module):
    """A small transformer over words, with logits of the next words."""

    def __init__(self, width: int = 64, blocks: int = 2, length: int = 32, words: int = _WORDS, dropout: float = 0.0):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(_Block(width, dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places(torch.arange(words.shape[1], device=words.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def compute_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of words or classes."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


@dataclass(frozen=True)
class Task:
    """A net with one batch of data, the same at each call of `build`.

    Attributes:
        name: The task's name.
        net: Builds the net.
        data: Creates the given number of rows: inputs and targets.
        rate: The learning rate of SGD with momentum.
        exact: The allowed relative difference of losses over 20 steps in float32. Products of operands rounded to
            bfloat16, imitated on the host, cause two to four times this difference; products in three passes of
            bfloat16, less than a hundredth of it.
    """

    name: str
    net: Callable[[], nn.Module]
    data: Callable[[int], tuple[Tensor, Tensor]]
    rate: float
    exact: float

    def build(self, rows: int = ROWS) -> tuple[nn.Module, Tensor, Tensor]:
        """Return the net and the data."""
        torch.manual_seed(0)
        net = self.net()
        return net, *self.data(rows)


def conv(width: int = 16, size: int = 8, more: int = 0) -> Task:
    """Return a task on images."""
    return Task(
        "conv net",
        lambda: Conv(width, more),
        lambda n: (torch.randn(n, 3, size, size), torch.randint(_CLASSES, (n,))),
        0.2,
        5e-5,
    )


def lstm(width: int = 32, length: int = 8) -> Task:
    """Return a task on sequences."""
    return Task(
        "LSTM",
        lambda: Recurrent(width),
        lambda n: (torch.randint(_WORDS, (n, length)), torch.randint(_CLASSES, (n,))),
        0.5,
        2e-4,
    )


def gpt(width: int = 64, blocks: int = 1, length: int = 16, words: int = _WORDS, dropout: float = 0.0) -> Task:
    """Return a task on texts."""

    def data(rows: int) -> tuple[Tensor, Tensor]:
        texts = torch.randint(words, (rows, length + 1))
        return texts[:, :-1].contiguous(), texts[:, 1:].contiguous()

    return Task("GPT", lambda: GPT(width, blocks, length, words, dropout), data, 0.5, 2.5e-5)


def sgd(task: Task) -> Callable[[Any], torch.optim.Optimizer]:
    """Return a function that creates the task's optimizer from parameters."""
    return lambda parameters: torch.optim.SGD(parameters, task.rate, momentum=0.9)


def compile_model(task: Task, net: nn.Module, **options: Any) -> Model:
    """Return a compiled model of a task's net."""
    model = Model(net)
    model.compile(sgd(task), compute_loss, scale_lr=None, **options)
    return model


def batch_size(cores: Cores | None, rows: int = ROWS) -> int:
    """Return the rows per core of batches with `rows` rows."""
    return -(-rows // (cores.count if cores else 1))


def losses_on_device(task: Task, cores: Cores | None, steps: int = STEPS, **options: Any) -> list[float]:
    """Return the losses of steps of `fit` on the same batch."""
    net, x, y = task.build()
    model = compile_model(task, net, **options)
    history = model.fit(x, y, batch_size(cores), epochs=steps, shuffle=False, verbose=0)
    return list(history.history["loss"])


def losses_on_host(task: Task, steps: int = STEPS) -> list[float]:
    """Return the losses of the same steps in plain PyTorch on the host."""
    net, x, y = task.build()
    return train_in_pytorch(task, net, [(x, y)] * steps)


def train_in_pytorch(task: Task, net: nn.Module, batches: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
    """Train a net in a plain PyTorch loop; return the losses."""
    optimizer = sgd(task)(net.parameters())
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = compute_loss(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the largest relative difference of two lists of numbers; infinity if their lengths differ.

    Example:
        >>> difference([1.0, 2.0], [1.0, 2.5]), difference([1.0], [1.0, 1.0])
        (0.2, inf)
    """
    if len(ours) != len(theirs):
        return float("inf")
    found = [abs(a - b) / max(abs(b), 1e-12) for a, b in zip(ours, theirs, strict=True)]
    return max(found) if all(each == each for each in found) else float("nan")


def weights_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Return the largest difference of two sets of weights, relative to the largest number in the same tensor."""
    worst = 0.0
    for name, mine in ours.items():
        other = theirs[name].double()
        worst = max(worst, float((mine.double() - other).abs().max() / other.abs().max().clamp(min=1e-12)))
    return worst


def count_unequal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> int:
    """Return the number of tensors that differ in any bit."""
    return sum(not torch.equal(mine, theirs[name]) for name, mine in ours.items()) + len(ours.keys() ^ theirs.keys())
