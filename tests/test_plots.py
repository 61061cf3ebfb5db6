"""Plots: their lines, and the error without matplotlib."""

import sys

import numpy as np
import pytest
import torch
from torchmetrics.functional import confusion_matrix

from tpufit.callbacks import History
from tpufit.diagnostics import plots
from tpufit.errors import ArgumentError


@pytest.fixture(autouse=True)
def pyplot(monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


def history_of(*epochs):
    history = History()
    for epoch, logs in enumerate(epochs):
        history.on_epoch_end(epoch, logs)
    return history


def test_a_plot_for_each_metric_with_validation(tmp_path):
    rare = {"loss": 0.4, "accuracy": 0.8, "val_loss": 0.5, "val_accuracy": 0.7}
    figure = history_of({"loss": 0.5, "accuracy": 0.6}, rare, {"loss": 0.3, "accuracy": 0.9}, rare).plot()
    assert [ax.get_title() for ax in figure.axes] == ["loss", "accuracy"]
    training, validation = figure.axes[0].lines
    assert (list(training.get_xdata()), list(training.get_ydata())) == ([1, 2, 3, 4], [0.5, 0.4, 0.3, 0.4])
    assert (list(validation.get_xdata()), list(validation.get_ydata())) == ([2, 4], [0.5, 0.5])
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["training", "validation"]
    figure.savefig(tmp_path / "history.png")
    assert (tmp_path / "history.png").read_bytes().startswith(b"\x89PNG")


def test_logs_that_are_arrays_are_omitted():
    figure = history_of({"loss": 0.5, "recall": np.zeros(3), "val_only": 1.0}).plot()
    assert [ax.get_title() for ax in figure.axes] == ["loss", "only"]
    with pytest.raises(ArgumentError, match="no logs to draw"):
        History().plot()


def test_a_confusion_matrix_of_torchmetrics():
    predicted, true = torch.tensor([0, 1, 1, 2, 2, 2]), torch.tensor([0, 0, 1, 2, 2, 1])
    matrix = confusion_matrix(predicted, true, task="multiclass", num_classes=3)
    axes = plots.confusion_matrix(matrix, labels=["cat", "dog", "horse"]).axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("predicted", "true")
    assert [text.get_text() for text in axes.texts] == ["1", "1", "0", "0", "1", "1", "0", "0", "2"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["cat", "dog", "horse"]
    np.testing.assert_allclose(axes.images[0].get_array(), [[0.5, 0.5, 0], [0, 0.5, 0.5], [0, 0, 1]])


def test_shares_have_decimals_and_empty_classes_are_blank():
    axes = plots.confusion_matrix(np.array([[0.25, 0.75], [0.0, 0.0]])).axes[0]
    assert [text.get_text() for text in axes.texts] == ["0.25", "0.75", "0.00", "0.00"]
    assert axes.images[0].get_array()[1].tolist() == [0, 0]


def test_a_confusion_matrix_of_many_classes_has_no_numbers():
    assert not plots.confusion_matrix(np.eye(100)).axes[0].texts


@pytest.mark.parametrize(
    ("matrix", "labels", "message"),
    [
        (np.zeros((3, 2, 2)), None, r"shape \(classes, classes\), got \(3, 2, 2\)"),
        (np.zeros((2, 3)), None, r"got \(2, 3\)"),
        (np.zeros((2, 2)), ["a"], "labels must be 2, one per class, got 1"),
    ],
)
def test_wrong_arguments(matrix, labels, message):
    with pytest.raises(ArgumentError, match=message):
        plots.confusion_matrix(matrix, labels)


def test_without_matplotlib_the_error_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for draw in (history_of({"loss": 0.5}).plot, lambda: plots.confusion_matrix(np.eye(2))):
        with pytest.raises(ImportError, match=r"pip install 'tpufit\[plot\]'"):
            draw()
