"""The form of the user's data is decided once: each form is recognized, and a split of rows keeps it."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from tpufit.data import PackedDataset, PerHost
from tpufit.data.stream import make_stream
from tpufit.data.user_data import Form, recognize, recognize_held_out
from tpufit.errors import ArgumentError, DataError

X = torch.arange(12.0).reshape(6, 2)


class Rows(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, i):
        return X[i]


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield X[0]


class Looked:
    """Another library's data, which may hold rows or batches: its first item tells."""

    def __init__(self):
        self.looks = 0

    def __len__(self):
        return 6

    def __iter__(self):
        return map(self.__getitem__, range(6))

    def __getitem__(self, i):
        self.looks += 1
        return X[i], i


PACKED = PackedDataset([np.arange(1, 4)] * 6, length=8, vocab_size=5)


@pytest.mark.parametrize(
    ("data", "form"),
    [
        (X, Form.ARRAYS),
        ({"a": X.numpy(), "b": [1, 2, 3, 4, 5, 6]}, Form.ARRAYS),
        (TensorDataset(X), Form.ARRAYS),
        (PACKED, Form.CACHED),
        (Subset(PACKED, [0]), Form.CACHED),
        (Rows(), Form.SAMPLES),
        ([(row, 1) for row in X], Form.SAMPLES),
        (Looked(), Form.SAMPLES),
        (Endless(), Form.ROW_ITERABLE),
        (DataLoader(Rows()), Form.LOADER),
        (PerHost([X]), Form.BATCHES),
        (iter([X]), Form.BATCHES),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_form_is_recognized(data, form):
    found = recognize(data)
    assert found.form is form and found.has_rows is (form in (Form.ARRAYS, Form.CACHED, Form.SAMPLES))
    assert found.has_batches is (form in (Form.LOADER, Form.BATCHES))


def test_weights_beside_a_tensor_dataset_are_refused():
    with pytest.raises(ArgumentError, match="y and sample_weight go with arrays; x is a TensorDataset"):
        recognize(TensorDataset(X), sample_weight=np.ones(6))


def test_the_first_item_is_looked_at_once():
    data = Looked()
    found = recognize(data)
    train, held_out = found.split(0.5)
    for cores in (1, 2):
        make_stream(train, cores=cores), make_stream(held_out, cores=cores)
    assert data.looks == 1


def test_a_split_of_a_file_is_still_read_from_the_file(tmp_path):
    file = np.memmap(tmp_path / "x.bin", "float32", "w+", shape=(6, 2))
    file[:] = X.numpy()
    parts = recognize(file, np.arange(6)).split(1 / 3)
    assert [(len(part.x), part.y.tolist(), part.in_memory) for part in parts] == [
        (4, [0, 1, 2, 3], False),
        (2, [4, 5], False),
    ]


def test_a_split_keeps_targets_and_weights_of_its_rows():
    train, held_out = recognize(X, {"a": X[:, 0]}, torch.arange(6)).split(0.5)
    assert train.y["a"].tolist() == [0, 2, 4] and held_out.sample_weight.tolist() == [3, 4, 5]
    assert (train.name, held_out.name) == ("x", "validation_data")


def test_data_to_evaluate_on():
    assert recognize_held_out((X, X), "x").y is not None
    assert recognize_held_out([X, X], "x").y is None  # two inputs
    with pytest.raises(ArgumentError, match="validation_data is a list of 2 arrays"):
        recognize_held_out([X, X], "validation_data", recognize(X))
    with pytest.raises(DataError, match="must be arrays, tensors"):
        recognize(3)
