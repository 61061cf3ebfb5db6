"""Train on a folder of JPEGs twice: decoding them in every epoch, and decoding them once, into a cache.

    python examples/cached_images.py [--count 4096] [--epochs 4] [--workers 0] [--cores 8]

The JPEGs are created first: crops of the sample pictures of scikit-learn (and of matplotlib, if it is installed),
darker or brighter; a class is a quarter of a picture. They and the cache remain in runs/cached_images. The network is
deliberately small, so that an epoch waits for its input. Without a TPU, the cores are virtual cores of the CPU.
"""

import argparse
import importlib.util
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageEnhance
from sklearn.datasets import load_sample_image
from torch import nn
from torch.utils.data import DataLoader

import tpufit
from tpufit.callbacks import Callback

SIZE = 64  # pixels of the network's images


def sample_pictures():
    """Return the pictures by name."""
    pictures = {name: Image.fromarray(load_sample_image(f"{name}.jpg")) for name in ("china", "flower")}
    if importlib.util.find_spec("matplotlib"):
        from matplotlib.cbook import get_sample_data

        pictures["portrait"] = Image.open(get_sample_data("grace_hopper.jpg", asfileobj=False)).convert("RGB")
    return pictures


def make_photos(folder, count, side=256):
    """Write JPEGs into class folders, always the same; an existing folder is kept.

    Args:
        folder: The folder of the class folders.
        count: The number of JPEGs.
        side: Their height and width in pixels.
    """
    if folder.is_dir():
        return
    quarters = {}
    for name, picture in sample_pictures().items():
        width, height = picture.width // 2, picture.height // 2
        for i, (left, top) in enumerate([(0, 0), (width, 0), (0, height), (width, height)]):
            quarters[f"{name}-{i}"] = picture.crop((left, top, left + width, top + height))
    draft = folder.with_name(f"{folder.name}.draft")
    for name in quarters:
        (draft / name).mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    for i in range(count):
        name = list(quarters)[i % len(quarters)]
        quarter = quarters[name]
        edge = random.uniform(0.6, 0.9) * min(quarter.size)
        left, top = (random.uniform(0, length - edge) for length in quarter.size)
        photo = quarter.resize((side, side), box=(left, top, left + edge, top + edge))
        photo = ImageEnhance.Brightness(photo).enhance(random.uniform(0.7, 1.3))
        photo.save(draft / name / f"{i:05d}.jpg", quality=90)
    draft.rename(folder)


def augment(batch):
    """Transform a batch on the device: bytes become numbers around zero, and half of the images are flipped."""
    images, labels = batch
    images = images.float() / 127.5 - 1
    flipped = torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5
    return torch.where(flipped, images.flip(3), images), labels


class Stopwatch(Callback):
    """Records the seconds of each epoch."""

    reads_weights = False

    def __init__(self):
        self.seconds = []

    def on_epoch_begin(self, epoch, logs=None):
        self.begun = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.seconds.append(time.perf_counter() - self.begun)


def train(data, classes, args, **options):
    """Train a new network; return an epoch's samples per second, without the first epoch, which compiles."""
    tpufit.set_random_seed(0)
    net = nn.Sequential(
        nn.AvgPool2d(8),
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * (SIZE // 8) ** 2, len(classes)),
    )
    model = tpufit.Model(net)
    model.compile(optimizer="adamw", loss="cross_entropy", metrics=["accuracy"])
    stopwatch = Stopwatch()
    model.fit(data, epochs=args.epochs, cores=args.cores, callbacks=stopwatch, **options)
    return args.count / statistics.median(stopwatch.seconds[1:])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=4096, help="the number of JPEGs")
    parser.add_argument("--epochs", type=int, default=4, help="at least 2")
    parser.add_argument("--workers", type=int, default=0, help="processes that decode for the DataLoader")
    parser.add_argument("--cores", default="8", help="auto, or a count")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/cached_images"))
    args = parser.parse_args()

    folder = args.run_dir / f"photos-{args.count}"
    make_photos(folder, args.count)
    photos = tpufit.data.ImageFolder(folder, size=SIZE)
    photos.device_transform = augment
    print(f"{len(photos)} JPEGs of {len(photos.classes)} classes in {folder}\n\nWithout a cache")
    loader = DataLoader(photos, batch_size=64, shuffle=True, num_workers=args.workers)
    plain = train(loader, photos.classes, args)

    print("\nWith a cache")
    begun = time.perf_counter()
    cached = tpufit.data.presize(folder, SIZE, args.run_dir / f"cache-{args.count}", device_transform=augment)
    print(f"decoded once in {time.perf_counter() - begun:.1f} s (0, if the cache existed)")
    fast = train(cached, photos.classes, args, batch_size=64)
    print(f"\nwithout the cache: {plain:,.0f} samples/s")
    print(f"with the cache: {fast:,.0f} samples/s, {fast / plain:.1f} times as many")


if __name__ == "__main__":  # because the processes that fill the cache import this file
    main()
