"""Small nets with the structure of well-known large nets, each with its data and its training.

No net has a bias without effect, e.g. before a batch norm or in an attention's keys: its gradient would be zero except
for rounding, and Adam would turn this into whole steps that differ between CPUs (`tests/test_goldens.py`).
"""

from __future__ import annotations

import copy
import math
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.utils.parametrizations import weight_norm

import tpufit

BATCH, STEPS = 16, 5
ROWS = BATCH * STEPS
CLASSES, WORDS, LENGTH, WIDTH = 4, 23, 4, 16

GENERATOR = np.random.default_rng(0)
IMAGES = GENERATOR.normal(size=(ROWS, 3, 8, 8)).astype("float32")
LABELS = GENERATOR.integers(0, CLASSES, ROWS)
PIXEL_LABELS = GENERATOR.integers(0, CLASSES, (ROWS, 8, 8))
VECTORS = GENERATOR.normal(size=(ROWS, 12)).astype("float32")
OTHER_VECTORS = GENERATOR.normal(size=(ROWS, 12)).astype("float32")
VALUES = GENERATOR.normal(size=(ROWS, 1)).astype("float32")
FLAGS = GENERATOR.integers(0, 2, (ROWS, 1)).astype("float32")
WAVES = GENERATOR.normal(size=(ROWS, 17)).astype("float32")
TEXT = GENERATOR.integers(1, WORDS, (ROWS, LENGTH + 1))
CARDINALITIES = (7, 11, 5, 13)
CATEGORIES = np.stack([GENERATOR.integers(0, n, ROWS) for n in CARDINALITIES], axis=1)
EDGES = GENERATOR.integers(0, 2, (ROWS, 6, 6)).astype("float32") + np.eye(6, dtype="float32")
ADJACENCY = EDGES / EDGES.sum(axis=2, keepdims=True)


@dataclass(frozen=True)
class Architecture:
    """A net and its training.

    Attributes:
        net: Creates the net, with random weights.
        data: `(x,)` or `(x, y)`, with 80 rows.
        optimizer: Creates an optimizer for the net.
        loss: The argument of `compile`; None if the model computes its own loss.
        metrics: The names of the metrics.
        model: The model's class.
        traces: The number of steps, out of 5, that run their Python; later steps are replayed.
        why_traced: The message of `fit` about a step that can't be replayed; then all 5 steps run their Python.
    """

    net: Callable[[], nn.Module]
    data: tuple[Any, ...]
    optimizer: Callable[[Any], optim.Optimizer]
    loss: Any = None
    metrics: Sequence[str] = ()
    model: type[tpufit.Model] = tpufit.Model
    traces: int = 2
    why_traced: str = ""


# Images


