"""Data that fill the same arrays for each batch: results equal those of a plain loop, and new memory isn't copied."""

from itertools import cycle, islice

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import tpufit
from tpufit.data import reused_memory
from tpufit.data.reused_memory import group_batches
from tpufit.errors import BatchError

ROWS = 16  # of a step, on any number of cores
x = torch.randn(128, 4, generator=torch.Generator().manual_seed(0))
y = torch.randint(0, 3, (128,), generator=torch.Generator().manual_seed(1))


class Buffers:
    """Yields batches of `rows` rows in a ring of buffers, arrays or tensors."""

    def __init__(self, rows, count=1, numpy=False):
        make = (lambda like: np.empty_like(like.numpy())) if numpy else torch.empty_like
        self.buffers = [(make(x[:rows]), make(y[:rows])) for _ in range(count)]
        self.rows = rows

    def __iter__(self):
        for first, (inputs, targets) in zip(range(0, len(x), self.rows), cycle(self.buffers), strict=False):
            inputs[:] = x[first : first + self.rows]
            targets[:] = y[first : first + self.rows]
            yield inputs, targets


class DatasetOfBuffers(Buffers, IterableDataset):
    """The same as a data set."""


class Collate:
    """Collates all batches into one buffer."""

    def __init__(self):
        self.buffer = torch.empty(ROWS, 4)

    def __call__(self, samples):
        for row, (inputs, _) in zip(self.buffer, samples, strict=False):
            row[:] = inputs
        return self.buffer[: len(samples)], torch.stack([target for _, target in samples])


