"""Sources and transforms for tests of caches, in a module that worker processes can import."""

import contextlib
import os
import random
import signal
import sys
import time

import numpy as np
import torch
from torch.utils.data import Dataset


class Everything(Dataset):
    """Samples with a leaf of each kind. Rows of the image are copied singly, the others are gathered by NumPy."""

    def __init__(self, rows=120):
        self.rows = rows

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        values = np.random.default_rng(index)
        image = values.integers(0, 256, (3, 64, 96), dtype=np.uint8)
        image.flags.writeable = False  # as PIL returns them
        return {
            "image": image,
            "pair": (torch.tensor([index, -index], dtype=torch.bfloat16), [values.normal(size=(2, 2))]),
            "label": index,
            "weight": index / 7,
            "even": index % 2 == 0,
            "mask": torch.tensor([True, False, index % 3 == 0]),
            "half": np.float16(index),
            "none": torch.empty(0, 3),
        }


def expected(samples):
    """Return the expected batch of such samples."""
    return {
        "image": torch.stack([torch.tensor(sample["image"]) for sample in samples]),
        "pair": (
            torch.stack([sample["pair"][0] for sample in samples]),
            [torch.stack([torch.tensor(sample["pair"][1][0]) for sample in samples])],
        ),
        "label": torch.tensor([sample["label"] for sample in samples]),
        "weight": torch.tensor([sample["weight"] for sample in samples], dtype=torch.float32),
        "even": torch.tensor([sample["even"] for sample in samples]),
        "mask": torch.stack([sample["mask"] for sample in samples]),
        "half": torch.tensor(np.array([sample["half"] for sample in samples])),
        "none": torch.empty(len(samples), 0, 3),
    }


class Rows(Dataset):
    """Row i is 256 numbers i; half a MiB for 512 rows."""

    def __init__(self, rows=64):
        self.rows = rows

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        return torch.full((256,), index, dtype=torch.int32), index


# The size of 16 rows, and of the results of `noise` for them, in MiB.
FILES_OF_16, NOISE_OF_16 = 16 * 1032 / 2**20, 16 * 40 / 2**20


def noise(sample):
    """Return random numbers from each generator."""
    return sample[1], random.random(), np.random.normal(size=2), torch.rand(3)


def slow(sample):
    time.sleep(0.004)
    return sample


def note_process(sample):
    """Write a file named after the process's id into the folder in the variable PIDS.

    Sample 100 isn't made while there is a file with the folder's name and `.hold`.
    """
    open(os.path.join(os.environ["PIDS"], str(os.getpid())), "a").close()
    while sample[1] == 100 and os.path.exists(os.environ["PIDS"] + ".hold"):
        time.sleep(0.001)
    return slow(sample)


def with_modules(sample):
    """Return whether the process that creates the sample has imported torch_xla."""
    return sample, "torch_xla" in sys.modules


class FailAt:
    """Raise at one sample."""

    def __init__(self, index):
        self.index = index

    def __call__(self, sample):
        if sample[1] == self.index:
            raise KeyError("no such label")
        return sample


class DieAt(FailAt):
    """Kill the process at one sample."""

    def __call__(self, sample):
        if sample[1] == self.index:
            os.kill(os.getpid(), signal.SIGKILL)
        return sample


class FillDiskAt(FailAt):
    """Simulate a full disk from one sample on, but only once."""

    def __init__(self, index, ballast):
        super().__init__(index)
        self.ballast = ballast

    def __call__(self, sample):
        if sample[1] == self.index and not os.path.exists(self.ballast):
            with open(self.ballast, "wb", buffering=0) as file, contextlib.suppress(OSError):
                for _ in range(4096):
                    file.write(bytes(4096))
        return sample


class Unreadable:
    """A transform that can be pickled, but not unpickled."""

    def __call__(self, sample):
        return sample

    def __reduce__(self):
        return _fail, ()


def _fail():
    raise ImportError("this worker lacks something")
