"""Rows instead of batches are batched as PyTorch's DataLoader does, or refused with a sentence."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import tpufit
from tpufit.data import stream
from tpufit.data.forms import is_map_style, is_sample
from tpufit.errors import BatchError, DataError

X = torch.randn(16, 5, generator=torch.Generator().manual_seed(0))
Y = torch.arange(16) % 3


class Rows:
    """Not a subclass of PyTorch's Dataset, but its DataLoader accepts it."""

    def __len__(self):
        return 16

    def __getitem__(self, i):
        return X[i % 16], Y[i % 16]


class Dicts(Rows):
    def __getitem__(self, i):
        return {"x": X[i], "labels": int(Y[i])}


class Iterable(Rows):
    """Like a data set of Hugging Face, it can also be iterated."""

    def __iter__(self):
        return (self[i] for i in range(16))

    def __getitem__(self, i):
        return {"input_ids": [1, 2, 3], "label": i}


class Batches(Rows):
    """Like a loader of another library: its items are batches."""

    def __len__(self):
        return 4

    def __iter__(self):
        return (self[i] for i in range(4))

    def __getitem__(self, i):
        return X[4 * i : 4 * i + 4], Y[4 * i : 4 * i + 4]


@pytest.mark.parametrize(
    ("item", "is_one"),
    [
        ((X[0], Y[0]), True),
        ((X[0].numpy(), 2), True),
        ((X[0].numpy(), np.int64(2)), True),
        ((X[0], {"a": Y[0], "b": Y[0]}), True),
        ((torch.zeros(3, 8, 8), 1.0), True),
        ({"x": X[0], "labels": Y[0]}, True),
        ({"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1]}, True),
        ((X[0], torch.ones(1)), True),
        ((1.0, 2.0), True),
        (3, True),
        ((X, Y), False),
        ((X, Y.tolist()), False),
        ((X[:, 0], Y), False),
        (([*X[:4]], [*Y[:4]]), False),  # not stacked
        (((X, 0.5), Y), False),
        ((torch.zeros(40, 3), torch.zeros(8)), False),  # nodes and graphs
        ({"x": X, "scale": 0.5}, False),
        ({"input_ids": [[5, 6], [7, 8]]}, False),
        (X, False),
        (("a", "b"), False),
        (None, False),
    ],
)
def test_rows_and_batches(item, is_one):
    assert is_sample(item) is is_one


def test_data_with_numeric_indices():
    rows = [(X[i], Y[i]) for i in range(3)]
    assert [is_map_style(data) for data in (Rows(), Dicts(), Iterable(), TensorDataset(X), rows)] == [True] * 5
    others = (Batches(), [(X, Y)] * 3, X, [1.0, 2.0], [X, X], {}, DataLoader(rows), range(3), [], iter(rows))
    assert [is_map_style(data) for data in others] == [False] * len(others)


@pytest.mark.parametrize(
    "data", [Rows(), [(X[i], Y[i]) for i in range(16)], [(X[i].numpy(), int(Y[i])) for i in range(16)]]
)
def test_rows_are_batched_in_the_order_of_a_dataset(data):
    how = {"batch_size": 3, "cores": 2, "shuffle": True, "seed": 4}
    expected = list(stream(TensorDataset(X, Y), **how).epoch(1))
    for (x, y), (want_x, want_y) in zip(stream(data, **how).epoch(1), expected, strict=True):
        assert torch.equal(x, want_x) and torch.equal(y, want_y)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (
            lambda: ((X[i], Y[i]) for i in range(16)),
            r"x: float32 \(5,\), y: int64 \(\). Pass list\(rows\) or a Dataset",
        ),
        (lambda: iter([{"x": X[0], "labels": 1}]), r"x\['x'\]: float32 \(5,\), x\['labels'\]: int64 \(\)"),
        (lambda: iter([(X[0], torch.ones(1))]), r"y: float32 \(1,\)"),
        (lambda: DataLoader(TensorDataset(X, Y), batch_size=None), "has batch_size=None: give it a batch_size"),
        (lambda: {1, 2}, r"x: int64 \(\)"),
    ],
)
@pytest.mark.parametrize("cores", [1, 2])
def test_single_rows_are_refused(data, says, cores):
    with pytest.raises(DataError, match=f"x yields single rows, not batches: the first has .*{says}"):
        next(stream(data(), cores=cores).epoch(0))