def train_plainly(rows):
    """Train for two epochs in a plain loop, and return the net and its loss."""
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        for inputs, targets in zip(x.split(rows), y.split(rows), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(net(inputs), targets).backward()
            optimizer.step()
    return net, F.cross_entropy(net(x), y).item()


def check(data, cores, rows=ROWS, whole=False, **options):
    """Compare fit, evaluate and predict with a plain loop."""
    tpufit.init(cores)  # first: autograd looks up the existing devices once
    wanted, loss = train_plainly(rows)
    torch.manual_seed(0)
    model = tpufit.Model(torch.nn.Linear(4, 3))
    model.compile(lambda parameters: torch.optim.SGD(parameters, lr=0.1), "cross_entropy", scale_lr=None, **options)
    size = {"batch_size": "global"} if whole else {}
    model.fit(data, epochs=2, verbose=0, cores=cores, **size)
    assert model.evaluate(data, verbose=0, **size) == pytest.approx(loss, abs=1e-5)
    outputs = torch.as_tensor(model.predict(data, verbose=0, **size))
    torch.testing.assert_close(outputs, wanted(x).detach(), rtol=1e-4, atol=1e-5)
    model.to_cpu()
    for mine, theirs in zip(model.module.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.cores(1, 8)
@pytest.mark.parametrize(("count", "numpy"), [(1, False), (1, True), (2, False), (3, True)])
def test_buffers_train_as_in_a_plain_loop(cores, count, numpy):
    check(Buffers(ROWS // cores, count, numpy), cores, steps_per_execution=4)


@pytest.mark.cores(1, 8)
@pytest.mark.parametrize("options", [{}, {"accumulate_steps": 2}])
def test_one_buffer_of_a_loader_without_batch_size(cores, options):
    loader = DataLoader(DatasetOfBuffers(ROWS // cores), batch_size=None)
    check(loader, cores, rows=ROWS * options.get("accumulate_steps", 1), **options)


@pytest.mark.cores(1, 8)
@pytest.mark.parametrize("options", [{"steps_per_execution": 4}, {"accumulate_steps": 2, "steps_per_execution": 2}])
def test_a_collate_function_with_one_buffer(cores, options):
    loader = DataLoader(TensorDataset(x, y), batch_size=ROWS // cores, collate_fn=Collate())
    check(loader, cores, rows=ROWS * options.get("accumulate_steps", 1), **options)


@pytest.mark.cores(1, 8)
def test_one_buffer_with_the_rows_of_all_cores(cores):
    check(Buffers(ROWS, numpy=True), cores, whole=True, steps_per_execution=4)


@pytest.mark.cores(1)
@pytest.mark.parametrize("options", [{"accumulate_steps": 2}, {"steps_per_execution": 4}])
def test_one_buffer_of_eager_steps(cores, options):
    check(Buffers(ROWS), cores, rows=ROWS * options.get("accumulate_steps", 1), run_eagerly=True, **options)


@pytest.mark.cores(1)
@pytest.mark.filterwarnings("ignore:the loss never fell")
def test_lr_find_reads_one_buffer(cores):
    curves = []
    for data in (Buffers(ROWS), DataLoader(TensorDataset(x, y), batch_size=ROWS)):
        torch.manual_seed(0)
        model = tpufit.Model(torch.nn.Linear(4, 3))
        model.compile("sgd", "cross_entropy")
        curves.append(model.lr_find(data, steps=6, cores=cores).losses)
    assert curves[0] == pytest.approx(curves[1])


def fresh(count, numpy=False):
    for i in range(count):
        inputs = torch.full((2, 3), float(i))
        yield (torch.from_numpy(np.full((2, 3), i, np.float32)) if numpy else inputs), torch.full((2,), i)


def values(groups):
    return [[int(batch[0][0, 0]) for batch in group] for group in groups]


@pytest.fixture
def copies(monkeypatch):
    """The copied batches."""
    copied = []

    def copy(batch):
        copied.append(batch)
        return copy_batch(batch)

    copy_batch = reused_memory.copy_batch
    monkeypatch.setattr(reused_memory, "copy_batch", copy)
    return copied


@pytest.mark.parametrize("numpy", [False, True])
def test_new_memory_is_copied_in_the_first_group_only(copies, numpy):
    assert values(group_batches(fresh(14, numpy), lambda: 4, True)) == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
        [12, 13],
    ]
    assert len(copies) == 3


def test_data_that_cannot_overwrite_are_never_copied(copies):
    list(group_batches(fresh(8), lambda: 4, False))
    list(group_batches(fresh(8), lambda: 1, True))
    assert not copies


def test_larger_groups_are_checked_again(copies):
    sizes = iter([2] * 4 + [4] * 8)
    assert values(group_batches(ring(12, 3), lambda: next(sizes), True)) == [
        [0, 1],
        [2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]
    assert len(copies) == 1 + 3 + 3


def ring(count, buffers):
    memory = torch.zeros(buffers, 2, 3).unbind()
    for i, buffer in zip(range(count), cycle([each.clone() for each in memory]), strict=False):
        yield (buffer.fill_(i),)


def test_batches_that_are_sampled_again_remain_right():
    batches = list(fresh(4, numpy=True))
    order = [0, 1, 2, 3, 1, 1, 0, 2, 3, 3]
    groups = group_batches((batches[i] for i in order), lambda: 4, True)
    assert values(groups) == [[0, 1, 2, 3], [1, 1, 0, 2], [3, 3]]


@pytest.mark.parametrize("numpy", [False, True])
def test_memory_that_is_overwritten_later_is_an_error(numpy):
    def chunks():  # six batches in one array, which is refilled while the second group waits
        memory = np.empty((6, 2, 3), np.float32)
        chunk = torch.from_numpy(memory) if numpy else torch.empty(6, 2, 3)
        for first in (0, 6):
            for i in range(6):
                (memory if numpy else chunk)[i] = first + i
            yield from ((rows,) for rows in chunk.unbind())

    groups = group_batches(chunks(), lambda: 4, True)
    assert values(islice(groups, 1)) == [[0, 1, 2, 3]]
    with pytest.raises(BatchError, match=r"let them yield a copy of each batch, x.clone\(\) or x.copy\(\)"):
        next(groups)


def test_the_same_list_of_new_tensors_is_joined_right():
    def lists():
        batch = []
        for part in x[:16].split(2):
            batch[:] = [part.clone(), part.clone()]
            yield batch

    (joined,) = tpufit.data.stream(lists(), cores=8).epoch(0)
    torch.testing.assert_close(joined[0], x[:16])
