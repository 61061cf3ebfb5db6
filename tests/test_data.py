"""Each form of data gives the same rows, in order or shuffled by (seed, epoch), each exactly once."""

from collections import namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from tpufit.data import stream, train_validation_split, unpack
from tpufit.errors import ArgumentError, DataError


class Rows(Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        return np.float32(i), i


class Endless(IterableDataset):
    def __iter__(self):
        i = 0
        while True:
            yield float(i), i
            i += 1


def targets(data, epoch=0):
    return [batch[1].tolist() for batch in data.epoch(epoch)]


@given(
    rows=st.integers(1, 300),
    batch_size=st.integers(1, 40),
    cores=st.integers(1, 8),
    shuffle=st.booleans(),
    form=st.sampled_from(["arrays", "tensors", "dataset", "tensor dataset", "loader", "iterable"]),
)
def test_every_row_exactly_once(rows, batch_size, cores, shuffle, form):
    x, y = np.arange(rows, dtype="float32"), np.arange(rows)
    tensors = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    own_batches = {
        "loader": DataLoader(tensors, batch_size=batch_size),
        "iterable": [(x[i : i + batch_size], y[i : i + batch_size]) for i in range(0, rows, batch_size)],
    }
    if form in own_batches:
        data = stream(own_batches[form], cores=cores, shuffle=shuffle)
        shuffle = False  # never, whatever `shuffle` is
    else:
        given_data = {
            "arrays": (x, y),
            "tensors": tensors.tensors,
            "dataset": (Rows(rows),),
            "tensor dataset": (tensors,),
        }
        data = stream(*given_data[form], batch_size=batch_size, cores=cores, shuffle=shuffle, seed=3)
    seen = targets(data)
    assert data.steps == len(seen)
    assert sorted(sum(seen, [])) == list(range(rows))
    assert all(len(batch) == batch_size * cores for batch in seen[:-1])
    if not shuffle:
        assert sum(seen, []) == list(range(rows))


def test_order_depends_on_seed_and_epoch_but_not_on_cores():
    def flat(cores, batch_size, seed, epoch):
        data = stream(np.arange(50.0), np.arange(50), batch_size=batch_size, cores=cores, shuffle=True, seed=seed)
        return sum(targets(data, epoch), [])

    assert flat(1, 16, 0, 1) == flat(8, 2, 0, 1)
    assert len({tuple(flat(1, 16, seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


def test_a_dataset_and_arrays_have_the_same_order():
    arrays = stream(np.arange(20.0), np.arange(20), batch_size=4, shuffle=True, seed=5)
    dataset = stream(Rows(20), batch_size=4, shuffle=True, seed=5)
    assert targets(arrays, 2) == targets(dataset, 2)


def test_a_loader_keeps_its_sampler_collate_and_drop_last():
    class Backwards(torch.utils.data.Sampler):
        def __len__(self):
            return 10

        def __iter__(self):
            return iter(range(9, -1, -1))

    def collate(rows):
        return torch.tensor([x for x, _ in rows]), torch.tensor([y * 10 for _, y in rows])

    loader = DataLoader(Rows(10), batch_size=3, sampler=Backwards(), collate_fn=collate, drop_last=True)
    assert targets(stream(loader, cores=2)) == [[90, 80, 70, 60, 50, 40], [30, 20, 10]]  # row 0 is the user's own loss


def test_a_loader_with_a_custom_batch_sampler():
    loader = DataLoader(Rows(7), batch_sampler=[[0, 1], [2], [3, 4, 5], [6]])
    assert targets(stream(loader, cores=2)) == [[0, 1, 2], [3, 4, 5, 6]]


class ByEpoch(torch.utils.data.Sampler):
    """Rotates the rows by the epoch, as a sampler or, with a size, as a batch sampler."""

    def __init__(self, size=None):
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 8 if self.size is None else 8 // self.size

    def __iter__(self):
        order = np.roll(np.arange(8), -self.epoch)
        yield from order.tolist() if self.size is None else order.reshape(-1, self.size).tolist()


class RowsByEpoch(Rows):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, i):
        return np.float32(i), (i + self.epoch) % len(self)


class BatchesByEpoch(ByEpoch):
    def __iter__(self):
        for rows in super().__iter__():
            yield torch.tensor(rows).float(), torch.tensor(rows)


class SamplesByEpoch(IterableDataset, ByEpoch):
    def __iter__(self):
        yield from ((float(i), i) for i in ByEpoch.__iter__(self))


EPOCH_DATA = {
    "sampler": lambda: DataLoader(Rows(8), batch_size=4, sampler=ByEpoch()),
    "batch sampler": lambda: DataLoader(Rows(8), batch_sampler=ByEpoch(4)),
    "sampler of a batch sampler": lambda: DataLoader(
        Rows(8), batch_sampler=torch.utils.data.BatchSampler(ByEpoch(), 4, drop_last=False)
    ),
    "data set of a loader": lambda: DataLoader(RowsByEpoch(8), batch_size=4),
    "data set": lambda: RowsByEpoch(8),
    "data set in workers": lambda: DataLoader(RowsByEpoch(8), batch_size=4, num_workers=2),
    "iterable of batches": lambda: BatchesByEpoch(4),
    "iterable of samples": lambda: DataLoader(SamplesByEpoch(), batch_size=4),
}


@pytest.mark.parametrize("form", EPOCH_DATA)
def test_set_epoch_is_called_at_each_epoch(form):
    options = {"batch_size": 4} if form == "data set" else {}
    data = stream(EPOCH_DATA[form](), **options)
    for epoch in (0, 3, 1):
        assert sum(targets(data, epoch), []) == np.roll(np.arange(8), -epoch).tolist()


def test_set_epoch_is_called_when_epochs_of_some_steps_begin_another_pass():
    data = stream(DataLoader(Rows(8), batch_size=4, sampler=ByEpoch()), steps=2)
    assert [sum(targets(data, epoch), []) for epoch in range(2)] == [np.roll(np.arange(8), -i).tolist() for i in (0, 1)]


def test_a_resumed_pass_has_the_order_of_its_epoch():
    data, again = (stream(EPOCH_DATA["sampler"]()) for _ in range(2))
    batches = data.epoch(5)
    next(batches)
    assert again.load_state_dict(data.state_dict(1)) == 1
    assert targets(again, 5) == [batch[1].tolist() for batch in batches]


def test_a_distributed_sampler_shuffles_anew_in_each_epoch():
    sampler = torch.utils.data.DistributedSampler(Rows(32), num_replicas=1, rank=0, seed=3)
    data = stream(DataLoader(Rows(32), batch_size=32, sampler=sampler))
    ((first,), (second,), (again,)) = (targets(data, epoch) for epoch in (0, 1, 0))
    assert sorted(first) == sorted(second) == list(range(32)) and first == again != second


def test_batches_of_an_iterable_are_joined_and_a_short_group_is_kept():
    batches = [(torch.full((2,), float(i)), torch.full((2,), i)) for i in range(5)]
    assert targets(stream(batches, cores=2)) == [[0, 0, 1, 1], [2, 2, 3, 3], [4, 4]]


def test_nests_are_joined_and_strings_stay_on_the_host():
    Pair = namedtuple("Pair", "left right")
    batches = [
        ({"a": np.ones((2, 3)), "names": ["x", "y"]}, Pair(torch.zeros(2), [torch.zeros(2, 1)])),
        ({"a": np.ones((1, 3)), "names": ["z"]}, Pair(torch.zeros(1), [torch.zeros(1, 1)])),
    ]
    ((x, y),) = stream(batches, cores=2).epoch(0)
    assert x["a"].shape == (3, 3) and x["names"] == ["x", "y", "z"]
    assert type(y) is Pair and y.left.shape == (3,) and y.right[0].shape == (3, 1)


def test_a_named_tuple_means_its_fields_in_order():
    Batch = namedtuple("Batch", "image label")
    assert unpack(Batch(1, 2)) == (1, 2, None)
    x, y = np.arange(6.0), np.arange(6)
    (batch,) = stream([Batch(x, y)]).epoch(0)
    assert type(batch) is Batch and targets(stream([Batch(x[:3], y[:3]), Batch(x[3:], y[3:])], cores=2)) == [y.tolist()]
    ((inputs, labels),) = stream(Batch(x, y), y).epoch(0)  # arrays: one x of two inputs
    assert type(inputs) is Batch and labels.tolist() == y.tolist()
    ((inputs,),) = stream(Batch(x, y)).epoch(0)
    assert type(inputs) is Batch


def test_the_first_batch_can_be_inspected():
    data = stream(DataLoader(Rows(6), 2, shuffle=True))
    before = torch.get_rng_state()
    looked_at = data.read_first()[1].tolist()
    assert torch.equal(torch.get_rng_state(), before) and targets(data)[0] == looked_at
    assert stream(np.arange(3.0)).read_first()[0].tolist() == [0, 1, 2]
    batches = iter([(np.ones(2), np.ones(2))])
    assert stream(batches).read_first() is None and len(list(batches)) == 1


def test_data_become_the_expected_dtypes():
    for given_dtype, expected in [
        (np.float64, torch.float32),  # a TPU has no float64
        (np.float32, torch.float32),
        (np.uint8, torch.uint8),
        (np.int32, torch.int32),
        (np.bool_, torch.bool),
    ]:
        ((x,),) = stream(np.ones(3, dtype=given_dtype)).epoch(0)
        assert x.dtype is expected
    ((x,),) = stream(torch.ones(3, dtype=torch.bfloat16), shuffle=True).epoch(0)
    assert x.dtype is torch.bfloat16


def test_steps_continue_after_the_last_epoch_as_in_keras():
    data = stream(np.arange(5.0), np.arange(5), batch_size=1, steps=3)
    assert targets(data, 0) == [[0], [1], [2]]
    with pytest.warns(UserWarning, match="x ran out of data after 2 of 3 steps"):
        assert targets(data, 1) == [[3], [4]]
    assert targets(data, 2) == [[0], [1], [2]]


def test_steps_of_an_evaluation_start_at_the_first_row():
    data = stream(np.arange(5.0), np.arange(5), batch_size=1, steps=3, restart=True)
    assert [targets(data, e) for e in range(2)] == [[[0], [1], [2]]] * 2


def test_endless_data_need_steps():
    data = stream(Endless(), batch_size=2, cores=2, steps=2)
    assert [targets(data, e) for e in range(2)] == [[[0, 1, 2, 3], [4, 5, 6, 7]], [[8, 9, 10, 11], [12, 13, 14, 15]]]


def test_a_generator_can_be_read_only_once():
    data = stream((np.ones(2), np.ones(2)) for _ in range(2))
    assert len(targets(data)) == 2
    with pytest.raises(DataError, match="only once"):
        targets(data, 1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda: stream(np.ones((0, 2)), np.ones(0)), "empty"),
        (lambda: stream(np.ones(4), np.ones(5)), r"equally many rows, got \[4, 5\]"),
        (lambda: stream({"a": np.ones(4), "b": np.ones(3)}, np.ones(4)), r"got \[4, 3, 4\]"),
        (lambda: stream(Rows(0)), "empty"),
        (lambda: stream(DataLoader(TensorDataset(torch.ones(0)))), "empty"),
        (lambda: targets(stream([])), "no batches"),
        (lambda: stream(7), "arrays, tensors, a Dataset"),
        (lambda: stream(np.array(7)), "single number"),
        (lambda: stream(np.array(["a", "b"])), "x must be an array of numbers, got text"),
        (lambda: unpack((1, 2, 3, 4)), "got 4 items"),
    ],
)
def test_bad_data(data, message):
    with pytest.raises(DataError, match=message):
        data()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda: stream(np.ones(4), batch_size=0), "batch_size must be"),
        (lambda: stream(np.ones(4), batch_size=2.5), "batch_size must be"),
        (lambda: stream(np.ones(4), steps=0), "steps must be"),
        (lambda: stream(DataLoader(Rows(4), batch_size=2), batch_size=4), "Leave batch_size out"),
        (lambda: stream(Rows(4), np.ones(4)), "must yield them itself"),
        (lambda: train_validation_split(np.ones(4), None, None, 1.5), "between 0 and 1"),
        (lambda: train_validation_split(iter([1]), None, None, 0.5), "arrays or a map-style dataset"),
    ],
)
def test_incompatible_arguments(data, message):
    with pytest.raises(ArgumentError, match=message):
        data()


