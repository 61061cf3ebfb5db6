"""Find a learning rate, and train with one cycle of it: scikit-learn's handwritten digits, on 8 cores.

    python examples/one_cycle.py [--cores 8] [--epochs 5] [--run-dir runs/one_cycle]

It prints how the loss falls as the rate grows (also drawn in lr_find.png in the run directory), and then the accuracy
on held-out digits after the same number of epochs of SGD: at the compiled rate, and with one cycle up to the suggested
rate. Without a TPU, the cores are virtual cores of the CPU.
"""

import argparse
from functools import partial
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import tpufit
from tpufit.callbacks import OneCycle

parser = argparse.ArgumentParser()
parser.add_argument("--cores", default="8", help="auto, or a count")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--run-dir", type=Path, default=Path("runs/one_cycle"))
args = parser.parse_args()

images, labels = load_digits(return_X_y=True)  # 1,797 images of 8 x 8, values 0 to 16
images = (images / 16).astype("float32").reshape(-1, 1, 8, 8)
x, x_test, y, y_test = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)


def build():
    """Return the same new network each time."""
    tpufit.set_random_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 10),
    )
    model = tpufit.Model(net)
    model.compile(partial(torch.optim.SGD, lr=0.001, momentum=0.9), "cross_entropy", metrics=["accuracy"])
    return model


def accuracy(model, callbacks=()):
    """Train, and return the accuracy on held-out digits."""
    model.fit(x, y, batch_size=8, epochs=args.epochs, cores=args.cores, callbacks=list(callbacks))
    return model.evaluate(x_test, y_test, verbose=0)[1]


without = accuracy(build())

model = build()
curve = model.lr_find(x, y, batch_size=8, cores=args.cores)  # doesn't change the model
for rate, loss in list(zip(curve.lrs, curve.smoothed, strict=True))[::10]:
    print(f"learning rate {rate:8.2g}: loss {loss:.3f}")
print(f"suggested learning rate: {curve.suggestion:.2g}")
args.run_dir.mkdir(parents=True, exist_ok=True)
curve.plot().figure.savefig(args.run_dir / "lr_find.png")

print("\nOne cycle")
with_cycle = accuracy(model, [OneCycle(max_lr=curve.suggestion)])
print(f"\nheld-out digits at one rate: {without:.2%}")
print(f"held-out digits with one cycle: {with_cycle:.2%}")