class BasicBlock(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.shortcut = nn.Identity()
        if stride != 1 or before != width:
            self.shortcut = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x):
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(h)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.stages = nn.Sequential(BasicBlock(8, 8, 1), BasicBlock(8, 16, 2))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x):
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of (batch, channels, height, width)."""

    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.expand, self.project = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 1e-6))
        self.drop = drop

    def forward(self, x):
        h = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        h = self.scale * self.project(F.gelu(self.expand(h)))
        if self.training:  # stochastic depth: the block is skipped for some rows
            h = h * (torch.rand(len(h), 1, 1, 1, device=h.device) >= self.drop) / (1 - self.drop)
        return x + h.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 2, 2),
            ChannelNorm(4, eps=1e-6),
            ConvNeXtBlock(4, 0.1),
            ChannelNorm(4, eps=1e-6),
            nn.Conv2d(4, 8, 2, 2),
            ConvNeXtBlock(8, 0.2),
        )
        self.norm, self.head = nn.LayerNorm(8, eps=1e-6), nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.head(self.norm(self.layers(x).mean((2, 3))))


class ConvNorm(nn.Sequential):
    def __init__(self, before: int, width: int) -> None:
        super().__init__(nn.Conv2d(before, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([ConvNorm(3, 4), ConvNorm(4, 8)])
        self.bottom = ConvNorm(8, 16)
        self.up = nn.ModuleList([nn.ConvTranspose2d(16, 8, 2, 2), nn.ConvTranspose2d(8, 4, 2, 2)])
        self.merge = nn.ModuleList([ConvNorm(16, 8), ConvNorm(8, 4)])
        self.head = nn.Conv2d(4, CLASSES, 1)

    def forward(self, x):
        skips = []
        for down in self.down:
            skips.append(down(x))
            x = F.max_pool2d(skips[-1], 2)
        x = self.bottom(x)
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], dim=1))
        return self.head(x)


class MixerBlock(nn.Module):
    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.over_patches = nn.Sequential(nn.Linear(patches, 8), nn.GELU(), nn.Linear(8, patches, bias=False))
        self.over_channels = nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))

    def forward(self, x):
        x = x + self.over_patches(self.norm1(x).mT).mT
        return x + self.over_channels(self.norm2(x))


class Patches(nn.Module):
    """From (batch, 3, 8, 8) to (batch, 16, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 2, 2)

    def forward(self, x):
        return self.conv(x).flatten(2).mT


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Patches(WIDTH), MixerBlock(16, WIDTH), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.head(self.layers(x).mean(1))


# Attention


class Attention(nn.Module):
    def __init__(self, heads: int, dropout: float, causal: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.heads, self.dropout, self.causal = heads, dropout, causal

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        h = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=self.causal)
        return self.out(h.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a feed-forward net, each after a norm and beside a shortcut."""

    def __init__(self, dropout: float, causal: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.dropout = Attention(2, dropout, causal), nn.Dropout(dropout)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.feed_forward(self.norm2(x)))


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = Patches(WIDTH)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, 17, WIDTH) * 0.02)
        self.dropout = nn.Dropout(0.1)
        self.block = Block(0.1, causal=False)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), -1, -1), self.patches(x)], dim=1)
        return self.head(self.norm(self.block(self.dropout(x + self.positions)))[:, 0])


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.block = Block(0.1, causal=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.wte(tokens) + self.wpe(positions))
        return self.lm_head(self.norm(self.block(x)))


def matrices_decay(net: nn.Module) -> optim.Optimizer:
    """AdamW as GPTs are trained: biases and norms don't decay."""
    matrices = [p for p in net.parameters() if p.dim() > 1]
    others = [p for p in net.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return optim.AdamW(groups, 1e-3, betas=(0.9, 0.95))


def of_tokens(logits, tokens):
    """Cross-entropy of (batch, length, words) and (batch, length)."""
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Rotary(nn.Module):
    """Rotary positions. The tables are built for the longest row so far, and kept."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.length = width, 0

    def forward(self, x):
        if x.shape[-2] > self.length:
            self.length = x.shape[-2]
            rates = 10000.0 ** (-torch.arange(0, self.width, 2, device=x.device) / self.width)
            angles = torch.outer(torch.arange(self.length, device=x.device), rates).repeat(1, 2)
            self.register_buffer("cos", angles.cos(), persistent=False)
            self.register_buffer("sin", angles.sin(), persistent=False)
        left, right = x.chunk(2, dim=-1)
        return x * self.cos[: x.shape[-2]] + torch.cat([-right, left], dim=-1) * self.sin[: x.shape[-2]]


class LlamaBlock(nn.Module):
    """Four heads that share the keys and values of two, and a gated feed-forward net."""

    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH, eps=1e-5), nn.RMSNorm(WIDTH, eps=1e-5)
        self.q, self.out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = nn.Linear(WIDTH, WIDTH // 2, bias=False), nn.Linear(WIDTH, WIDTH // 2, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, 40, bias=False), nn.Linear(WIDTH, 40, bias=False)
        self.down = nn.Linear(40, WIDTH, bias=False)
        self.rotary = rotary

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = (proj(h).unflatten(-1, (-1, WIDTH // 4)).transpose(1, 2) for proj in (self.q, self.k, self.v))
        k, v = (shared.repeat_interleave(2, dim=1) for shared in (self.rotary(k), v))
        h = F.scaled_dot_product_attention(self.rotary(q), k, v, is_causal=True)
        x = x + self.out(h.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def llama() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(WORDS, WIDTH),
        LlamaBlock(Rotary(WIDTH // 4)),
        nn.RMSNorm(WIDTH, eps=1e-5),
        nn.Linear(WIDTH, WORDS, bias=False),
    )


class Translator(nn.Module):
    """PyTorch's encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # PyTorch warns that without biases it doesn't use a fast path of evaluations
            self.transformer = nn.Transformer(WIDTH, 2, 1, 1, 32, dropout=0.1, batch_first=True, bias=False)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, source, target):
        source, target = self.embed(source) + self.positions, self.embed(target) + self.positions
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=target.device)
        # Without is_causal, nn.Transformer would read the mask's values to detect a causal mask.
        return self.head(self.transformer(source, target, tgt_mask=mask, tgt_is_causal=True))