def test_a_batch_size_for_an_iterable_is_a_warning():
    with pytest.warns(UserWarning, match="makes its own batches"):
        stream([(np.ones(2), np.ones(2))], batch_size=4)


def test_the_last_rows_are_held_out():
    x, y, weight, held = train_validation_split(np.arange(10.0), np.arange(10), None, 0.3)
    assert y.tolist() == list(range(7)) and weight is None
    assert [part.tolist() for part in held] == [[7.0, 8.0, 9.0], [7, 8, 9]]
    train, _, _, held = train_validation_split(Rows(10), None, None, 0.3)
    assert len(train) == 7 and [held[i][1] for i in range(3)] == [7, 8, 9]


def test_rows_of_a_tensor_dataset_are_held_out_as_arrays():
    train, _, _, held = train_validation_split(TensorDataset(torch.arange(10), torch.arange(10)), None, None, 0.3)
    assert next(stream(train, batch_size=8).epoch(0))[0].tolist() == list(range(7))
    assert next(stream(held, batch_size=8).epoch(0))[1].tolist() == [7, 8, 9]


def test_a_tensor_dataset_with_items_of_its_own_is_read_by_them():
    class Doubled(TensorDataset):
        def __getitem__(self, i):
            return 2 * self.tensors[0][i]

    assert next(stream(Doubled(torch.arange(3))).epoch(0)).tolist() == [0, 2, 4]


def test_holding_out_all_rows_or_none():
    with pytest.raises(DataError, match="leaves none to train on.* choose another share"):
        train_validation_split(np.ones(1), np.ones(1), None, 0.5)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("width", [1, 3000])  # of `one`, 64 batches are looked up at once; of the other, a few
def test_arrays_are_looked_up_many_batches_at_once(shuffle, width):
    rows, size = 1003, 7
    x, y = np.arange(rows, dtype=np.float32)[:, None].repeat(width, 1), np.arange(rows)
    data = stream({"x": x, "none": None}, y, batch_size=size, shuffle=shuffle, seed=3)
    batches = list(data.epoch(2))
    labels = torch.cat([y for _, y in batches])
    assert [len(y) for _, y in batches] == [size] * 143 + [2]
    assert all(torch.equal(x["x"][:, 0], y.float()) and x["none"] is None for x, y in batches)
    assert torch.equal(labels.sort().values, torch.arange(rows))
    assert torch.equal(labels, torch.arange(rows)) is not shuffle
    data.load_state_dict(data.state_dict(100) | {"number": 2})
    rest = list(data.epoch(2))
    assert torch.equal(torch.cat([y for _, y in rest]), labels[100 * size :])
