"""Tables and series of pandas, polars and pyarrow can replace arrays, and columns that aren't numbers are named."""

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from torch import nn

import tpufit
from tpufit.data import stream
from tpufit.errors import DataError

GENERATOR = np.random.default_rng(0)
COLUMNS = {"size": GENERATOR.normal(size=24), "rooms": GENERATOR.integers(0, 5, 24), "new": np.arange(24) % 2 == 0}
X = np.stack(list(COLUMNS.values()), axis=1).astype("float32")
Y = GENERATOR.integers(0, 2, 24)
KINDS = {
    "pandas": (pd.DataFrame, pd.Series),
    "pandas nullable": (lambda c: pd.DataFrame(c).convert_dtypes(), lambda v: pd.Series(v).convert_dtypes()),
    "polars": (pl.DataFrame, pl.Series),
    "pyarrow": (pa.table, pa.array),
}


def rows(*data, **how):
    return [[part.tolist() for part in batch] for batch in stream(*data, batch_size=10, **how).epoch(0)]


@pytest.mark.parametrize(("table", "series"), KINDS.values(), ids=KINDS)
def test_tables_equal_their_arrays(table, series):
    assert rows(table(COLUMNS), series(Y)) == rows(X, Y)
    assert rows(table(COLUMNS), series(Y), shuffle=True, cores=2) == rows(X, Y, shuffle=True, cores=2)
    for column in COLUMNS.values():
        ((x,),) = stream(series(column)).epoch(0)
        ((expected,),) = stream(column).epoch(0)
        assert x.dtype is expected.dtype and torch.equal(x, expected)
    ((x,),) = stream({name: series(column) for name, column in COLUMNS.items()}).epoch(0)
    assert list(x) == list(COLUMNS) and x["rooms"].dtype is torch.int64 and x["new"].shape == (24,)
    ((x,),) = stream(table({"rooms": COLUMNS["rooms"]})).epoch(0)
    assert x.shape == (24, 1) and x.dtype is torch.int64
    (batch,) = stream([(table(COLUMNS), series(Y))]).epoch(0)  # of a user's own batches
    assert torch.equal(batch[0], torch.from_numpy(X)) and torch.equal(batch[1], torch.from_numpy(Y))


def test_categories_count_as_their_values():
    ((x,),) = stream(pd.Series(pd.Categorical([30, 10, 30]))).epoch(0)
    assert x.tolist() == [30, 10, 30]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (
            pd.DataFrame({"size": [1.0, 2.0], "town": ["Ulm", "Bonn"]}),
            "column 'town' must hold .* row 0 has 'Ulm'",
        ),
        (pl.DataFrame({"size": [1.0, 2.0], "town": ["Ulm", "Bonn"]}), "column 'town' .* row 0 has 'Ulm'"),
        (pa.table({"size": [1.0, 2.0], "town": ["Ulm", "Bonn"]}), "column 'town' .* encode text as numbers"),
        (pd.Series(pd.Categorical(["a", "b"]), name="kind"), "column 'kind' .* row 0 has 'a'"),
        (pd.DataFrame({"rooms": pd.array([1, None], dtype="Int64")}), "column 'rooms' .* row 1 has nan. Fill missing"),
        (pd.DataFrame({"new": pd.array([True, None], dtype="boolean"), "a": [1, 2]}), "column 'new' .* row 1 has <NA>"),
        (pd.DataFrame({"a": [1, 2], "size": [0.5, None]}), "column 'size' .* row 1 has nan"),
        (pl.DataFrame({"rooms": [1, None]}), "column 'rooms' .* row 1 has nan"),
        (pa.array([None, 1]), "a Int64Array must hold numbers, but row 0 has nan"),
        (pd.DataFrame({"day": pd.to_datetime(["2026-01-01"])}), "column 'day' .* row 0 has"),
        (pd.Series([[1, 2], [3]], name="words"), r"column 'words' .* row 0 has \[1, 2\]"),
    ],
)
def test_columns_that_arent_numbers_are_named(wrong, says):
    with pytest.raises(DataError, match=says):
        stream(wrong)
    with pytest.raises(DataError, match=says):
        list(stream([(wrong, wrong)]).epoch(0))


@pytest.mark.cores(1, 8)
def test_a_model_accepts_tables_instead_of_arrays(cores):
    def values(x, y, weight):
        torch.manual_seed(0)
        model = tpufit.Model(nn.Linear(3, 2))
        model.compile("sgd", "cross_entropy", metrics=["accuracy"], scale_lr=None)
        size = {"batch_size": 8 // cores, "verbose": 0, "cores": cores}
        fits = [
            model.fit(x, y, sample_weight=weight, validation_data=(x, y, weight), shuffle=False, **size),
            model.fit(x, y, validation_split=1 / 3, shuffle=False, **size),
        ]
        return (
            [history.history for history in fits],
            [model.evaluate(x, y, sample_weight=weight, **size), model.test_on_batch(x, y)],
            [model.train_on_batch(x, y, weight)],
            [model.predict(x, **size).tolist(), model.predict_on_batch(x).tolist(), model(x).tolist()],
        )

    weight = np.linspace(0, 1, 24)
    expected = values(X, Y, weight)
    for table, series in KINDS.values():
        assert values(table(COLUMNS), series(Y), series(weight)) == expected