class Experts(nn.Module):
    """Feed-forward nets; each token uses the two with the highest gates. All are computed, and masked."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, count, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(count)
        )

    def forward(self, x):
        likes = self.gate(x).softmax(-1)
        top, chosen = likes.topk(2, dim=-1)
        shares = torch.zeros_like(likes).scatter(-1, chosen, top / top.sum(-1, keepdim=True))
        y = sum(shares[..., i, None] * expert(x) for i, expert in enumerate(self.experts))
        used = (shares > 0).float().mean((0, 1))
        return y, len(self.experts) * (used * likes.mean((0, 1))).sum()


class MixtureOfExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention = nn.Embedding(WORDS, WIDTH), Attention(2, 0.0, causal=False)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.experts, self.head = Experts(3), nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.attention(self.norm1(x))
        h, imbalance = self.experts(self.norm2(x))
        return self.head((x + h).mean(1)), imbalance


class Balanced(tpufit.Model):
    """Adds a penalty on unequal use of the experts to the loss."""

    def compute_loss(self, x, y, y_pred, sample_weight=None):
        logits, imbalance = y_pred
        return super().compute_loss(x, y, logits, sample_weight) + 0.01 * imbalance

    def update_metrics(self, x, y, y_pred, sample_weight=None):
        super().update_metrics(x, y, y_pred[0], sample_weight)


# Sequences


class Recurrent(nn.Module):
    """Classifies tokens by the mean output of a recurrent net."""

    def __init__(self, make: Callable[..., nn.Module], width: int, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.cells = make(WIDTH, 12, batch_first=True, **options)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens):
        y, _ = self.cells(self.embed(tokens))
        return self.head(y.mean(1))


class CausalBlock(nn.Module):
    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.conv = weight_norm(nn.Conv1d(width, 2 * width, 2, dilation=dilation))
        self.out, self.skip = nn.Conv1d(width, width, 1), nn.Conv1d(width, width, 1)
        self.dilation = dilation

    def forward(self, x):
        signal, gate = self.conv(F.pad(x, (self.dilation, 0))).chunk(2, dim=1)
        h = signal.tanh() * gate.sigmoid()
        return x + self.out(h), self.skip(h)


class WaveNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv1d(1, 8, 1), nn.Conv1d(8, 1, 1)
        self.blocks = nn.ModuleList(CausalBlock(8, dilation) for dilation in (1, 2))

    def forward(self, x):
        h, total = self.stem(x[:, None]), 0
        for block in self.blocks:
            h, skip = block(h)
            total = total + skip
        return self.head(F.relu(total + h))[:, 0]


# Tables, sets and graphs


class BagOfWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.EmbeddingBag(WORDS, WIDTH, mode="mean"), nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens):
        return self.head(self.embed(tokens))


class DeepFM(nn.Module):
    """A factorization machine and a deep net with shared embeddings of categories."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offsets", torch.tensor([0, *np.cumsum(CARDINALITIES)[:-1]]))
        self.weights, self.factors = nn.Embedding(sum(CARDINALITIES), 1), nn.Embedding(sum(CARDINALITIES), 6)
        self.bias = nn.Parameter(torch.zeros(1))
        self.deep = nn.Sequential(nn.Linear(6 * len(CARDINALITIES), 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))

    def forward(self, categories):
        rows = categories + self.offsets
        factors = self.factors(rows)
        pairs = (factors.sum(1).square() - factors.square().sum(1)).sum(1, keepdim=True) / 2
        return self.bias + self.weights(rows).sum(1) + pairs + self.deep(factors.flatten(1))


