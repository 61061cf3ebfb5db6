"""One object for each role keeps its program, sums and keys; passes borrow it one after the other."""

import pytest
import torch
from engines import engine_of
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset

import tpufit
from tpufit import runtime

pytestmark = pytest.mark.cores(1)

X, Y = torch.randn(32, 4, generator=torch.Generator().manual_seed(0)), torch.arange(32) % 3


def make():
    torch.manual_seed(0)
    model = tpufit.Model(nn.Linear(4, 3))
    model.compile("sgd", "cross_entropy")
    return model


def test_a_role_outlives_its_passes_and_keeps_its_graphs(cores):
    model = make()
    model.fit(X, Y, 8, verbose=0, validation_data=(X, Y), cores=cores)
    roles = engine_of(model).roles
    first = {name: (role, role.program, role.sums, role.runner) for name, role in roles.items()}
    before = runtime.counts()
    model.fit(X, Y, 8, verbose=0, validation_data=(X, Y))
    model.evaluate(X, Y, 8, verbose=0)
    assert not (runtime.counts() - before).graphs
    for name in ("train", "eval"):
        role, program, sums, runner = first[name]
        assert (roles[name], role.program, role.sums) == (role, program, sums) and role.runner is not runner
    assert first["predict"][1] is roles["predict"].program is None


def test_moved_tensors_reset_the_program_and_keep_logs(cores):
    model = make()
    model.fit(X, Y, 8, verbose=0, cores=cores)
    logs = model.get_metrics_result()
    model.to_cpu()
    assert engine_of(model).roles["train"].program is None and model.get_metrics_result() == logs
    model.fit(X, Y, 8, verbose=0)
    program = engine_of(model).roles["train"].program
    assert program.prepare_replay(next(iter(program.traced_keys)))


class Doubled(Dataset):
    """Rows that the device doubles."""

    def device_transform(self, batch):
        return tree_map(lambda rows: rows * 2, batch)

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index]


class PredictsInside(tpufit.callbacks.Callback):
    """Predicts other rows after each batch of a prediction."""

    def __init__(self):
        super().__init__()
        self.inside = False

    def on_predict_batch_end(self, batch, logs=None):
        if not self.inside:
            self.inside = True
            self.model.predict(X, 4, verbose=0)
            self.inside = False


def test_a_nested_pass_keeps_the_outer_transform(cores):
    model, plain = make(), make()
    expected = plain.predict(2 * X, 4, verbose=0, cores=cores)
    model.predict(Doubled(), 4, verbose=0, cores=cores)
    model.predict(X, 4, verbose=0)  # so that both graphs exist, and can be replayed
    found = model.predict(Doubled(), 4, verbose=0, callbacks=[PredictsInside()])
    torch.testing.assert_close(torch.from_numpy(found), torch.from_numpy(expected))


def test_each_role_has_its_own_keys(cores):
    model = make()
    model.fit(X, Y, 8, verbose=0, cores=cores)
    model.evaluate(X, Y, 8, verbose=0)
    train, held = (engine_of(model).roles[name].program.traced_keys for name in ("train", "eval"))
    assert len(train) == len(held) == 1
    model.optimizer.param_groups[0]["weight_decay"] = 0.1
    model.fit(X, Y, 8, verbose=0)
    assert (len(train), len(held)) == (2, 1)
