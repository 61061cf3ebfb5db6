"""Contrastive learning of two encoders, like CLIP: which lower half of a digit belongs to which upper half?

    python examples/contrastive.py [--cores 8] [--epochs 30]

Each upper half is compared with the lower halves of the global batch, on all cores: its own half is the positive, and
all others are negatives. Nothing has to be gathered, because a step computes on the global batch. Afterwards it prints
how often the right half is found among 100 new halves.
"""

import argparse

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import tpufit


def encoder():
    """Return a net from half an image of 8 x 8 pixels to a vector."""
    return nn.Sequential(nn.Flatten(), nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 32))


class Halves(nn.Module):
    """An encoder for each half, with vectors of length 1."""

    def __init__(self):
        super().__init__()
        self.upper = encoder()
        self.lower = encoder()
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, upper, lower):
        return F.normalize(self.upper(upper), dim=1), F.normalize(self.lower(lower), dim=1)


class Contrastive(tpufit.Model):
    """A model whose loss compares all rows of a batch with each other, and needs no targets."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        upper, lower = y_pred
        similar = self.module.log_scale.exp() * upper @ lower.T  # (global batch, global batch)
        own = torch.arange(len(similar), device=similar.device)
        return (F.cross_entropy(similar, own) + F.cross_entropy(similar.T, own)) / 2


parser = argparse.ArgumentParser()
parser.add_argument("--cores", default="8", help="auto, or a count")
parser.add_argument("--epochs", type=int, default=30)
args = parser.parse_args()

tpufit.set_random_seed(0)
images = (load_digits().images / 16).astype("float32")  # 1,797 of 8 x 8 pixels
upper, lower = images[:, :4], images[:, 4:]
train, test = slice(0, 1600), slice(1600, 1700)

model = Contrastive(Halves())
model.compile(lambda parameters: torch.optim.AdamW(parameters, 2e-3), scale_lr=None)
history = model.fit((upper[train], lower[train]), batch_size=25, epochs=args.epochs, verbose=2, cores=args.cores)

of_upper, of_lower = model.predict((upper[test], lower[test]), verbose=0)
order = (of_upper @ of_lower.T).argsort(1)[:, ::-1]  # the most similar lower half first
place = (order == np.arange(len(order))[:, None]).argmax(1)
print(
    f"of {len(order)} lower halves the right one is first in {(place == 0).mean():.0%}, in the first five in "
    f"{(place < 5).mean():.0%}"
)