class TwoTowers(nn.Module):
    """Embeds two views so that the views of the same row are close."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2)
        )
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, left, right):
        left, right = (F.normalize(tower(x), dim=-1) for tower, x in zip(self.towers, (left, right), strict=True))
        return self.log_scale.clamp(max=math.log(100)).exp() * left @ right.mT


class Contrastive(tpufit.Model):
    """A loss whose classes are the rows of the batch: each row's class is its partner."""

    def compute_loss(self, x, y, y_pred, sample_weight=None):
        own = torch.arange(len(y_pred), device=y_pred.device)
        return (F.cross_entropy(y_pred, own) + F.cross_entropy(y_pred.mT, own)) / 2


class GraphConvolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 16), nn.Linear(16, 16)])
        self.dropout, self.head = nn.Dropout(0.2), nn.Linear(16, CLASSES)

    def forward(self, nodes, adjacency):
        for layer in self.layers:
            nodes = self.dropout(F.relu(adjacency @ layer(nodes)))
        return self.head(nodes.mean(1))


class TwoHeads(nn.Module):
    """From an image and some numbers to a class and a value."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(72, 16)
        )
        self.numbers = nn.Sequential(nn.Linear(12, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU())
        self.label, self.value = nn.Linear(32, CLASSES), nn.Linear(32, 1)

    def forward(self, image, numbers):
        h = torch.cat([self.image(image), self.numbers(numbers)], dim=1)
        return {"label": self.label(h), "value": self.value(h)}


class TwoLosses(tpufit.Model):
    def compute_loss(self, x, y, y_pred, sample_weight=None):
        return F.cross_entropy(y_pred["label"], y["label"]) + 0.5 * F.mse_loss(y_pred["value"], y["value"])

    def update_metrics(self, x, y, y_pred, sample_weight=None):
        super().update_metrics(x, y["label"], y_pred["label"], sample_weight)


# Generative nets, with custom steps


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 8, 3, 2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(128, 2 * 4))
        self.decoder = nn.Sequential(
            nn.Linear(4, 128), nn.ReLU(), nn.Unflatten(1, (8, 4, 4)), nn.ConvTranspose2d(8, 3, 4, 2, padding=1)
        )

    def forward(self, x):
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        code = mean + (log_variance / 2).exp() * torch.randn_like(mean)
        return self.decoder(code), mean, log_variance


class Variational(tpufit.Model):
    def compute_loss(self, x, y, y_pred, sample_weight=None):
        decoded, mean, log_variance = y_pred
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean() / 2
        return (decoded - x).square().sum((1, 2, 3)).mean() + divergence


class DCGAN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(6, 8, 4, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.ConvTranspose2d(8, 3, 4, 2, padding=1),
            nn.Tanh(),
        )
        self.discriminator = nn.Sequential(
            nn.Conv2d(3, 8, 4, 2, padding=1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(8, 16, 4, 2, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
            nn.Linear(64, 1),
        )


class Adversarial(tpufit.Model):
    """Two optimizers: the generator's is that of `compile`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.critics_optimizer = optim.Adam(module.discriminator.parameters(), 2e-4, betas=(0.5, 0.999))

    def train_step(self, batch):
        (real,) = batch
        judge = self.module.discriminator
        fake = self.module.generator(torch.randn(len(real), 6, 1, 1, device=real.device))
        on_real, on_fake = judge(real), judge(fake.detach())
        critics_loss = (
            F.binary_cross_entropy_with_logits(on_real, torch.ones_like(on_real))
            + F.binary_cross_entropy_with_logits(on_fake, torch.zeros_like(on_fake))
        ) / 2
        self.apply_gradients(critics_loss, self.critics_optimizer)
        fooled = judge(fake)
        loss = F.binary_cross_entropy_with_logits(fooled, torch.ones_like(fooled))
        self.apply_gradients(loss)
        return {"loss": loss, "critics_loss": critics_loss}


