"""A data set's `device_transform` runs inside the step's graph, in every role, and isn't confused with another."""

from queue import SimpleQueue

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import tpufit
from tpufit import runtime

pytestmark = pytest.mark.cores(1, 8, timeout=300, quick=False)

IMAGES = np.random.default_rng(0).integers(0, 256, (70, 3, 4, 4), dtype=np.uint8)
LABELS = np.random.default_rng(1).integers(0, 3, 70)


class Images(Dataset):
    def __init__(self, device_transform=None):
        self.device_transform = device_transform

    def __len__(self):
        return len(IMAGES)

    def __getitem__(self, i):
        return IMAGES[i], LABELS[i]


class Normalize:
    def __init__(self):
        self.calls = SimpleQueue()  # an ordinary count would be detected, and the steps traced

    def __call__(self, batch):
        self.calls.put(1)
        x, y = batch
        assert x.dtype is torch.uint8
        return x.float() / 255, y

    def __eq__(self, other):  # and so it can't be hashed
        return type(self) is type(other)


def make():
    torch.manual_seed(0)
    tpufit.set_random_seed(0)
    model = tpufit.Model(nn.Sequential(nn.Flatten(), nn.Linear(48, 3)))
    model.compile("sgd", "cross_entropy", metrics=["accuracy"], scale_lr=None)
    return model


@pytest.mark.parametrize("form", ["dataset", "loader"])
def test_a_device_transform_equals_the_same_transform_on_the_host(cores, form):
    normalize = Normalize()
    data = Images(normalize)
    data = data if form == "dataset" else DataLoader(data, batch_size=16 // cores)
    size = None if form == "loader" else 16 // cores
    model, plain = make(), make()
    before = runtime.counts()
    history = model.fit(data, None, size, 4, verbose=0, shuffle=False, validation_data=data, cores=cores).history
    calls, audits = normalize.calls.qsize(), (runtime.counts() - before).waits["audit"]
    floats = (IMAGES / 255).astype("float32")
    expected = plain.fit(
        floats, LABELS, 16 // cores, 4, verbose=0, shuffle=False, validation_data=(floats, LABELS)
    ).history
    for name, values in expected.items():
        assert history[name] == pytest.approx(values, abs=1e-6)
    # Traced twice for each of two shapes, in training and validation, and once to inspect the validation data.
    assert calls == 4 * 2 + 1 + audits
    np.testing.assert_allclose(
        model.predict(data, size, verbose=0), plain.predict(floats, 16 // cores, verbose=0), atol=1e-5
    )
    assert model.evaluate(data, batch_size=size, verbose=0) == pytest.approx(
        plain.evaluate(floats, LABELS, 16 // cores, verbose=0), abs=1e-5
    )


def test_random_augmentation_differs_by_step_and_repeats(cores):
    def flip(batch):
        x, y = batch
        mirrored = torch.rand(len(x), 1, 1, 1, device=x.device) < 0.5
        return torch.where(mirrored, x.flip(-1), x).float() / 255, y

    def run():
        before = runtime.counts()
        history = make().fit(Images(flip), None, 16 // cores, 4, verbose=0, shuffle=False, cores=cores).history
        return history["loss"], runtime.counts() - before

    (losses, counts), (again, _) = run(), run()
    assert losses == again
    assert counts.host_reads == 0 and not counts.fallbacks and counts.graphs.get("train", 0) <= 2
    unflipped = make().fit(Images(lambda b: (b[0].float() / 255, b[1])), None, 16 // cores, 4, verbose=0, shuffle=False)
    assert losses != unflipped.history["loss"]


def test_another_transform_is_another_graph(cores):
    model = make()
    zeros = Images(lambda batch: (batch[0].float() * 0, batch[1]))
    ones = Images(lambda batch: (batch[0].float() * 0 + 1, batch[1]))
    first = [model.predict(data, 16 // cores, verbose=0)[0] for data in (zeros, ones, zeros)]
    np.testing.assert_array_equal(first[0], first[2])
    assert not np.allclose(first[0], first[1])
