"""A subclass of Model may use any attribute name except `_engine`."""

import pytest
import torch
from torch import nn

import tpufit
from tpufit.errors import ArgumentError

pytestmark = pytest.mark.cores(1, 8)

# The private names that Model once had. Authors of a GAN or BYOL use some of them.
NAMES = [
    "_loss",
    "_class_weight",
    "_precision",
    "_formats",
    "_loss_format",
    "_layer_outputs",
    "_place",
    "_jit_compile",
    "_steps_per_execution",
    "_chosen_steps",
    "_rates",
    "_counters",
    "_gradients",
    "_accumulators",
    "_ema",
    "_averages",
    "_update",
    "_rows",
    "_collected",
    "_batches_waiting",
    "_updates",
    "_state",
    "_programs",
    "_running",
    "_runners",
    "_signatures",
    "_guards",
    "_transforms",
    "_shapes",
    "_label_range",
    "_step",
    "_seed",
    "_last_saved",
    "_recipe",
    "_wanted_saves",
    "_strict_at",
    "_own",
    "_passes",
    "_counted",
    "_batch_runs",
    "_scale_lr",
    "_matmul_precision",
    "_compiled",
    "_run_eagerly",
]
VALUES = [3, "a word", None, [1, 2], {"a": 1}, 0.5, nn.Linear(2, 2), torch.zeros(2), len, True]

X = torch.randn(70, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 3, (70,), generator=torch.Generator().manual_seed(1))


class Plain(tpufit.Model):
    def train_step(self, batch):
        x, y = batch
        y_pred = self(x)
        loss = self.compute_loss(x, y, y_pred) * 2
        self.apply_gradients(loss)
        self.update_metrics(x, y, y_pred)
        return {"loss": loss, "largest": y_pred.max()}


class Crowded(Plain):
    def __init__(self, module):
        super().__init__(module)
        for i, name in enumerate(NAMES):
            setattr(self, name, VALUES[i % len(VALUES)])


class CrowdedBefore(Plain):
    def __init__(self, module):
        for i, name in enumerate(NAMES):
            setattr(self, name, VALUES[(i + 3) % len(VALUES)])
        super().__init__(module)


def train(kind, cores):
    torch.manual_seed(0)
    model = kind(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)))
    model.compile(
        "adamw", "cross_entropy", metrics=["accuracy"], use_ema=True, ema_overwrite_frequency=3, accumulate_steps=2,
        steps_per_execution=2,
    )  # fmt: skip
    torch.manual_seed(1)
    history = model.fit(X, Y, 16 // cores, 3, verbose=0, validation_split=0.2, cores=cores).history
    model.train_on_batch(X[:16], Y[:16])
    rows = model.predict(X, verbose=0).tolist()
    replayed = {role: not cause for role, cause in model.report().traced.items()}
    return history, model.state_dict(), rows, replayed


def test_the_list_of_free_names_has_44_names():
    assert len(set(NAMES)) == 44


@pytest.mark.parametrize("kind", [Crowded, CrowdedBefore])
@pytest.mark.soak_on(8)
def test_a_subclass_that_takes_every_name_trains_to_the_same_bits(cores, kind):
    (expected, weights, rows, replayed), (history, own, own_rows, own_replayed) = (
        train(Plain, cores),
        train(kind, cores),
    )
    assert history == expected and own_rows == rows
    assert all(torch.equal(own[name], weights[name]) for name in weights)
    assert own_replayed == replayed == {"train": True, "eval": True, "predict": True}


def test_the_users_values_are_kept(cores):
    model = Crowded(nn.Linear(6, 3))
    model.compile("sgd", "cross_entropy")
    model.fit(X, Y, 16 // cores, verbose=0, cores=cores)
    assert [getattr(model, name) for name in NAMES] == [VALUES[i % len(VALUES)] for i in range(len(NAMES))]
    assert [name for name in vars(tpufit.Model(nn.Linear(1, 1))) if name.startswith("_")] == ["_engine"]


def test_the_reserved_name_is_an_error():
    class Sets(tpufit.Model):
        def __init__(self, module):
            super().__init__(module)
            self._engine = "diesel"

    with pytest.raises(ArgumentError, match=r"Sets sets self\._engine, the one private name"):
        Sets(nn.Linear(1, 1))
    with pytest.raises(ArgumentError, match="Defines defines _engine"):
        type("Defines", (tpufit.Model,), {"_engine": None})
    with pytest.raises(ArgumentError, match=r"Forgets\.__init__ must call super\(\)\.__init__"):
        type("Forgets", (tpufit.Model,), {"__init__": lambda self: None})().compile("sgd")


def test_a_second_compile_resets_its_counts(cores):
    """Only tensors and the count of steps outlive a compile: the next average overwrites after two updates, not one."""

    def weights(second):
        torch.manual_seed(0)
        model = tpufit.Model(nn.Linear(6, 3))
        options = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2}
        model.compile(lambda p: torch.optim.SGD(p, lr=0.0), "cross_entropy", scale_lr=None, **options)
        if second:  # three updates, which leave the weights unchanged
            model.fit(X[:48], Y[:48], 16 // cores, verbose=0, shuffle=False, cores=cores)
        model.compile(lambda p: torch.optim.SGD(p, lr=0.1), "cross_entropy", scale_lr=None, **options)
        model.fit(X[:48], Y[:48], 16 // cores, verbose=0, shuffle=False, cores=cores)
        return model.state_dict()

    one, other = weights(False), weights(True)
    assert all(torch.equal(one[name], other[name]) for name in one)
