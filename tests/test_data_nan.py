"""NaN in data is reported once, by the host, before a step computes with it."""

import re
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tpufit
from tpufit.data import stream


def data(rows=12, bad=7, dtype=torch.float32):
    x = torch.ones(rows, 3, dtype=dtype)
    x[bad, 1] = float("nan")
    return x, torch.zeros(rows)


def said(made, epochs=2):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for epoch in range(epochs):
            list(made.epoch(epoch))
    return [str(one.message) for one in caught]


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: stream(*data(), batch_size=2), "^x has NaN, first in row 7: "),
        (lambda: stream(*data(dtype=torch.bfloat16), batch_size=2), "^x has NaN, first in row 7: "),
        (lambda: stream({"a": data()[0].numpy()}, batch_size=2), r"^x\['a'\] has NaN, first in row 7: "),
        (lambda: stream(torch.ones(12), data()[0]), "^y has NaN, first in row 7: "),
        (lambda: stream(*data(), name="validation_data"), "^validation_data has NaN"),
        (lambda: stream(torch.ones(12), data()[0], name="validation_data"), "^y of validation_data has NaN"),
        (lambda: stream(DataLoader(TensorDataset(*data()), 2), cores=2), "^x has NaN, first in row 3 of batch 2: "),
        (lambda: stream([data(2, 0)] * 3), "^x has NaN, first in row 0 of batch 1: "),
        (lambda: stream([(torch.ones(3, 2), np.array([0, np.nan, 0]))]), "^y has NaN, first in row 1 of batch 1: "),
    ],
)
def test_nan_is_reported_once(made, says):
    (message,) = said(made())
    assert re.search(says, message)


def test_later_epochs_are_not_searched():
    x, y = torch.ones(4, 3), torch.zeros(4)
    made = stream([(x, y)])
    assert said(made, 1) == []
    x[0] = float("nan")
    assert said(made, 2) == []


@pytest.mark.parametrize("x", [torch.tensor([[float("inf"), -float("inf")]] * 4), torch.ones(4, 2, dtype=torch.long)])
def test_data_without_nan_give_no_message(x):
    assert said(stream(x)) == []


@pytest.mark.cores(1, 8)
def test_a_training_on_nan_warns_at_the_users_line(cores):
    x, y = data(16)
    model = tpufit.Model(nn.Linear(3, 1))
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="x has NaN, first in row 7") as caught:
        model.fit(x, y, batch_size=16 // cores, epochs=2, verbose=0, cores=cores)
    assert [one.filename for one in caught] == [__file__]