class WGAN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 12))
        self.critic = nn.Sequential(nn.Linear(12, 16), nn.LeakyReLU(0.2), nn.LayerNorm(16), nn.Linear(16, 1))


class Wasserstein(tpufit.Model):
    """The critic takes two steps for each step of the generator, with a penalty on its gradient's norm."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.critics_optimizer = optim.RMSprop(module.critic.parameters(), 1e-3)

    def train_step(self, batch):
        (real,) = batch
        critic = self.module.critic
        for _ in range(2):
            fake = self._fake(real).detach()
            share = torch.rand(len(real), 1, device=real.device)
            between = (share * real + (1 - share) * fake).requires_grad_()
            (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
            penalty = (slope.norm(dim=1) - 1).square().mean()
            critics_loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
            self.apply_gradients(critics_loss, self.critics_optimizer)
        loss = -critic(self._fake(real)).mean()
        self.apply_gradients(loss)
        return {"loss": loss, "critics_loss": critics_loss, "penalty": penalty}

    def _fake(self, real):
        return self.module.generator(torch.randn(len(real), 4, device=real.device))


class Denoiser(nn.Module):
    """Predicts the noise in an image with a known noise level."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.cumprod(1 - torch.linspace(1e-3, 0.2, 20), dim=0))
        self.register_buffer("rates", 1000.0 ** (-torch.arange(4) / 4), persistent=False)
        self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8))
        self.stem, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
        self.norm1, self.norm2 = nn.GroupNorm(4, 8), nn.GroupNorm(4, 8)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x, t):
        angles = t[:, None] * self.rates
        when = self.time(torch.cat([angles.sin(), angles.cos()], dim=1))[:, :, None, None]
        h = self.stem(x)
        h = h + self.conv(F.silu(self.norm1(h)) + when)
        return self.head(F.silu(self.norm2(h)))


class Diffusion(tpufit.Model):
    def train_step(self, batch):
        (x,) = batch
        t = torch.randint(0, len(self.module.kept), (len(x),), device=x.device)
        noise = torch.randn_like(x)
        kept = self.module.kept[t][:, None, None, None]
        loss = F.mse_loss(self((kept.sqrt() * x + (1 - kept).sqrt() * noise, t)), noise)
        self.apply_gradients(loss)
        return {"loss": loss}


def _projector(inputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8, bias=False))


class Twins(nn.Module):
    """A net, and a slow copy of it that no optimizer changes."""

    def __init__(self) -> None:
        super().__init__()
        self.fast, self.predictor = _projector(12), _projector(8)
        self.slow = copy.deepcopy(self.fast).requires_grad_(False)


class Bootstrap(tpufit.Model):
    """BYOL: one view predicts the slow copy's output for another view; the copy is a moving average."""

    def train_step(self, batch):
        (x,) = batch
        net = self.module
        one, other = (x + 0.1 * torch.randn_like(x) for _ in range(2))
        loss = 2 - 2 * F.cosine_similarity(net.predictor(net.fast(one)), net.slow(other)).mean()
        self.apply_gradients(loss)
        with torch.no_grad():
            for slow, fast in zip(net.slow.parameters(), net.fast.parameters(), strict=True):
                slow.lerp_(fast, 0.05)
        return {"loss": loss}


