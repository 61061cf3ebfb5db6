"""Pre-train a small GPT on one long file of tokens, then on single sentences packed into full rows.

    python examples/pretrain_gpt.py [--cores 8] [--characters 200000]

The texts are Python's own help; a token is a byte. `TokenFile` reads rows from a file that may be larger than the
memory. `PackedDataset` puts several short texts into each row, where no text attends to another, and reports how much
padding that saves. Losses are in nats per byte: blind guessing costs the logarithm of 256, which is 5.5.
"""

import argparse
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import tpufit
from tpufit.callbacks import LRScheduler
from tpufit.data import PackedDataset, TokenFile

LENGTH, WIDTH, HEADS, BLOCKS = 64, 64, 4, 2
BATCH = 8  # rows per core


class Block(nn.Module):
    """Attention to what the mask allows, and a feed-forward net, each after a norm and with a shortcut."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x, mask):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.norm2(x))


class GPT(nn.Module):
    """From tokens, shape (rows, length), to logits of the next tokens.

    The logits have the shape (rows, tokens, length), because PyTorch's cross entropy expects the classes second.
    """

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, input_ids, position_ids=None, attention_mask=None):
        if position_ids is None:  # one text per row
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.tokens(input_ids) + self.positions(position_ids)
        for block in self.blocks:
            x = block(x, attention_mask)
        return self.head(self.norm(x)).mT


parser = argparse.ArgumentParser()
parser.add_argument("--cores", type=int, default=8)
parser.add_argument("--characters", type=int, default=200_000, help="the number of characters to train on")
args = parser.parse_args()
tpufit.set_random_seed(0)

text = "\n".join(topics.values())[: args.characters]
file = Path("help.bin")
np.frombuffer(text.encode(), dtype="uint8").tofile(file)
rows = TokenFile(file, LENGTH, "uint8", shift=True)
print(rows)

model = tpufit.Model(GPT())
model.compile(partial(torch.optim.AdamW, lr=3e-3), "cross_entropy", precision="bf16", scale_lr=None)
model.fit(rows, batch_size=BATCH, epochs=2, cores=args.cores, callbacks=LRScheduler("cosine", warmup=0.05), verbose=2)

sentences = [line.strip() for line in text.splitlines() if line.strip().endswith(".")]
packed = PackedDataset([np.frombuffer(one.encode(), dtype="uint8") for one in sentences], LENGTH, shift=True)
print(packed)
model.learning_rate = 1e-3
model.fit(packed, batch_size=BATCH, epochs=3, cores=args.cores, verbose=2)
print(f"loss of the packed sentences: {model.evaluate(packed, batch_size=BATCH, verbose=0):.2f}")
