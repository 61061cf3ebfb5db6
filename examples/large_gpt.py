"""Train a small GPT whose weights are split over the cores, or ask whether a large one fits a TPU.

    python examples/large_gpt.py [--cores 8]
    python examples/large_gpt.py --size xl --preflight v5e-8

It learns the texts of Python's own help. The first line of `fit` reports each core's share of the training state, which
is then saved tensor by tensor, and read back whole. With `--preflight`, nothing is trained: the TPU's own compiler
reports whether the step fits (for a GPT-2 XL, in ten minutes; without `shard="fsdp"` it doesn't fit).
"""

import argparse
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional as F

import tpufit

SIZES = {  # width, blocks, words of context, words of the vocabulary
    "small": (128, 4, 64, 256),
    "gpt2": (768, 12, 1024, 50257),
    "large": (1280, 36, 1024, 50257),
    "xl": (1600, 48, 1024, 50257),
}


class Block(nn.Module):
    """Attention to earlier words, and a feed-forward net, each after a norm and with a shortcut."""

    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, x.shape[-1] // 64, 64)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.norm2(x))


class GPT(nn.Module):
    """From words, shape (batch, length), to logits of the next words, (batch, length, vocabulary)."""

    def __init__(self, width, blocks, length, vocabulary):
        super().__init__()
        self.words, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for embedding in (self.words, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        self.head.weight = self.words.weight

    def forward(self, words):
        x = self.words(words) + self.positions(torch.arange(words.shape[1], device=words.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_word_loss(logits, following):
    """Return the mean over all positions."""
    return F.cross_entropy(logits.flatten(0, 1), following.flatten())


parser = argparse.ArgumentParser()
parser.add_argument("--size", choices=SIZES, default="small")
parser.add_argument("--cores", type=int, default=8)
parser.add_argument("--rows", type=int, default=1, help="texts per core")
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--preflight", metavar="TPU", help="such as v5e-8")
args = parser.parse_args()

tpufit.set_random_seed(0)
width, blocks, length, vocabulary = SIZES[args.size]
with torch.device("meta" if args.preflight else "cpu"):  # a preflight needs no values
    net = GPT(width, blocks, length, vocabulary)
model = tpufit.Model(net)
# Each core stores an eighth of the large weights and of their optimizer state, and gathers a block's weights when they
# are needed. Of a block's activations it stores only the input.
model.compile("adamw", next_word_loss, precision="bf16", scale_lr=None, shard="fsdp", remat=True)

if args.preflight:
    words = torch.zeros(64 * args.rows, length, dtype=torch.long)
    print(model.preflight(words, words, batch_size=args.rows, tpu=args.preflight))
else:
    text = torch.tensor(list("\n".join(topics.values()).encode()))  # 256 words: the bytes
    rows = len(text) // (length + 1) // (8 * args.cores) * (8 * args.cores) // 4
    texts = text[: rows * (length + 1)].view(rows, length + 1)
    model.fit(texts[:, :-1], texts[:, 1:], batch_size=8 * args.rows, epochs=args.epochs, cores=args.cores)
    model.save("runs/large_gpt")

    whole = tpufit.load("runs/large_gpt", GPT(width, blocks, length, vocabulary), compile=False)
    same = all(torch.equal(value, whole.state_dict()[name]) for name, value in model.state_dict().items())
    print(f"saved {whole.count_params():,} parameters, read back on the host: {'the same' if same else 'different'}")
