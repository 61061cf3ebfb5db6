"""Train a small GPT on the texts of Python's own help, character by character, in bfloat16 and with one cycle.

    python examples/char_gpt.py [--cores 8] [--epochs 2]

It prints the falling loss of the next character, in nats (blind guessing costs the logarithm of the number of
characters), and then some generated text. The embedding and the head share one tensor, also on the device.
"""

import argparse
import math
from functools import partial
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional as F

import tpufit
from tpufit.callbacks import OneCycle

CONTEXT = 32  # characters that the network sees at once
WIDTH, HEADS, BLOCKS = 64, 4, 2
BATCH = 8  # texts per core


class Block(nn.Module):
    """Attention to earlier characters, and a feed-forward net, each after a norm and with a shortcut."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.norm2(x))


class GPT(nn.Module):
    """From characters, shape (batch, length), to logits of the next characters, (batch, length, characters).

    Args:
        characters: The number of different characters.
    """

    def __init__(self, characters):
        super().__init__()
        self.characters, self.positions = nn.Embedding(characters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, characters, bias=False)
        for embedding in (self.characters, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        self.head.weight = self.characters.weight

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.characters(tokens) + self.positions(positions)
        return self.head(self.norm(self.blocks(x)))


def next_character_loss(logits, following):
    """Return the mean over all positions."""
    return F.cross_entropy(logits.flatten(0, 1), following.flatten())


def sample(net, start, length, temperature=0.7):
    """Continue a text with the network, in plain PyTorch on the host.

    Args:
        net: The network.
        start: The text to continue, as numbers.
        length: The number of characters to add.
        temperature: Below 1, likely characters are chosen more often.
    """
    tokens = list(start)
    with torch.no_grad():
        for _ in range(length):
            logits = net(torch.tensor([tokens[-CONTEXT:]]))[0, -1]
            tokens.append(int(torch.multinomial((logits / temperature).softmax(0), 1)))
    return tokens


parser = argparse.ArgumentParser()
parser.add_argument("--cores", type=int, default=8)
parser.add_argument("--epochs", type=int, default=2)
args = parser.parse_args()

tpufit.set_random_seed(0)
lines = "\n".join(topics.values()).splitlines()
text = "\n".join(line for line in lines if not line.strip().startswith(("|", "+", "*")))  # without tables
characters = sorted(set(text))
numbers = {character: i for i, character in enumerate(characters)}
tokens = torch.tensor([numbers[character] for character in text])

# Only whole batches: a short last batch has another shape, and another graph to compile.
rows = len(tokens) // (CONTEXT + 1)
rows -= rows % (BATCH * args.cores)
texts = tokens[: rows * (CONTEXT + 1)].view(rows, CONTEXT + 1)
x, y = texts[:, :-1], texts[:, 1:]
blind = math.log(len(characters))
print(f"{len(text):,} characters, {len(characters)} different ones; blindly guessed: loss {blind:.2f}")

net = GPT(len(characters))
model = tpufit.Model(net)
model.compile(partial(torch.optim.AdamW, betas=(0.9, 0.99)), next_character_loss, precision="bf16")
model.fit(
    x,
    y,
    batch_size=BATCH,
    epochs=args.epochs,
    cores=args.cores,
    callbacks=OneCycle(max_lr=1e-2, cycle_momentum=False),
)
model.to_cpu()
written = sample(net, [numbers[character] for character in "The "], 400)
print("".join(characters[token] for token in written))
