"""show_batch, show_top_losses and ConfusionMatrix: images, titles, and refused arguments."""

import numpy as np
import pytest
import sklearn.metrics
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_progress_shown import run_cell
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import tpufit
from tpufit.callbacks import ConfusionMatrix, EarlyStopping, TensorBoard
from tpufit.diagnostics import plots
from tpufit.errors import ArgumentError, CallbackError

X = torch.rand(30, 1, 4, 5, generator=torch.Generator().manual_seed(0))
Y = torch.arange(30) % 3
NAMES = ["cat", "dog", "horse"]


@pytest.fixture(autouse=True)
def pyplot(monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


def titles(figure):
    return [ax.get_title() for ax in figure.axes]


def drawn(figure):
    return [np.asarray(ax.images[0].get_array()) for ax in figure.axes]


@pytest.mark.parametrize(
    "data",
    [
        (X, Y),
        (X.numpy(), Y.numpy()),
        (TensorDataset(X, Y),),
        (DataLoader(TensorDataset(X, Y), batch_size=16),),
        ((pair for pair in [(X, Y)]),),
    ],
    ids=["tensors", "arrays", "dataset", "loader", "iterable"],
)
def test_the_first_images_with_their_targets(data):
    figure = tpufit.show_batch(*data, count=5, labels=NAMES)
    assert titles(figure) == ["cat", "dog", "horse", "cat", "dog"]
    shown = X[:5, 0]
    expected = (shown - shown.min()) / (shown.max() - shown.min())
    np.testing.assert_allclose(np.stack(drawn(figure)), expected, atol=1e-6)


def test_other_targets_and_image_formats():
    assert titles(tpufit.show_batch(X[:2], torch.tensor([0.5, 2.0]))) == ["0.5", "2"]
    assert titles(tpufit.show_batch(X[:2], X[:2])) == titles(tpufit.show_batch(X[:2])) == ["", ""]
    assert titles(tpufit.show_batch(X[:3], Y[:3], labels=["cat"])) == ["cat", "1", "2"]
    colors = np.random.default_rng(0).integers(0, 255, (2, 3, 8, 5), dtype=np.uint8)
    for images in (colors, np.moveaxis(colors, 1, -1)):  # raw bytes
        np.testing.assert_array_equal(np.stack(drawn(plots.images(images))), np.moveaxis(colors, 1, -1))
    with pytest.raises(ArgumentError, match=r"images must have shape .*, got \(32, 8\)"):
        tpufit.show_batch(np.zeros((40, 8)), np.zeros(40), count=32)
    with pytest.raises(ArgumentError, match=r"with 1, 3 or 4 channels, got \(2, 5, 6, 7\)"):
        plots.images(np.zeros((2, 5, 6, 7)))


@pytest.mark.cores(1, 8)
def test_the_largest_losses_are_of_single_rows(cores):
    torch.manual_seed(0)
    model = tpufit.Model(nn.Sequential(nn.Flatten(), nn.Linear(20, 3)))
    model.compile("sgd", "cross_entropy")
    model.fit(X, Y, batch_size=16 // cores, cores=cores, verbose=0)
    predicted = torch.from_numpy(model.predict(X, verbose=0))
    losses = F.cross_entropy(predicted, Y, reduction="none")
    rows = losses.argsort(descending=True)[:4].tolist()
    for data in ((X, Y), (DataLoader(TensorDataset(X, Y), batch_size=4),)):
        figure = tpufit.show_top_losses(model, *data, count=4, labels=NAMES)
        for row, title in zip(rows, titles(figure), strict=True):
            best = predicted[row].argmax()
            wrong = "" if best == Y[row] else f", not {NAMES[best]}"
            assert title == f"row {row}, loss {losses[row]:.3g}\n{NAMES[Y[row]]}{wrong}"
    error = tpufit.show_top_losses(model, X, Y, count=1, loss=lambda p, y: (p - y).abs().max())
    worst = (predicted - Y[:, None]).abs().amax(1)
    assert titles(error)[0].startswith(f"row {worst.argmax()}, loss {worst.max():.3g}\n")
    model.compile("sgd", nn.CrossEntropyLoss(weight=torch.ones(3)))
    with pytest.raises(ArgumentError, match="the model's loss keeps tensors on the device: pass a function"):
        tpufit.show_top_losses(model, X, Y)
    with pytest.raises(ArgumentError, match="needs targets"):
        tpufit.show_top_losses(model, X, loss=F.cross_entropy)


@pytest.mark.cores(1)
def test_regression_and_a_nan_loss(cores):
    model = tpufit.Model(nn.Flatten())
    model.compile(None, "mse")
    x = torch.tensor([1.0, 5.0, 0.0, 3.0]).view(4, 1, 1, 1)
    figure = tpufit.show_top_losses(model, x, torch.ones(4, 1), count=2)
    assert titles(figure) == ["row 1, loss 16\n1, not 5", "row 3, loss 4\n1, not 3"]
    figure = tpufit.show_top_losses(model, x, torch.ones(4, 1), count=2, loss=lambda p, y: (p * y).log() * 0 + p)
    assert titles(figure) == ["row 2, loss inf\n1, not 0", "row 1, loss 5\n1, not 5"]


@pytest.mark.cores(1)
def test_confusion_matrices_in_tensorboard(cores, tmp_path, monkeypatch, pyplot):
    matrices = []
    own = plots.confusion_matrix
    monkeypatch.setattr(plots, "confusion_matrix", lambda *given: matrices.append(given) or own(*given))
    model = tpufit.Model(nn.Sequential(nn.Flatten(), nn.Linear(20, 3)))
    model.compile("sgd", "cross_entropy", metrics=["confusion_matrix"])
    board = TensorBoard(tmp_path, write_graph=False)
    callbacks = [ConfusionMatrix(labels=NAMES, freq=2), board]
    model.fit(X, Y, validation_data=(X[:12], Y[:12]), epochs=4, verbose=0, callbacks=callbacks)
    events = EventAccumulator(str(tmp_path / "train")).Reload()
    assert [event.step for event in events.Images("val_confusion_matrix")] == [2, 4]
    ((_, names), (last, _)) = matrices
    predicted = model.predict(X[:12], verbose=0).argmax(1)
    assert names == NAMES and pyplot.get_fignums() == []
    assert last.tolist() == sklearn.metrics.confusion_matrix(Y[:12], predicted, labels=[0, 1, 2]).tolist()
    model.compile("sgd", "cross_entropy", metrics=["accuracy"])
    with pytest.raises(CallbackError, match="metrics are loss, accuracy: compile.metrics=.'confusion_matrix'"):
        model.fit(X, Y, verbose=0, callbacks=callbacks)
    with pytest.raises(CallbackError, match="draws into a logger, and fit has none: callbacks=.TensorBoard"):
        model.fit(X, Y, verbose=0, callbacks=ConfusionMatrix())


@pytest.mark.cores(1)
def test_a_missing_matrix_is_reported(cores, tmp_path):
    model = tpufit.Model(nn.Sequential(nn.Flatten(), nn.Linear(20, 3)))
    model.compile("sgd", "cross_entropy", metrics=["confusion_matrix"], run_eagerly=True)
    board = TensorBoard(tmp_path, write_graph=False)
    with pytest.warns(UserWarning, match="draws nothing: no epoch will have the log 'val_confusion_matrix'. Pass val"):
        model.fit(X, Y, verbose=0, callbacks=ConfusionMatrix(board))
    model.fit(X, Y, verbose=0, callbacks=[board, ConfusionMatrix(log="confusion_matrix")])
    assert EventAccumulator(str(tmp_path / "train")).Reload().Images("confusion_matrix")


def test_a_logger_must_be_able_to_draw():
    with pytest.raises(ArgumentError, match="logger must be a callback that draws"):
        ConfusionMatrix(EarlyStopping())


CELL = """
%matplotlib inline
from tpufit.callbacks import History
history = History()
history.on_epoch_end(0, {"loss": 0.5})
"""


@pytest.mark.slow
@pytest.mark.parametrize("last", ["history.plot()", pytest.param("figure = history.plot()", marks=pytest.mark.soak)])
def test_a_notebook_shows_a_figure_once(tmp_path, monkeypatch, last):
    monkeypatch.delenv("MPLBACKEND")
    outputs = run_cell(CELL + last, tmp_path)
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1, outputs
