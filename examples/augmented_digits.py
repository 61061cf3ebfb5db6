"""Few digits, augmented on the device inside the training step: moved, rotated, and mixed with each other.

    python examples/augmented_digits.py [--cores 8] [--epochs 40]

It trains on 200 of scikit-learn's digits, without and with augmentation, and compares both on the other 1597.
"""

import argparse

from sklearn.datasets import load_digits
from torch import nn

import tpufit
from tpufit.data.augment import MixUp, RandomAffine

parser = argparse.ArgumentParser()
parser.add_argument("--cores", default="8", help="auto, or a count")
parser.add_argument("--epochs", type=int, default=40)
args = parser.parse_args()

images, labels = load_digits(return_X_y=True)
images = (images / 16).astype("float32").reshape(-1, 1, 8, 8)
train, held_out = (images[:200], labels[:200]), (images[200:], labels[200:])


def accuracy_with(augment):
    """Train a new net, and return its accuracy on the held-out digits."""
    tpufit.set_random_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 10),
    )
    model = tpufit.Model(net)
    model.compile("adamw", "cross_entropy", metrics=["accuracy"])
    model.fit(*train, batch_size=5, epochs=args.epochs, verbose=0, cores=args.cores, device_transform=augment)
    return model.evaluate(*held_out, batch_size=64, verbose=0, return_dict=True)["accuracy"]


plain = accuracy_with(None)
print(f"as they are: {plain:.2%}")
augmented = accuracy_with(
    nn.Sequential(RandomAffine(12, translate=(0.1, 0.1), scale=(0.85, 1.15)), MixUp(10, alpha=0.2))
)
print(f"augmented:   {augmented:.2%}")
