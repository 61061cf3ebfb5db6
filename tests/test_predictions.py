"""`predict` returns every row in order and holds each once; with `out` the rows are on disk, not in memory."""

import json

import numpy as np
import pytest
import torch
from torch import nn

import tpufit
from tpufit import runtime
from tpufit.callbacks import Callback
from tpufit.errors import ArgumentError, CallbackError, DataError
from tpufit.trainer.predictions import Predictions

on_cores = pytest.mark.cores(1, 8, timeout=300)

X = np.random.default_rng(0).normal(size=(77, 4)).astype("float32")  # two steps of 32 rows and one of 13


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 6)

    def forward(self, x):
        return {"a": self.a(x), "b": self.b(x).unflatten(1, (2, 3)).bfloat16()}


def model():
    torch.manual_seed(0)
    return tpufit.Model(Two())


def as_generator(cores):
    size = 32 // cores
    return (X[i : i + size] for i in range(0, 77, size))


@on_cores
def test_files_equal_results_in_memory(cores, tmp_path):
    trained = model()
    with torch.no_grad():
        expected = {name: value.float().numpy() for name, value in trained.module(torch.from_numpy(X)).items()}
    inside = trained.predict(X, 32 // cores, verbose=0, cores=cores)
    unknown = trained.predict(as_generator(cores), verbose=0)  # a generator, whose length is unknown
    paths = {"a": tmp_path / "a.npy", "b": str(tmp_path / "new" / "b.npy")}
    paths["a"].write_text("something older")
    files = trained.predict(as_generator(cores), verbose=0, out=paths)
    for name, value in expected.items():
        np.testing.assert_allclose(inside[name], value, atol=0.02 if name == "b" else 1e-6)
        assert inside[name].dtype == np.float32 and inside[name].flags.owndata
        assert np.array_equal(inside[name], unknown[name])
        assert isinstance(files[name], np.memmap) and not files[name].flags.writeable
        assert np.array_equal(inside[name], files[name])
        assert np.array_equal(inside[name], np.load(paths[name]))  # as other programs read it
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.npy", "b.npy", "new"]


@on_cores
def test_an_invalid_out_is_an_error_without_files(cores, tmp_path):
    class Fail(Callback):
        def on_predict_batch_end(self, batch, logs=None):
            if batch == 2:
                raise ValueError("here")

    trained, old = model(), tmp_path / "a.npy"
    old.write_text("older")
    with pytest.raises(ArgumentError, match=r"must be a path ending in '\.npy', .* got 'rows\.txt'"):
        trained.predict(X, verbose=0, out="rows.txt", cores=cores)
    with pytest.raises(
        ArgumentError, match="a path for each output, in the same form: .* returns a dict of 'a' and 'b'"
    ):
        trained.predict(X, verbose=0, out=old)
    with pytest.raises(CallbackError, match="here"):
        trained.predict(X, 8 // cores, verbose=0, out={"a": old, "b": tmp_path / "b.npy"}, callbacks=Fail())
    assert [path.name for path in tmp_path.iterdir()] == ["a.npy"] and old.read_text() == "older"


def joined(*batches, **arguments):
    predictions = Predictions(**arguments)
    for batch in batches:
        predictions.add(batch)
    return predictions.result()


def test_rows_are_joined_for_any_batches():
    parts = [torch.randn(n, 2) for n in (3, 5, 1)]  # a batch may also be larger than the first
    for batches in (None, 1, 3, 100):
        rows = joined(*parts, batches=batches)
        assert np.array_equal(rows, torch.cat(parts).numpy()) and rows.flags.owndata
    assert joined(*(torch.tensor(float(i)) for i in range(3))).tolist() == [0, 1, 2]
    assert joined(("x", parts[0]), ("y", parts[1]))[0] == ["x", "y"]


def test_rows_that_cannot_be_joined():
    with pytest.raises(DataError, match=r"rows of shape \(2,\) and others of \(3,\)\. Pad .* predict_on_batch"):
        joined(torch.ones(4, 2), torch.ones(4, 3))
    with pytest.raises(DataError, match="have the same structure, but a dict of 'b' came after another"):
        joined({"a": torch.ones(4)}, {"b": torch.ones(4)})


PEAK = """
    import json, resource, sys
    import numpy as np, torch, tpufit

    class Wide(torch.nn.Module):
        def forward(self, x):
            return x.expand(-1, 500)

    def batches():
        for _ in range(500):
            yield np.ones((200, 1), "float32")

    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    model = tpufit.Model(Wide())
    model.predict(np.ones((600, 1), "float32"), 200, verbose=0, cores=1)
    x = {x}
    before = peak()
    result = model.predict(x, {size}, verbose=0, out={out})
    print(json.dumps([(peak() - before) / result.nbytes, result.shape]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("x", "size", "out", "most"),
    [
        ('np.ones((100_000, 1), "float32")', 200, None, 1.2),
        # It grows by a quarter if its length is unknown.
        pytest.param("batches()", None, None, 1.5, marks=pytest.mark.soak),
        pytest.param('np.ones((100_000, 1), "float32")', 200, '"rows.npy"', 0.3, marks=pytest.mark.soak),
    ],
    ids=["arrays", "generator", "file"],
)
def test_predictions_are_not_held_twice_in_memory(run_python, x, size, out, most):
    """200 MB of outputs; a list of them, joined at the end, would take twice as much.

    Batches are small, because the number of batches in memory at a time depends on other work of the machine.
    """
    result = run_python(PEAK.format(x=x, size=size, out=out))
    assert result.returncode == 0, result.stderr
    share, shape = json.loads(result.stdout)
    assert shape == [100_000, 500] and share < most


class Noisy(nn.Dropout):
    """Drops in every mode, as for Monte Carlo dropout."""

    def forward(self, x):
        return nn.functional.dropout(x, self.p, training=True)


@on_cores
@pytest.mark.parametrize("eagerly", [False, True])
def test_each_call_draws_new_random_numbers_by_the_seed(cores, eagerly):
    made = tpufit.Model(nn.Sequential(nn.Linear(4, 8), Noisy(0.5)))
    made.compile("sgd", "mse", run_eagerly=eagerly, jit_compile=True)
    how = {"verbose": 0, "cores": cores}

    def draws():
        tpufit.set_random_seed(3)
        predicted = [made.predict(X[:64], 32 // cores, **how) for _ in range(2)]
        evaluated = [made.evaluate(X[:64], np.zeros((64, 8), "float32"), 32 // cores, **how) for _ in range(2)]
        made.reset_metrics()
        batches = [made.predict_on_batch(X[:32], cores=cores) for _ in range(2)]
        return predicted + batches, evaluated

    predicted, evaluated = draws()
    before = runtime.counts()
    again, losses = draws()
    counts = runtime.counts() - before
    assert evaluated == losses and evaluated[0] != evaluated[1]
    assert all(np.array_equal(one, other) for one, other in zip(predicted, again, strict=True))
    assert not np.array_equal(predicted[0], predicted[1]) and not np.array_equal(predicted[2], predicted[3])
    assert not np.array_equal(predicted[0][:32] == 0, predicted[0][32:] == 0)
    assert counts.graphs == {} and {*counts.waits} - {"capture", "audit"} <= {"outputs", "logs", "throttle"}


@on_cores
def test_predictions_inside_fit_keep_pytorchs_generator(cores):
    class Predict(Callback):
        def on_epoch_end(self, epoch, logs=None):
            state = torch.get_rng_state()
            rows.append([self.model.predict(X[:32], 32 // cores, verbose=0) for _ in range(2)])
            assert torch.equal(state, torch.get_rng_state())

    made, rows = tpufit.Model(nn.Sequential(nn.Linear(4, 8), Noisy(0.5))), []
    made.compile("sgd", "mse", scale_lr=None)
    made.learning_rate = 0.0
    made.fit(X, np.zeros((77, 8), "float32"), 32 // cores, 2, verbose=0, callbacks=Predict(), cores=cores)
    drawn = [one for epoch in rows for one in epoch]
    assert len({one.tobytes() for one in drawn}) == 4


@on_cores
def test_eager_steps_take_the_batches_of_all_cores(cores):
    class Look(Callback):
        def on_predict_batch_end(self, batch, logs=None):
            sizes.append(len(logs["outputs"]))

    def rows(eagerly):
        torch.manual_seed(0)
        made = tpufit.Model(nn.Linear(4, 3))
        made.compile(run_eagerly=eagerly)
        return made.predict(X, 32 // cores, verbose=0, callbacks=Look(), cores=cores)

    sizes = []
    np.testing.assert_allclose(rows(True), rows(False), atol=1e-6)
    assert sizes == [32, 32, 13] * 2
