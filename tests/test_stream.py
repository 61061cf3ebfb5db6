"""A stream's rows: each exactly once in an epoch, over any number of hosts, and resumable at any position."""

import gc
import itertools
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from tpufit.data import PerHost, stream
from tpufit.data.data_position import start_of_next_pass
from tpufit.data.per_host import LocalBatch
from tpufit.data.read_loader import read_loader
from tpufit.data.sampling import permute_rows, select_shard_rows
from tpufit.errors import ArgumentError, DataError
from tpufit.utils.random import RNGState


class Numbers(Dataset):
    """Samples are their own indices; it records reads."""

    def __init__(self, length):
        self.length, self.read = length, []

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        self.read.append(i)
        return i


def rows(batches):
    batches = [batch.batch if isinstance(batch, LocalBatch) else batch for batch in batches]
    return [int(row) for batch in batches for row in (batch[0] if isinstance(batch, (tuple, list)) else batch)]


@settings(max_examples=300)
@given(
    length=st.integers(1, 2000),
    batch_size=st.integers(1, 300),
    owners=st.lists(
        st.integers(0, 3), min_size=1, max_size=8
    ),  # the host of each core; a host's cores needn't be adjacent
    shuffle=st.booleans(),
    epoch=st.integers(0, 3),
    resume_at=st.floats(0, 1),
    form=st.sampled_from(["arrays", "dataset"]),
)
def test_every_row_exactly_once(length, batch_size, owners, shuffle, epoch, resume_at, form):
    data = np.arange(length) if form == "arrays" else Numbers(length)
    how = {"batch_size": batch_size, "cores": len(owners), "shuffle": shuffle, "seed": 5}
    whole = rows(stream(data, **how).epoch(epoch))
    assert sorted(whole) == list(range(length))

    position = round(resume_at * length)  # any row, also in the middle of a former batch
    before, after = [], []
    for host in sorted(set(owners)):
        shards = [i for i, owner in enumerate(owners) if owner == host]
        first, second = stream(data, local_shards=shards, **how), stream(data, local_shards=shards, **how)
        size = batch_size * len(owners)
        taken = [batch for _, batch in zip(range(position // size), first.epoch(epoch), strict=False)]
        before += rows(taken)
        second.load_state_dict(first.state_dict(len(taken)) if taken else {"number": epoch})
        after += rows(second.epoch(epoch))
        anywhere = stream(data, local_shards=shards, **how)
        anywhere.load_state_dict({"number": epoch, "offset": position})
        assert set(rows(anywhere.epoch(epoch))) <= set(whole[position:])
    assert sorted(before + after) == list(range(length))  # over all hosts, each row once
    if set(owners) == {owners[0]}:
        assert before + after == whole
        anywhere = stream(data, **how)
        anywhere.load_state_dict({"number": epoch, "offset": position})
        assert rows(anywhere.epoch(epoch)) == whole[position:]


@given(count=st.integers(1, 64), length=st.integers(0, 500), data=st.data())
def test_hosts_share_a_batch(count, length, data):
    owners = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    parts = [select_shard_rows([i for i, o in enumerate(owners) if o == h], count, length) for h in sorted(set(owners))]
    assert sorted(np.concatenate(parts).tolist()) == list(range(length))


def test_resuming_doesnt_read_earlier_rows():
    data = Numbers(1_000)
    resumed = stream(data, batch_size=10, shuffle=True, seed=1)
    resumed.load_state_dict({"batches": 99, "number": 4, "offset": 990})
    assert rows(resumed.epoch(4)) == data.read == permute_rows(1_000, 1, 4)[990:].tolist()


def test_the_order_of_millions_of_rows_is_quick_to_find():
    resumed = stream(np.arange(3_000_000), batch_size=100, shuffle=True, seed=1)
    resumed.load_state_dict({"batches": 29_999, "number": 0, "offset": 2_999_900})
    assert rows(resumed.epoch(0)) == permute_rows(3_000_000, 1, 0)[-100:].tolist()


def loaders(length):
    tensors = TensorDataset(torch.arange(length))
    return {
        "loader": lambda: DataLoader(tensors, batch_size=3),
        "sampler": lambda: DataLoader(
            tensors, batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(0), drop_last=False
        ),
        "iterable": lambda: [(torch.arange(i, min(i + 3, length)),) for i in range(0, length, 3)],
    }


@pytest.mark.parametrize("form", ["loader", "sampler", "iterable"])
@pytest.mark.parametrize("cores", [1, 2, 8])
def test_loaders_and_iterables_resume(form, cores):
    make = loaders(50)[form]
    whole = list(stream(make(), cores=cores).epoch(0))
    for done in range(len(whole) + 1):
        first, second = stream(make(), cores=cores), stream(make(), cores=cores)
        taken = [batch for _, batch in zip(range(done), first.epoch(0), strict=False)]
        second.load_state_dict(first.state_dict(done) if done else {})
        assert rows(taken) + rows(second.epoch(0)) == rows(whole)


class Stateful:
    """An iterable that keeps its own position, as torchdata's loaders do; it counts how often it was read."""

    def __init__(self, length):
        self.length, self.next, self.reads = length, 0, 0

    def __iter__(self):
        while self.next < self.length:
            self.next += 1
            self.reads += 1
            yield torch.full((2,), self.next - 1)
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


def test_a_loader_with_state_is_resumed_by_it():
    first, data = stream(Stateful(9), cores=2), Stateful(9)
    ahead = [batch for _, batch in zip(range(4), first.epoch(0), strict=False)]
    state = first.state_dict(2)  # two were used, the others only read ahead
    second = stream(data, cores=2)
    second.load_state_dict(state)
    rest = list(second.epoch(0))
    assert rows(ahead[:2]) + rows(rest) == [i for i in range(9) for _ in range(2)]
    assert data.reads == 5


@pytest.mark.parametrize("steps", [None, 3])
def test_the_pass_after_a_position_has_a_new_order(steps):
    data = TensorDataset(torch.arange(40))
    generator = torch.Generator().manual_seed(5)
    first = stream(DataLoader(data, 10, shuffle=True, generator=generator), steps=steps)
    first.keeps_draws = True
    begun = [batch.tolist() for (batch,) in itertools.islice(first.epoch(0), 2)]
    state = json.loads(json.dumps(start_of_next_pass(first.state_dict(2))))
    drawn = RNGState.of(first.state_dict(2)["draws"])

    def following(restored):
        again = torch.Generator().manual_seed(5)
        loader = DataLoader(data, 10, shuffle=True, generator=again)
        second = stream(loader, steps=steps)
        if restored:
            assert second.load_state_dict(state) == 0
        else:
            drawn.restore([again])
        return [batch.tolist() for (batch,) in second.epoch(1)]

    assert following(True) == following(False) != begun
    # Different data, without a generator, start from the beginning too.
    other = stream(np.arange(40), batch_size=10, shuffle=True, steps=steps)
    other.load_state_dict(state)
    assert next(other.epoch(1))[0].tolist() == permute_rows(40, 0, 1)[:10].tolist()


def test_a_position_in_other_data_is_refused():
    with pytest.raises(DataError, match="these data have none: pass the same data, or resume='next_epoch'"):
        stream(np.arange(3)).load_state_dict({"own": {"next": 1}})


def test_a_position_that_was_not_reached():
    data = stream(np.arange(9), batch_size=2)
    next(data.epoch(0))
    with pytest.raises(ArgumentError, match="not read up to batch 2"):
        data.state_dict(2)


@pytest.mark.filterwarnings("ignore:.*ran out of data")
@given(length=st.integers(1, 40), size=st.integers(1, 7), steps=st.integers(1, 20), done=st.integers(0, 100))
def test_epochs_by_steps_end_with_the_data_and_resume_within_a_pass(length, size, steps, done):
    def epochs(data, first, count):
        return [[rows([batch]) for batch in data.epoch(epoch)] for epoch in range(first, first + count)]

    how = {"batch_size": size, "shuffle": True, "steps": steps}
    whole = epochs(stream(np.arange(length), **how), 0, 6)
    left, expected = -(-length // size), []
    for _ in range(6):
        expected.append(min(left, steps))
        left = left - expected[-1] or -(-length // size)
    assert [len(epoch) for epoch in whole] == expected
    batches = sum(whole, [])
    for first in range(0, len(batches) - -(-length // size) + 1, -(-length // size)):  # each pass is a permutation
        assert sorted(sum(batches[first : first + -(-length // size)], [])) == [*range(length)]
    epoch = done % 6
    used = done % (len(whole[epoch]) + 1)
    first, second = stream(np.arange(length), **how), stream(np.arange(length), **how)
    before = epochs(first, 0, epoch)
    before.append([rows([batch]) for _, batch in zip(range(used), first.epoch(epoch), strict=False)])
    second.load_state_dict(first.state_dict(used))
    rest = epochs(second, epoch, 6 - epoch)
    assert [*before[:-1], before[-1] + rest[0], *rest[1:]] == whole
    third = stream(np.arange(length), **how)  # and between two epochs
    epochs(first := stream(np.arange(length), **how), 0, epoch)
    third.load_state_dict(first.state_dict(None))
    assert epochs(third, epoch, 6 - epoch) == whole[epoch:]


@pytest.mark.parametrize("restart", [False, True])
def test_fewer_batches_than_steps_give_a_warning(restart):
    data = stream(np.arange(10), batch_size=1, steps=12, restart=restart)
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"x ran out of data after 10 of 12 steps"):
            assert len(list(data.epoch(0))) == 10


def test_an_exhausted_iterator_ends_its_epoch():
    data = stream((np.arange(2) + i for i in range(4)), steps=3)
    assert len(list(data.epoch(0))) == 3
    with pytest.warns(UserWarning, match="ran out of data after 1 of 3 steps"):
        assert len(list(data.epoch(1))) == 1
    with pytest.raises(DataError, match="x yielded no batches for this epoch, and can't be read again"):
        list(data.epoch(2))


@pytest.mark.parametrize("cores", [1, 2])
def test_shuffled_within_each_batch(cores):
    def epochs(cores):
        data = stream(np.arange(10), batch_size=4, cores=cores, shuffle="batch", seed=1)
        return [rows(data.epoch(epoch)) for epoch in range(2)]

    first, second = epochs(cores)
    assert first != second and epochs(1) == [first, second]
    for read in (first, second):
        assert [sorted(block) for block in (read[:4], read[4:8], read[8:])] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    with pytest.raises(ArgumentError, match="shuffle must be True, False or 'batch', got 'rows'"):
        stream(np.arange(10), shuffle="rows")


def test_steps_that_are_exactly_a_pass():
    data = stream(np.arange(4), batch_size=1, steps=4)
    assert [rows(data.epoch(epoch)) for epoch in range(3)] == [[0, 1, 2, 3]] * 3


@pytest.mark.parametrize("workers", [0, 1])
def test_each_host_has_its_own_rows_of_a_stream_and_of_a_loader(workers):
    class Few(IterableDataset):
        def __iter__(self):
            yield from range(11)

    for data, reads in ((Few(), 11), (Numbers(11), 6)):
        loader = DataLoader(data, 2, num_workers=workers)
        parts = [list(stream(loader, cores=2, local_shards=[shard]).epoch(0)) for shard in (0, 1)]
        assert [[part.batch.tolist() for part in host] for host in parts] == [
            [[0, 1], [4, 5], [8, 9]],
            [[2, 3], [6, 7], [10]],
        ]
        assert [part.rows for part in parts[0]] == [4, 4, 3]
        assert reads == 11 or workers or sorted(data.read) == list(range(11))  # each row by one host


def test_a_host_without_rows_of_the_last_batch():
    parts = list(stream(np.arange(5), batch_size=2, cores=2, local_shards=[1]).epoch(0))
    assert [(part.batch[0].tolist(), part.rows) for part in parts] == [([2, 3], 4), ([], 1)]


def test_batches_local_to_each_host():
    parts = list(stream(PerHost([torch.ones(2), torch.ones(2), torch.ones(2)]), cores=4, local_shards=[0, 1]).epoch(0))
    assert [(len(part.batch), part.rows) for part in parts] == [(4, 8), (2, 4)]


def test_the_sample_that_raised_is_named():
    class Broken(Numbers):
        def __getitem__(self, i):
            if i == 7:
                raise ValueError("a broken image")
            return i

    with pytest.raises(ValueError, match="a broken image") as error:
        list(stream(Broken(9), batch_size=4).epoch(0))
    assert getattr(error.value, "__notes__", ["This was sample 7 of x."]) == ["This was sample 7 of x."]


def test_samples_of_different_lengths_say_how_to_pad_them():
    class Texts(Numbers):
        def __getitem__(self, i):
            return torch.zeros(3 + i % 2), i

    with pytest.raises(DataError, match=r"one shape to make a batch, got \[\(3,\)\] and \[\(4,\)\].*PadToBuckets"):
        list(stream(Texts(9), batch_size=4).epoch(0))


def test_batches_of_different_lengths_say_how_to_pad_them():
    with pytest.raises(DataError, match=r"of one shape, got batches of shapes \[\(2, 3\), \(2, 4\)\].*PadToBuckets"):
        list(stream([(torch.zeros(2, 3),), (torch.zeros(2, 4),)], cores=2).epoch(0))


def test_read_only_arrays_are_shared_and_no_warning_is_given():
    array = np.arange(6.0, dtype=np.float32)
    array.flags.writeable = False
    ((x,),) = stream(array).epoch(0)
    assert x.tolist() == array.tolist() and x.data_ptr() == array.ctypes.data


def test_a_loader_without_workers_leaves_frozen_objects_frozen():
    gc.freeze()
    try:
        assert len(list(read_loader(DataLoader(TensorDataset(torch.zeros(4)))))) == 4
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()
