"""The networks of `tpu_programs.py`, in plain PyTorch, and their trainings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Bottleneck(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        self.convs = nn.Sequential(
            *convolution(before, width, 1), nn.ReLU(), *convolution(width, width, 3, stride), nn.ReLU(),
            *convolution(width, after, 1),
        )  # fmt: skip
        changes = stride != 1 or before != after
        self.shortcut = nn.Sequential(*convolution(before, after, 1, stride)) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.convs(x) + self.shortcut(x))


def convolution(before: int, after: int, size: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(before, after, size, stride, padding=size // 2, bias=False), nn.BatchNorm2d(after)]


def resnet50(counts: tuple[int, ...] = (3, 4, 6, 3)) -> nn.Module:
    """25.6 million weights, images of 224 x 224; with fewer blocks in its stages, a smaller network."""
    blocks, before = [], 64
    for stage, count in enumerate(counts):
        for number in range(count):
            blocks.append(Bottleneck(before, 64 << stage, 2 if stage and not number else 1))
            before = 256 << stage
    return nn.Sequential(
        *convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1), *blocks, nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(before, 1000),
    )  # fmt: skip


class ConvNeXtBlock(nn.Module):
    """A depthwise convolution and a feed-forward net over the channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width, eps=1e-6)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.scale = nn.Parameter(torch.full((width,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.scale * self.feed_forward(self.norm(self.depthwise(x).permute(0, 2, 3, 1)))
        return x + y.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """The first stage of ConvNeXt-T, images of 224 x 224."""

    def __init__(self, width: int = 96, depth: int = 2) -> None:
        super().__init__()
        self.patches, self.first = nn.Conv2d(3, width, 4, 4), nn.LayerNorm(width, eps=1e-6)
        self.blocks = nn.Sequential(*[ConvNeXtBlock(width) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.patches(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.head(self.norm(self.blocks(x).mean((2, 3))))


class Block(nn.Module):
    """Attention and a feed-forward net. GPT-2 and ViT have the norms before them, BERT after the shortcut."""

    def __init__(
        self,
        width: int,
        heads: int,
        dropout: float,
        causal: bool = False,
        norms_last: bool = False,
        approximate: str = "none",
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)
        self.heads, self.causal, self.norms_last = heads, causal, norms_last

    def attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        rate = self.dropout.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=rate, is_causal=self.causal)
        return self.dropout(self.out(y.transpose(1, 2).flatten(2)))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.norms_last:
            x = self.norm1(x + self.attend(x, mask))
            return self.norm2(x + self.dropout(self.feed_forward(x)))
        x = x + self.attend(self.norm1(x), mask)
        return x + self.dropout(self.feed_forward(self.norm2(x)))


class GPT2(nn.Module):
    """Small: 124 million weights, 1,024 words."""

    def __init__(
        self,
        vocabulary: int = 50257,
        length: int = 1024,
        width: int = 768,
        depth: int = 12,
        dropout: float = 0.1,
        approximate: str = "none",
    ) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        blocks = [Block(width, width // 64, dropout, causal=True, approximate=approximate) for _ in range(depth)]
        self.blocks = nn.Sequential(*blocks)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.words.weight
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(self.dropout(self.words(x) + self.positions(positions)))))


class BERT(nn.Module):
    """Base: 109 million weights, with a head for two classes. Word 0 pads sentences."""

    def __init__(self, vocabulary: int = 30522, width: int = 768, depth: int = 12) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(vocabulary, width, padding_idx=0), nn.Embedding(512, width)
        self.blocks = nn.ModuleList(Block(width, width // 64, 0.1, norms_last=True) for _ in range(depth))
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.1)
        self.pooler, self.head = nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        mask = (input_ids != 0 if attention_mask is None else attention_mask.bool())[:, None, None]
        y = self.words(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        y = self.dropout(self.norm(y))
        for block in self.blocks:
            y = block(y, mask)
        return self.head(self.dropout(torch.tanh(self.pooler(y[:, 0]))))


class ViT(nn.Module):
    """S/16: 22 million weights, images of 224 x 224."""

    def __init__(self, width: int = 384, depth: int = 12, block: type[Block] = Block) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.token, self.positions = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.zeros(1, 197, width))
        self.blocks = nn.Sequential(*[block(width, width // 64, 0.0) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


class LlamaBlock(nn.Module):
    """Attention with one key head for four query heads, and a gated feed-forward net."""

    def __init__(self, width: int, heads: int, shared: int, bias: bool = False) -> None:
        super().__init__()
        size = width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width, 1e-6), nn.RMSNorm(width, 1e-6)
        self.query = nn.Linear(width, width, bias)
        self.key, self.value = (nn.Linear(width, shared * size, bias) for _ in range(2))
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)
        self.size = size

    def forward(self, x: Tensor, turns: tuple[Tensor, Tensor], mask: Tensor | None = None) -> Tensor:
        y = self.norm1(x)
        q, k, v = (
            project(y).unflatten(-1, (-1, self.size)).transpose(1, 2) for project in (self.query, self.key, self.value)
        )
        q, k = rotated(q, *turns), rotated(k, *turns)
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos.to(x.dtype) + torch.cat([-second, first], -1) * sin.to(x.dtype)


class Llama(nn.Module):
    """8 query heads on 2 key heads, and rotary positions."""

    def __init__(
        self,
        vocabulary: int = 8192,
        length: int = 1024,
        width: int = 512,
        depth: int = 8,
        shared: int = 2,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, width // 64, shared, bias) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(width, 1e-6), nn.Linear(width, vocabulary, bias=False)
        angles = torch.outer(torch.arange(length), 10000 ** (-torch.arange(0, 64, 2) / 64)).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.words(x)
        for block in self.blocks:
            y = block(y, (self.cos, self.sin))
        return self.head(self.norm(y))


def mlp() -> nn.Module:
    """5.8 million weights."""
    return nn.Sequential(nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))


class LSTM(nn.Module):
    """Two layers of 256 over 64 time steps of 128 numbers; the last state is classified."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(128, width, num_layers=2, batch_first=True), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class GRU(nn.Module):
    """Two layers of 256; the last state is classified."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(128, width, num_layers=2, batch_first=True), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x)[0][:, -1])


def of_words(logits: Tensor, words: Tensor) -> Tensor:
    """Cross-entropy of (batch, length, words) and (batch, length)."""
    return F.cross_entropy(logits.flatten(0, 1), words.flatten())


@dataclass(frozen=True)
class Training:
    """A training, with AdamW and accuracy.

    Attributes:
        make: Creates the network.
        shape: The shape of an input row.
        rows: The rows on each core.
        loss: tpufit's name of it, or a function.
        words: True if a row is words of a vocabulary, not numbers.
        slices: The TPUs for which it is compiled.
        metrics: As in `Model.compile`.
        precision: As in `Model.compile`.
        remat: As in `Model.compile`.
        peer: The name of the same network in `keras_networks.py`; empty if it isn't compared with peers.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    rows: int
    loss: str | Callable[[Tensor, Tensor], Tensor] = "cross_entropy"
    words: bool = False
    slices: tuple[str, ...] = ("v5e-8",)
    metrics: tuple[str, ...] = ("accuracy",)
    precision: str = "bf16"
    remat: bool | None = None
    peer: str = ""

    def batch(self, cores: int) -> tuple[Tensor, Tensor]:
        """Return a batch for a number of cores: no program depends on its values."""
        x = torch.zeros(self.rows * cores, *self.shape, dtype=torch.long if self.words else torch.float32)
        return x, torch.zeros(x.shape if self.loss is of_words else len(x), dtype=torch.long)


_ALL = ("v5e-8", "v3-8", "v6e-8")  # of 8 cores each
_gpt = partial(GPT2, vocabulary=8192, length=512, width=512, depth=4, dropout=0.0)
_text = partial(Training, loss=of_words, words=True)
TRAININGS = {
    "MLP 2 x 2048": Training(mlp, (784,), 128, peer="MLP"),
    "LSTM 2 x 256": Training(LSTM, (64, 128), 64, peer="LSTM"),
    "GPT 4 x 512": _text(_gpt, (512,), 8, slices=_ALL, peer="GPT"),
    "GPT 4 x 512 in float32": _text(_gpt, (512,), 8, precision="fp32", peer="GPT"),
    "ResNet-50": Training(resnet50, (3, 224, 224), 16, slices=_ALL, peer="ResNet-50"),
    "GPT-2 small": _text(GPT2, (1024,), 4),
    "GPT-2 small with remat": _text(GPT2, (1024,), 8, remat=True),
    "BERT base": Training(BERT, (128,), 32, words=True),
    "GPT-2 XL": _text(partial(GPT2, width=1600, depth=48), (1024,), 1),
    "ViT-S/16": Training(ViT, (3, 224, 224), 64, peer="ViT-S/16"),
    "Llama 8 x 512": _text(Llama, (1024,), 2, slices=_ALL, peer="Llama"),
    "Llama of 2 blocks": _text(partial(Llama, depth=2), (1024,), 2, slices=_ALL, peer="Llama of 2 blocks"),
    # Short enough to be compiled repeatedly.
    "ViT of 2 blocks": Training(partial(ViT, depth=2), (3, 224, 224), 64, peer="ViT of 2 blocks"),
    "BERT of 2 blocks": Training(partial(BERT, vocabulary=8192, width=512, depth=2), (128,), 32, words=True),
    "Llama of 512 words": _text(partial(Llama, length=512, depth=2), (512,), 4),
    "ResNet of 4 blocks": Training(partial(resnet50, (2, 2)), (3, 224, 224), 16),
    "ConvNeXt of 2 blocks": Training(ConvNeXt, (3, 224, 224), 16),
    "LSTM, 8 time steps": Training(LSTM, (8, 128), 64),
    "GRU, 8 time steps": Training(GRU, (8, 128), 64),
}