class ActNorm(nn.Module):
    """Initializes itself with the statistics of its first batch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mean, self.log_scale = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(width))
        self.is_ready = False

    def forward(self, x):
        if not self.is_ready:
            with torch.no_grad():
                self.mean.copy_(x.mean(0))
                self.log_scale.copy_(-x.std(0).log())
            self.is_ready = True
        return (x - self.mean) * self.log_scale.exp(), self.log_scale.sum()


class Coupling(nn.Module):
    """Scales and shifts one half of the features by a net's output for the other half."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = ActNorm(width)
        self.net = nn.Sequential(nn.Linear(width // 2, 16), nn.ReLU(), nn.Linear(16, width))

    def forward(self, x):
        x, log_volume = self.norm(x)
        left, right = x.chunk(2, dim=1)
        log_scale, shift = self.net(left).chunk(2, dim=1)
        log_scale = log_scale.tanh()
        return torch.cat([right * log_scale.exp() + shift, left], dim=1), log_volume + log_scale.sum(1)


class Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Coupling(12), Coupling(12)])

    def forward(self, x):
        total = 0
        for layer in self.layers:
            x, log_volume = layer(x)
            total = total + log_volume
        return x, total


class Likelihood(tpufit.Model):
    def compute_loss(self, x, y, y_pred, sample_weight=None):
        z, log_volume = y_pred
        return (z.square().sum(1) / 2 - log_volume).mean()


# Python that can't be replayed


class Alternating(nn.Module):
    """Uses its second layer in every other step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, CLASSES)
        self.steps = 0

    def forward(self, x):
        self.steps += 1
        h = F.relu(self.first(x))
        if self.steps % 2:
            h = h + F.relu(self.second(h))
        return self.head(h)


class TeacherForced(nn.Module):
    """Repeats its input. During training, the next input is the true word or its own prediction, at random."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.encoder, self.decoder = nn.RNN(WIDTH, WIDTH, batch_first=True), nn.GRUCell(WIDTH, WIDTH)

    def forward(self, tokens):
        _, (h,) = self.encoder(self.embed(tokens))
        word, logits = torch.zeros_like(tokens[:, 0]), []
        is_forced = self.training and random.random() < 0.5
        for i in range(LENGTH):
            h = self.decoder(self.embed(word), h)
            logits.append(self.head(h))
            word = tokens[:, i] if is_forced else logits[-1].argmax(1)
        return torch.stack(logits, dim=1)


def of_all(make: Callable[..., optim.Optimizer], **options: Any) -> Callable[[nn.Module], optim.Optimizer]:
    return lambda net: make(net.parameters(), **options)


_images, _text = (IMAGES, LABELS), (TEXT[:, 1:], LABELS)
_next_words = (TEXT[:, :-1], TEXT[:, 1:])
_classes = {"loss": "cross_entropy", "metrics": ["accuracy"]}

