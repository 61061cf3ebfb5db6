"""A cached data set in `fit` gives the same training as arrays, in every mode."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import tpufit
from tpufit.data import CachedDataset, stream

pytestmark = pytest.mark.cores(1, 8, timeout=300, quick=False)

IMAGES = np.random.default_rng(0).integers(0, 256, (70, 3, 4, 4), dtype=np.uint8)
LABELS = np.random.default_rng(1).integers(0, 3, 70)


class Images(Dataset):
    def __len__(self):
        return len(IMAGES)

    def __getitem__(self, i):
        return IMAGES[i], LABELS[i]


def scaled(batch):
    x, y = batch
    return x.float() / 255, y


def train(cores, *data):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 3))
    tpufit.set_random_seed(0)
    model = tpufit.Model(net)
    model.compile("sgd", "cross_entropy", metrics=["accuracy"], scale_lr=None)
    model.fit(*data, batch_size=16 // cores, epochs=3, verbose=0, cores=cores)
    return model.history.history, model


@pytest.mark.parametrize("mode", ["mmap", "ram"])
def test_training_from_a_cache_equals_training_from_arrays(cores, mode, tmp_path):
    cached = CachedDataset(Images(), tmp_path / "cache", device_transform=scaled, mode=mode, shard_mb=0.001, workers=0)
    cached.warm_up(progress=False)
    history, model = train(cores, cached)
    expected, plain = train(cores, (IMAGES / 255).astype("float32"), LABELS)
    for name, values in expected.items():
        assert history[name] == pytest.approx(values, abs=1e-6)
    floats = (IMAGES / 255).astype("float32")
    np.testing.assert_allclose(model.predict(cached, verbose=0), plain.predict(floats, verbose=0), atol=1e-5)


def test_each_epoch_has_its_variant(cores, tmp_path):
    class Numbers(Dataset):
        def __len__(self):
            return 20

        def __getitem__(self, i):
            return np.float32(i)

    cached = CachedDataset(Numbers(), tmp_path / "cache", lambda x: x + np.random.rand(), copies=2, workers=0)
    cached.warm_up(progress=False)
    data = stream(cached, batch_size=5, cores=1)
    epochs = [torch.cat([batch for batch in data.epoch(epoch)]) for epoch in range(4)]
    assert torch.equal(epochs[0], epochs[2]) and torch.equal(epochs[1], epochs[3])
    assert not torch.equal(epochs[0], epochs[1])
    assert all(epoch.floor().tolist() == list(range(20)) for epoch in epochs)


def test_validation_split_and_random_split_read_the_cache_too(cores, tmp_path):
    cached = CachedDataset(Images(), tmp_path / "cache", device_transform=scaled, workers=0)
    cached.warm_up(progress=False)
    part = torch.utils.data.Subset(cached, [3, 1, 69])
    data = stream(part, batch_size=2)
    assert data.device_transform is scaled
    assert np.array_equal(np.concatenate([x for x, _ in data.epoch(0)]), IMAGES[[3, 1, 69]])
    model = tpufit.Model(nn.Sequential(nn.Flatten(), nn.Linear(48, 3)))
    model.compile("sgd", "cross_entropy")
    history = model.fit(cached, batch_size=8, validation_split=0.2, verbose=0, cores=cores).history
    assert set(history) == {"loss", "val_loss"}
