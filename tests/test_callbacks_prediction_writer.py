"""PredictionWriter: whole files with every row in order, in the memory of a few batches; and none after an error."""

import numpy as np
import pytest
import torch
from torch import nn

import tpufit
from tpufit import runtime
from tpufit.callbacks import Callback, PredictionWriter
from tpufit.errors import CallbackError

pytestmark = pytest.mark.cores(1, 8)

X = np.random.default_rng(0).normal(size=(53, 4)).astype("float32")  # seven batches of 8, the last one of 5


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        y = self.linear(x)
        return {"logits": y, "boxes": (x[:, :2], y.argmax(1)), "mean": y.mean()}


def compiled(module=None, **arguments):
    torch.manual_seed(0)
    model = tpufit.Model(module or nn.Linear(4, 3))
    model.compile("sgd", "mse", **arguments)
    return model


def predict(model, cores, *callbacks, x=X):
    return model.predict(x, 8 // cores, verbose=0, callbacks=list(callbacks), cores=cores)


def files(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("k", [1, 3])
def test_every_row_in_order_and_each_batch_is_fetched_once(cores, tmp_path, k):
    model = compiled(steps_per_execution=k)
    expected = predict(model, cores)
    before = runtime.counts()
    assert predict(model, cores, PredictionWriter(tmp_path / "new")) is None
    counts = runtime.counts() - before
    assert counts.waits["outputs"] == 7 and not counts.graphs
    assert files(tmp_path / "new") == ["outputs.npy"]
    written = np.load(tmp_path / "new" / "outputs.npy", mmap_mode="r")
    assert written.dtype == np.float32 and np.array_equal(written, expected)


def test_a_file_for_each_output_of_a_nest(cores, tmp_path):
    model = compiled(Nested())
    expected = predict(model, cores)
    writer = PredictionWriter(tmp_path)
    predict(model, cores, writer)
    assert files(tmp_path) == ["outputs.boxes.0.npy", "outputs.boxes.1.npy", "outputs.logits.npy", "outputs.mean.npy"]
    assert np.array_equal(np.load(tmp_path / "outputs.logits.npy"), expected["logits"])
    assert np.array_equal(np.load(tmp_path / "outputs.boxes.1.npy"), expected["boxes"][1])
    assert np.array_equal(np.load(tmp_path / "outputs.mean.npy"), expected["mean"])
    predict(model, cores, writer, x=X[:9])  # the object again: its files are replaced
    assert np.load(tmp_path / "outputs.logits.npy").shape == (9, 3)


def test_bfloat16_becomes_float32(cores, tmp_path):
    predict(compiled(precision="bf16"), cores, PredictionWriter(tmp_path))
    assert np.load(tmp_path / "outputs.npy").dtype == np.float32


class Failing(Callback):
    reads_weights = False

    def on_predict_batch_begin(self, batch, logs=None):
        if batch == 5:
            raise KeyboardInterrupt


def test_after_an_error_the_old_files_are_there_and_nothing_else(cores, tmp_path):
    model, writer = compiled(), PredictionWriter(tmp_path)
    predict(model, cores, writer, x=X[:9])
    with pytest.raises(KeyboardInterrupt):
        predict(model, cores, Failing(), writer)
    assert files(tmp_path) == ["outputs.npy"] and len(np.load(tmp_path / "outputs.npy")) == 9
    try:
        raise ValueError
    except ValueError:
        predict(model, cores, writer)  # an error that is being handled outside is none of this prediction's
    assert len(np.load(tmp_path / "outputs.npy")) == 53


def test_rows_of_another_shape_are_an_error_and_leave_nothing(cores, tmp_path):
    model = tpufit.Model(nn.ReLU())
    data = [(torch.zeros(8 // cores, width),) for width in (4, 4, 5) for _ in range(cores)]  # joined by the cores
    with pytest.raises(CallbackError, match=r"after 16 rows of shape \(4,\) and float32 came some of \(5,\)"):
        model.predict(data, verbose=0, callbacks=[PredictionWriter(tmp_path)], cores=cores)
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("a/b", 1.0, r"becomes part of a file's, and \['a/b'\] can't"),
        ("note", "text", "outputs.note.npy would hold 'text'"),
    ],
)
def test_outputs_that_cant_be_written(cores, tmp_path, name, value, message):
    class Odd(nn.Module):
        def forward(self, x):
            return {"a": x + 1, name: x + value if isinstance(value, float) else value}

    with pytest.raises(CallbackError, match=message):
        predict(tpufit.Model(Odd()), cores, PredictionWriter(tmp_path))
    assert files(tmp_path) == []
