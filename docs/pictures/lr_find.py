"""Draws the curve of a real `lr_find` on handwritten digits: `python docs/pictures/lr_find.py`."""

from __future__ import annotations

from functools import partial

import torch
from looks import save
from sklearn.datasets import load_digits
from torch import nn

import tpufit

tpufit.set_random_seed(0)
images, labels = load_digits(return_X_y=True)
net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
model = tpufit.Model(net)
model.compile(partial(torch.optim.SGD, lr=0.001, momentum=0.9), "cross_entropy")
curve = model.lr_find((images / 16).astype("float32"), labels, batch_size=8, cores=8)
save("lr-find-{}.png", lambda look: curve.plot().figure)