ARCHITECTURES = {
    "ResNet": Architecture(
        ResNet, _images, of_all(optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4), **_classes
    ),
    "ConvNeXt": Architecture(ConvNeXt, _images, of_all(optim.AdamW, lr=1e-3, weight_decay=0.05), **_classes),
    "ViT": Architecture(ViT, _images, of_all(optim.AdamW, lr=1e-3), nn.CrossEntropyLoss(label_smoothing=0.1)),
    "MLP-Mixer": Architecture(Mixer, _images, of_all(optim.Adam, lr=1e-3), **_classes),
    "U-Net": Architecture(UNet, (IMAGES, PIXEL_LABELS), of_all(optim.Adam, lr=1e-3), **_classes),
    "LSTM": Architecture(
        partial(Recurrent, nn.LSTM, 24, bidirectional=True), _text, of_all(optim.RMSprop, lr=1e-3), **_classes
    ),
    "GRU": Architecture(
        lambda: Recurrent(nn.GRU, 12, num_layers=2, dropout=0.2), _text, of_all(optim.Adam, lr=1e-3), **_classes
    ),
    "WaveNet": Architecture(
        WaveNet,
        (WAVES[:, :-1], WAVES[:, 1:]),
        of_all(optim.NAdam, lr=1e-3),
        "mse",
    ),
    "encoder-decoder": Architecture(
        Translator,
        ((TEXT[:, 1:], TEXT[:, :-1]), TEXT[:, 1:]),
        of_all(optim.Adam, lr=1e-3, betas=(0.9, 0.98)),
        of_tokens,
    ),
    "GPT": Architecture(GPT, _next_words, matrices_decay, of_tokens),
    # The tables are built in the first trace, and are constants from the second trace on.
    "Llama": Architecture(llama, _next_words, of_all(optim.AdamW, lr=1e-3), of_tokens, traces=3),
    "mixture of experts": Architecture(
        MixtureOfExperts, _text, of_all(optim.AdamW, lr=1e-3), **_classes, model=Balanced
    ),
    "bag of words": Architecture(
        BagOfWords,
        _text,
        of_all(optim.Adagrad, lr=0.05),
        **_classes,
        traces=5,
        why_traced="it reads a value from the device: torch_xla runs aten::_embedding_bag and .* on the host",
    ),
    "DeepFM": Architecture(DeepFM, (CATEGORIES, FLAGS), of_all(optim.Adam, lr=1e-3), "bce_with_logits", ["accuracy"]),
    "two towers": Architecture(TwoTowers, ((VECTORS, OTHER_VECTORS),), of_all(optim.AdamW, lr=1e-3), model=Contrastive),
    "graph convolution": Architecture(
        GraphConvolution, ((VECTORS.reshape(ROWS, 6, 2), ADJACENCY), LABELS), of_all(optim.Adamax, lr=1e-3), **_classes
    ),
    "two inputs, two outputs": Architecture(
        TwoHeads,
        ({"image": IMAGES, "numbers": VECTORS}, {"label": LABELS, "value": VALUES}),
        of_all(optim.Adam, lr=1e-3),
        metrics=["accuracy"],
        model=TwoLosses,
    ),
    "VAE": Architecture(VAE, (IMAGES,), of_all(optim.Adam, lr=1e-3), model=Variational),
    "GAN": Architecture(
        DCGAN,
        (IMAGES,),
        lambda net: optim.Adam(net.generator.parameters(), 2e-4, betas=(0.5, 0.999)),
        model=Adversarial,
    ),
    "WGAN with gradient penalty": Architecture(
        WGAN, (VECTORS,), lambda net: optim.RMSprop(net.generator.parameters(), 1e-3), model=Wasserstein
    ),
    "normalizing flow": Architecture(Flow, (VECTORS,), of_all(optim.Adam, lr=1e-3), model=Likelihood, traces=3),
    "diffusion": Architecture(Denoiser, (IMAGES,), of_all(optim.AdamW, lr=1e-3), model=Diffusion),
    "BYOL": Architecture(
        Twins,
        (VECTORS,),
        lambda net: optim.SGD([*net.fast.parameters(), *net.predictor.parameters()], 0.05, momentum=0.9),
        model=Bootstrap,
    ),
    "control flow on the step count": Architecture(
        Alternating,
        (VECTORS, LABELS),
        of_all(optim.SGD, lr=0.05, momentum=0.9),
        **_classes,
        traces=5,
        why_traced=r"its Python changes Alternating\.steps \(from \d to \d\)",
    ),
    "teacher forcing": Architecture(
        TeacherForced,
        (TEXT[:, 1:], TEXT[:, 1:]),
        of_all(optim.Adam, lr=1e-3),
        of_tokens,
        traces=5,
        why_traced=r"its Python draws random numbers at architectures\.py:\d+",
    ),
}
