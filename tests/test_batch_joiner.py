"""Batches of an iterable on several cores: joining by rows, splitting, and warnings."""

import warnings
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import tpufit
from tpufit.data import stream
from tpufit.data.batch_joiner import Joiner
from tpufit.data.to_tensors import as_tensors
from tpufit.errors import ArgumentError, BatchError, DataError

zeros, arange = torch.zeros, torch.arange
Pair = namedtuple("Pair", "a b")


def images(count, height=8):
    return tuple(zeros(3, height, height) for _ in range(count))


def boxes(count):
    return tuple({"boxes": zeros(i, 4), "label": torch.tensor(i)} for i in range(count))


def form(nest):
    """Return the shapes of a nest; for a long list or tuple, the number of its items."""
    if isinstance(nest, torch.Tensor):
        return tuple(nest.shape)
    if isinstance(nest, dict):
        return {key: form(value) for key, value in nest.items()}
    return [form(item) for item in nest] if len(nest) <= 3 else len(nest)


@pytest.mark.parametrize(
    ("batch", "joined"),
    [
        ((zeros(2, 3), [{"boxes": zeros(2, 2)}] * 2), [(4, 3), 4]),  # as many boxes as rows
        ((zeros(4, 3), [zeros(i, 4) for i in range(4)]), [(8, 3), 8]),
        ((list(images(2)), zeros(2)), [4, (4,)]),
        ((images(2), boxes(2)), [4, 4]),  # as zip(*samples) creates them
        ((images(5), tuple(zeros(8, 8) for _ in range(5))), [10, 10]),
        ((images(2), (torch.tensor(0), torch.tensor(1))), [4, 4]),
        ((zeros(2, 3), ("a", "b")), [(4, 3), 4]),
        ((zeros(3, 5), [2, 0, 1]), [(6, 5), (6,)]),
        (([[1.0, 2.0], [3.0, 4.0]], [0, 1]), [(4, 2), (4,)]),
        (
            [{"x": zeros(3), "y": torch.tensor(1)} for _ in range(4)],
            8,
        ),  # as from a collate_fn that returns its argument
        ([(zeros(3), torch.tensor(1)) for _ in range(4)], 8),
        (([zeros(2, 3), zeros(2, 5)], zeros(2)), [[(4, 3), (4, 5)], (4,)]),  # as many inputs as rows
        (((zeros(4, 8), zeros(4, 8)), (zeros(4, 8), zeros(4))), [[(8, 8), (8, 8)], [(8, 8), (8,)]]),
        ([zeros(2, 3), zeros(2)], [(4, 3), (4,)]),
        (Pair(zeros(2, 3), zeros(2)), [(4, 3), (4,)]),
        (((zeros(4, 3), 0.5), zeros(4)), [[(8, 3), ()], (8,)]),
    ],
)
def test_lists_of_rows_and_columns(batch, joined):
    assert form(Joiner("x")([as_tensors(batch)] * 2)) == joined


def test_texts_in_arrays_are_joined():
    whole = Joiner("x")([(zeros(2), np.array(["a", "b"])), (zeros(1), np.array(["c"]))])
    assert whole[1].tolist() == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((zeros(8, 5), arange(7)), (zeros(7, 5), arange(8))),
        (((zeros(8, 5), zeros(7)), zeros(8)), ((zeros(7, 5), zeros(8)), zeros(7))),
        ((zeros(8, 5), zeros(8), zeros(7)), (zeros(7, 5), zeros(7), zeros(8))),
        ({"x": zeros(8, 5), "labels": zeros(7)}, {"x": zeros(7, 5), "labels": zeros(8)}),
        (((zeros(8, 5), zeros(40)), zeros(7)), ((zeros(7, 5), zeros(40)), zeros(8))),
    ],
)
def test_misaligned_rows_are_refused(first, second):
    with pytest.raises(
        BatchError, match=r"^data must yield batches whose parts have equally many rows, got .*\(8, 5\)"
    ):
        Joiner("data")([first, second])


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        ({"x": zeros(2), "y": zeros(2)}, {"x": zeros(2)}, "the same keys"),
        (((zeros(2), zeros(2)), zeros(2)), ((zeros(2),), zeros(2)), r"tuples of \[2, 1\] items"),
        ((zeros(2), zeros(2)), ([zeros(2)], zeros(2)), r"\['Tensor', 'list'\]"),
        ((zeros(2), 0.5), (zeros(2), 1.5), r"different single numbers, \[0.5, 1.5\]"),
        ((zeros(2).to_sparse(), zeros(2)), (zeros(2).to_sparse(), zeros(2)), "sparse"),
    ],
)
def test_batches_of_different_forms_are_refused(first, second, says):
    with pytest.raises(DataError, match=says):
        Joiner("x")([as_tensors(first), as_tensors(second)])


