"""Small nets with data, and their training in plain PyTorch on the host, which is the reference of all."""

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


def _normed(width: int) -> list[nn.Module]:
    return [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.SiLU()]


class Conv(nn.Module):
    """Convolutions with batch norm."""

    def __init__(self, width: int = 16, more: int = 0, classes: int = 10) -> None:
        super().__init__()
        # No bias before a batch norm: its gradient would be nothing but rounding.
        self.layers = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.SiLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.SiLU(),
            *(layer for _ in range(more) for layer in _normed(2 * width)),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(2 * width, classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        return logits


class Recurrent(nn.Module):
    """An LSTM over words."""

    def __init__(self, width: int = 32, classes: int = 10) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, classes)

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
    """A small transformer over words; it gives logits of the next ones."""

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


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy, of words or of classes."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


@dataclass(frozen=True)
class Task:
    """A net with one batch of data, made anew from a seed at each call.

    Attributes:
        name: Its name.
        net: Makes the net.
        data: Makes `rows` rows of data: inputs and targets.
        rate: The rate of SGD with momentum.
        exact: The relative difference of losses over 20 steps that float32 may make. Products with operands rounded to
            bfloat16, imitated on the host, make two to four times as much, and those in three passes less than a
            hundredth.
    """

    name: str
    net: Callable[[], nn.Module]
    data: Callable[[int], tuple[Tensor, Tensor]]
    rate: float
    exact: float

    def made(self, rows: int = ROWS) -> tuple[nn.Module, Tensor, Tensor]:
        """The net and the data."""
        torch.manual_seed(0)
        net = self.net()
        return net, *self.data(rows)


def conv(width: int = 16, size: int = 8, more: int = 0) -> Task:
    """Images."""
    return Task(
        "conv net",
        lambda: Conv(width, more),
        lambda n: (torch.randn(n, 3, size, size), torch.randint(10, (n,))),
        0.2,
        5e-5,
    )


def lstm(width: int = 32, length: int = 8) -> Task:
    """Sequences."""
    return Task(
        "LSTM",
        lambda: Recurrent(width),
        lambda n: (torch.randint(_WORDS, (n, length)), torch.randint(10, (n,))),
        0.5,
        2e-4,
    )


def gpt(width: int = 64, blocks: int = 1, length: int = 16, words: int = _WORDS, dropout: float = 0.0) -> Task:
    """Texts."""

    def data(rows: int) -> tuple[Tensor, Tensor]:
        texts = torch.randint(words, (rows, length + 1))
        return texts[:, :-1].contiguous(), texts[:, 1:].contiguous()

    return Task("GPT", lambda: GPT(width, blocks, length, words, dropout), data, 0.5, 2.5e-5)


def sgd(task: Task) -> Callable[[Any], torch.optim.Optimizer]:
    """The optimizer of a task, from parameters."""
    return lambda parameters: torch.optim.SGD(parameters, task.rate, momentum=0.9)


def compiled(task: Task, net: nn.Module, **options: Any) -> Model:
    """A model of a task's net, compiled."""
    model = Model(net)
    model.compile(sgd(task), loss_of, scale_lr=None, **options)
    return model


def batch_size(cores: Cores | None, rows: int = ROWS) -> int:
    """The rows of a core, of batches of so many."""
    return -(-rows // (cores.count if cores else 1))


def losses_on_device(task: Task, cores: Cores | None, steps: int = STEPS, **options: Any) -> list[float]:
    """The loss of each of some steps on the same batch, by `fit`."""
    net, x, y = task.made()
    model = compiled(task, net, **options)
    history = model.fit(x, y, batch_size(cores), epochs=steps, shuffle=False, verbose=0)
    return list(history.history["loss"])


def losses_on_host(task: Task, steps: int = STEPS) -> list[float]:
    """The same in plain PyTorch on the host."""
    net, x, y = task.made()
    return plain(task, net, [(x, y)] * steps)


def plain(task: Task, net: nn.Module, batches: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
    """The losses of a loop of PyTorch, which trains the net."""
    optimizer = sgd(task)(net.parameters())
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = loss_of(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest relative difference of two lists of numbers; infinite if they are of unequal lengths.

    Example:
        >>> difference([1.0, 2.0], [1.0, 2.5]), difference([1.0], [1.0, 1.0])
        (0.2, inf)
    """
    if len(ours) != len(theirs):
        return float("inf")
    found = [abs(a - b) / max(abs(b), 1e-12) for a, b in zip(ours, theirs, strict=True)]
    return max(found) if all(each == each for each in found) else float("nan")


def weights_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest difference of two sets of weights, relative to the largest number of its tensor."""
    worst = 0.0
    for name, mine in ours.items():
        other = theirs[name].double()
        worst = max(worst, float((mine.double() - other).abs().max() / other.abs().max().clamp(min=1e-12)))
    return worst


def unequal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> int:
    """The number of tensors that differ in any bit."""
    return sum(not torch.equal(mine, theirs[name]) for name, mine in ours.items()) + len(ours.keys() ^ theirs.keys())
