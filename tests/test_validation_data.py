"""Validation data are checked before the first epoch, so that errors in them cost no training."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tpufit
from tpufit.errors import ArgumentError, BatchError, DataError, LabelError

pytestmark = pytest.mark.cores(1, 8, quick=False)

X = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
Y = np.arange(32) % 3


def compiled(net=None, loss="cross_entropy", **arguments):
    torch.manual_seed(0)
    model = tpufit.Model(nn.Linear(4, 3) if net is None else net)
    model.compile("sgd", loss, metrics=["accuracy"], **arguments)
    return model


def fit(model, held_out, cores, x=X, y=Y):
    return model.fit(x, y, validation_data=held_out, verbose=0, cores=cores).history


def loader(x, y, **arguments):
    return DataLoader(TensorDataset(torch.from_numpy(x), torch.from_numpy(y)), 4, **arguments)


WRONG = {
    "no targets": (X, DataError, "the loss needs targets"),
    "four parts": ([(X, Y, Y, Y)], DataError, "got 4 items"),
    "another width": ((X[:, :3], Y), BatchError, r"fails on a batch of x: float32 \(\d+, 3\)"),
    "two inputs": (((X, X), Y), BatchError, "x is a tuple of 2"),
    "several targets": ((X, (Y, Y)), ArgumentError, "as the targets are, got one tensor"),
    "shape of targets": ((X, Y[:, None]), BatchError, "Expected classes"),
    "labels": ((X, Y + 1), LabelError, "label 3 is outside the module's 3 classes"),
    "labels of a loader": (loader(X, Y + 1), LabelError, "label 3"),
    "labels of workers": (loader(X, Y + 1, num_workers=2), LabelError, "label 3"),
    "labels of a data set": (loader(X, Y + 1).dataset, LabelError, "label 3"),
}


@pytest.mark.parametrize(("held_out", "kind", "says"), WRONG.values(), ids=WRONG)
def test_no_step_is_taken(cores, held_out, kind, says):
    model = compiled()
    with pytest.raises(kind, match=f"^validation_data: .*{says}"):
        fit(model, held_out, cores)
    assert model.steps_taken == 0
    assert set(fit(model, (X, Y), cores)) == {"loss", "accuracy", "val_loss", "val_accuracy"}


def test_arrays_in_a_list_arent_validation_data(cores):
    for held_out, parts in (([X, Y], r"\(x, y\)"), ([X, Y.tolist(), X[:, 0]], r"\(x, y, sample_weight\)")):
        with pytest.raises(ArgumentError, match=f"validation_data is a list of . arrays, .* pass a tuple, {parts}"):
            fit(compiled(), held_out, cores)


def test_the_check_doesnt_repeat_the_modules_warnings(cores):
    class Warns(nn.Linear):
        def forward(self, x):
            warnings.warn(f"runs on {x.device.type}", stacklevel=1)
            return super().forward(x)

    with pytest.warns(UserWarning, match="runs on") as caught:
        fit(compiled(Warns(4, 3)), (X, Y), cores)
    assert {str(warning.message) for warning in caught} == {"runs on xla"}


def test_errors_in_all_data_name_the_training_data(cores):
    with pytest.raises(LabelError, match="^label 3"):
        fit(compiled(), (X, Y + 1), cores, y=Y + 1)


def test_an_iterator_loses_no_batch(cores):
    size = 16 // cores
    model = compiled()
    history = fit(model, ((X[i : i + size], Y[i : i + size]) for i in range(0, 32, size)), cores)
    assert history["val_loss"] == pytest.approx([model.evaluate(X, Y, size, verbose=0)[0]], abs=1e-6)


def test_a_module_that_reads_values_isnt_checked(cores):
    class Picky(nn.Linear):
        seen = None

        def forward(self, x):
            if x.isnan().any():
                raise ValueError("NaN")
            self.seen = x.shape
            return super().forward(x)

    with pytest.raises(LabelError, match="^(?!validation_data)"):
        fit(compiled(Picky(4, 3), run_eagerly=True), (X, Y + 1), cores)

    class Keeping(nn.Linear):
        kept = None

        def forward(self, x):
            if self.kept is None:
                self.kept = torch.zeros(3, device=x.device)
            return super().forward(x) + self.kept

    hooked, net = [], Keeping(4, 3)
    handle = net.register_forward_hook(lambda module, inputs, output: hooked.append(output.device.type))
    model = compiled(net, run_eagerly=True)
    assert np.isfinite(fit(model, (X, Y), cores)["val_loss"]).all()
    assert net.kept.device.type == "cpu" and "meta" not in hooked
    handle.remove()


def test_data_in_batches_ignore_the_batch_size_of_training(cores, recwarn):
    """A loader would be refused with it, and an iterable would warn."""
    batches = [(X[i : i + 4], Y[i : i + 4]) for i in range(0, 32, 4)]
    values = [
        compiled().fit(X, Y, 8, shuffle=False, validation_data=held_out, verbose=0, cores=cores).history["val_accuracy"]
        for held_out in (loader(X, Y), batches, (X, Y))
    ]
    assert values[0] == values[1] == values[2] and not [w for w in recwarn if "batch_size" in str(w.message)]
    with pytest.raises(ArgumentError, match="validation_data is a DataLoader"):
        compiled().fit(X, Y, validation_batch_size=8, validation_data=loader(X, Y), verbose=0, cores=cores)