def test_a_keras_dataset_is_refused_because_its_items_are_batches():
    kind = type("PyDataset", (Rows,), {"__module__": "keras.src.trainers"})
    with pytest.raises(DataError, match="x is a Keras Own, whose items are batches"):
        stream(type("Own", (kind,), {})())


@pytest.mark.parametrize(
    ("x", "y", "says"),
    [
        (
            [*X],
            Y,
            r"got \[5, 5, .* x is a list of 16 arrays, which count as separate inputs: .* pass torch.stack\(x\)$",
        ),
        ([*X.numpy()], Y, r"np.stack\(x\)$"),
        ([[1.0, 2.0], [3.0]], Y[:2], "x must be an array of numbers, got rows of different lengths"),
        (["a", "b"], Y[:2], r"x\[0\] must be an array of numbers, got text \('a'\)"),
        (X.numpy().astype(">f4"), Y, r"of dtype >f4 and shape .*, a dtype that PyTorch lacks: .*\.astype\('float32'\)"),
        (X.numpy().astype(np.longdouble), Y, r"dtype float128 .*convert it with .astype\('float32'\)"),
        (X, Y.numpy().astype(">i8"), r"y must be .*dtype >i8 .*convert it with .astype\('int64'\)"),
        (X, np.array(["a"] * 16), r"y must be an array of numbers, got text \('a'\)"),
        (X.numpy().astype(object), Y, r"x must be .* dtype object and shape \(16, 5\), .*astype\('float32'\)"),
        (np.array([np.ones(3), np.ones(2)], dtype=object), Y[:2], "rows of different lengths: pad them"),
        ({"a": X, "b": np.arange(16).astype("datetime64[D]")}, Y, r"x\['b'\] must be .* datetime64\[D\]"),
        (X.to_sparse(), Y, "x must be dense tensors, got a tensor that is sparse"),
        (torch.quantize_per_tensor(X, 0.1, 0, torch.qint8), Y, r"quantized \(qint8\): pass x.dequantize\(\)"),
        (X.to("meta"), Y, "meta, which has no values"),
        (torch.nested.nested_tensor([X[0], X[1]], layout=torch.jagged), Y[:2], "nested: pad it"),
        (nn.utils.rnn.pack_sequence([X[:3], X[:2]]), Y[:2], "x holds a PackedSequence, whose rows"),
        ({}, None, "x contains no array"),
    ],
)
def test_invalid_arrays(x, y, says):
    with pytest.raises(DataError, match=says) as refusal:
        stream(x, y)
    assert len(str(refusal.value)) < 300


@pytest.mark.parametrize("y", [Y.tolist(), [*Y], [*Y.numpy()], tuple(Y.tolist())])
def test_lists_of_numbers_are_arrays(y):
    if isinstance(y, tuple):
        y = [(number,) for number in y]
    ((x, targets),) = stream(X.tolist(), y).epoch(0)
    assert x.dtype is torch.float32 and torch.equal(x, X) and torch.equal(targets.flatten(), Y)
    ((x,),) = stream(X.tolist()).epoch(0)
    assert torch.equal(x, X)


@pytest.mark.cores(1, 8)
def test_rows_train_and_predict_as_arrays(cores):
    def trained(data, size=2):
        tpufit.set_random_seed(0)
        model = tpufit.Model(nn.Linear(5, 3))
        model.compile("sgd", "cross_entropy", scale_lr=None)
        history = model.fit(data, batch_size=size, epochs=2, shuffle=False, verbose=0, cores=cores).history
        return history["loss"], model

    losses, model = trained(TensorDataset(X, Y))
    assert trained(Rows())[0] == trained([(X[i], Y[i]) for i in range(16)])[0] == losses
    expected = F.linear(X, model.module.weight.cpu(), model.module.bias.cpu()).detach().numpy()
    assert model.predict(Rows(), batch_size=2, verbose=0) == pytest.approx(expected, abs=1e-5)
    assert model.evaluate(Rows(), batch_size=2, verbose=0) == model.evaluate(X, Y, batch_size=2, verbose=0)
    if cores == 1:  # on several cores, rows that are joined to one row fail in the first layer
        with pytest.raises(BatchError, match=r"single rows, not batches: from x of shape \(5,\) .* of shape \(3,\)"):
            model.predict(iter(X), verbose=0)
    for wrong in (lambda: iter([(X[0], Y[0])]), lambda: DataLoader(TensorDataset(X, Y), batch_size=None)):
        for run in (model.fit, model.evaluate, model.predict):
            with pytest.raises(DataError, match="yields single rows, not batches"):
                run(wrong(), verbose=0)