@pytest.mark.parametrize(
    ("batches", "says"),
    [
        ([((zeros(10, 3), arange(2).repeat_interleave(5)), zeros(2))] * 2, "different numbers of rows"),
        ([((arange(40), arange(0, 40, 5)), zeros(8))] * 2, "different numbers of rows"),  # of an EmbeddingBag
        ([((zeros(8, 3), torch.tensor([3, 0, 1, 2, 7, 6, 5, 4])), zeros(8))] * 2, "restart at 0"),  # partners
        ([(zeros(8, 3), arange(8))] * 2, "restart at 0"),  # targets of a contrastive loss
        ([(zeros(6, 3), arange(6) // 2)] * 2, "restart at 0"),  # an episode's own classes
        ([(zeros(8, 3), arange(8) % 3)] * 2, ""),
        ([(zeros(4, 3), torch.tensor([2, 0, 1, 3]))] * 2, ""),  # one of each class
        ([((zeros(8, 3), arange(8) + 8 * i), zeros(8)) for i in range(2)], ""),  # indices into all rows of the data
        ([(zeros(8, 3), arange(8 * i, 8 * i + 8) // 3) for i in range(2)], ""),  # sorted by class
    ],
)
def test_joining_batches_with_indices_into_them_is_a_warning(batches, says):
    join = Joiner("x")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        join(batches)
        join(batches)
    assert [says in str(one.message) and "batch_size='global'" in str(one.message) for one in caught] == [True] * bool(
        says
    )


class Whole(IterableDataset):
    def __iter__(self):
        return iter([(zeros(8, 3), zeros(8)), (zeros(5, 3), zeros(5))])


@pytest.mark.parametrize(
    "data",
    [
        lambda: list(Whole()),
        lambda: (batch for batch in Whole()),
        Whole,
        lambda: DataLoader(TensorDataset(zeros(13, 3), zeros(13)), batch_size=8),
        lambda: DataLoader(Whole(), batch_size=None),
    ],
)
@pytest.mark.parametrize("cores", [1, 4])
def test_global_batches_are_not_joined(data, cores):
    made = stream(data(), batch_size="global", cores=cores)
    assert made.is_global and made.batch_size is None
    assert [len(x) for x, _ in made.epoch(0)] == [8, 5]


def test_rows_have_no_global_batches():
    for data in (np.ones(4), TensorDataset(zeros(4)), [(zeros(3), 1)] * 4):
        with pytest.raises(ArgumentError, match="batch_size='global' goes with a DataLoader or an iterable of batches"):
            stream(data, batch_size="global")
    with pytest.raises(ArgumentError, match="batch_size must be a whole number of at least 1 or 'global', got 'whole'"):
        stream([(zeros(2), zeros(2))], batch_size="whole")


FEATURES = torch.randn(16, 5, 3, generator=torch.Generator().manual_seed(0))  # 16 graphs with 5 nodes each


class Graphs(tpufit.Model):
    def loss_of(self, batch):
        (x, graph), y = batch
        sums = torch.zeros(len(y), device=x.device).index_add_(0, graph, self(x)[:, 0])
        return (sums - y).pow(2).mean()

    def train_step(self, batch):
        loss = self.loss_of(batch)
        self.apply_gradients(loss)
        return {"loss": loss}

    def test_step(self, batch):
        return {"loss": self.loss_of(batch)}


def graphs(count):
    return [
        ((part.flatten(0, 1), arange(len(part)).repeat_interleave(5)), part.sum((1, 2)))
        for part in FEATURES.split(count)
    ]


@pytest.mark.cores(1, 8)
@pytest.mark.parametrize("arguments", [{}, {"run_eagerly": True}, {"steps_per_execution": 2}], ids=str)
def test_graphs_in_global_batches_train_as_in_pytorch(cores, arguments, capsys):
    torch.manual_seed(0)
    net, twin = nn.Linear(3, 1), nn.Linear(3, 1)
    twin.load_state_dict(net.state_dict())
    model = Graphs(net)
    model.compile(lambda p: torch.optim.SGD(p, lr=0.01), **arguments)
    how = {"batch_size": "global", "cores": cores}
    history = model.fit(graphs(8), epochs=2, validation_data=graphs(8), verbose=2, **how).history
    batch = f"1 batch per step, split over {cores} cores | lr 0.01, not scaled |"
    assert batch in capsys.readouterr().out or cores == 1 or "run_eagerly" in arguments
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.01)

    def loss_of(batch):
        (x, graph), y = batch
        return (torch.zeros(len(y)).index_add_(0, graph, twin(x)[:, 0]) - y).pow(2).mean()

    expected, held_out = [], []
    for _ in range(2):
        losses = []
        for batch in graphs(8):
            losses.append(loss_of(batch))
            optimizer.zero_grad()
            losses[-1].backward()
            optimizer.step()
        expected.append(float(sum(losses).detach()) / 2)
        held_out.append(float(sum(map(loss_of, graphs(8))).detach()) / 2)
    assert history["loss"] == pytest.approx(expected, rel=1e-4)
    assert history["val_loss"] == pytest.approx(held_out, rel=1e-4)
    if not arguments:
        assert model.evaluate(graphs(8), verbose=0, **how) == pytest.approx(held_out[-1], rel=1e-4)
        x = FEATURES.flatten(0, 1)
        assert torch.allclose(
            torch.tensor(model.predict(iter(x.split(40)), verbose=0, **how)), twin(x).detach(), atol=1e-4
        )


@pytest.mark.cores(1, 8)
def test_an_image_has_its_own_targets(cores):
    class Boxes(tpufit.Model):
        def train_step(self, batch):
            x, targets = batch
            pairs = zip(x, targets, strict=True)
            each = torch.stack([(self(row[None]) - target["boxes"].sum()).pow(2).mean() for row, target in pairs])
            self.apply_gradients(each.mean())
            return {"loss": each.mean()}

    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
    targets = [{"boxes": torch.full((2, 4), i / 8)} for i in range(8)]
    size = 8 // cores if cores == 1 else 1
    torch.manual_seed(0)
    model = Boxes(nn.Linear(3, 1))
    expected = [(model.module(row) - 8 * i / 8).pow(2).item() for i, row in enumerate(x)]
    model.compile("sgd", scale_lr=None)
    batches = ((x[i : i + size], targets[i : i + size]) for i in range(0, 8, size))
    assert model.fit(batches, verbose=0, cores=cores).history["loss"] == pytest.approx([np.mean(expected)], rel=1e-4)


@pytest.mark.cores(8)
def test_misaligned_batches_are_refused_as_on_one_core(cores):
    model = tpufit.Model(nn.Linear(5, 3))
    model.compile("sgd", "cross_entropy")
    x, y = torch.randn(15, 5), arange(15) % 3
    with pytest.raises(BatchError, match="equally many rows"):
        model.fit(iter([(x[:8], y[:7]), (x[8:], y[7:])]), verbose=0, cores=cores)
    assert model.steps_taken == 0


@pytest.mark.parametrize(("own", "expected"), [(False, [(2, 4), (2, 2)]), (True, [(4, 8), (2, 4)])])
def test_global_batches_of_two_hosts(own, expected):
    batches = [(zeros(4, 3), zeros(4)), (zeros(2, 3), zeros(2))]
    data = tpufit.data.PerHost(batches) if own else batches
    made = stream(data, batch_size="global", cores=4, local_shards=[0, 1])
    assert [(len(local.batch[0]), local.rows) for local in made.epoch(0)] == expected
