"""`fit(dry_run=True)` tries all of a training, and leaves nothing behind: neither in the model nor on the disk."""

import os
import tempfile
from typing import ClassVar

import numpy as np
import pytest
import torch
from test_lr_find import IMAGES, LABELS, Net, Signed, assert_equal, compiled, everything, fit
from torch import nn

import tpufit
from tpufit import runtime
from tpufit.callbacks import (
    Callback,
    EarlyStopping,
    LearningRateScheduler,
    ModelCheckpoint,
    OneCycle,
    SwapEMAWeights,
    TensorBoard,
)
from tpufit.errors import ArgumentError, CallbackError

on_cores = pytest.mark.cores(1, 8, timeout=600, quick=False)

HELD = (IMAGES[:300], LABELS[:300])


class Record(Callback):
    """Which hooks ran of this class; lists of its objects are copied."""

    calls: ClassVar[list] = []

    def __init__(self):
        self.losses = []

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(logs["loss"])
        self.calls.append(("train", batch))

    def on_test_batch_end(self, batch, logs=None):
        self.calls.append(("test", batch))

    def on_epoch_end(self, epoch, logs=None):
        self.calls.append(("epoch", epoch, sorted(logs)))


def files(folder):
    return sorted(os.path.join(at, name) for at, _, names in os.walk(folder) for name in names)


@on_cores
@pytest.mark.parametrize("optimizer", ["adamw", Signed])
@pytest.mark.parametrize("earlier", [0, 1])
def test_all_is_as_it_was_and_fit_goes_on_as_without(cores, tmp_path, capsys, monkeypatch, optimizer, earlier):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    options = {"optimizer": optimizer, "use_ema": True, "accumulate_steps": 3}
    model, twin = compiled(Net, **options), compiled(Net, **options)
    for one in (model, twin):
        if earlier:
            fit(one, cores, earlier)
        else:
            one.evaluate(*HELD, cores=cores, verbose=0)
        one.module.body.eval()
        tpufit.set_random_seed(0)
    before, history = everything(model), model.history
    assert_equal(everything(twin), before)

    record, run = Record(), tmp_path / "run"
    Record.calls.clear()
    callbacks = [
        record,
        ModelCheckpoint(run / "{epoch:02d}-{val_loss:.2f}.safetensors", save_best_only=True, initial_value_threshold=0),
        ModelCheckpoint(run / "steps", save_freq=1000),
        TensorBoard(run / "logs"),
        EarlyStopping(patience=1, restore_best_weights=True),
        OneCycle(0.1) if earlier else LearningRateScheduler(lambda epoch: 0.01),
        SwapEMAWeights(),
    ]
    capsys.readouterr()
    tried = model.fit(
        IMAGES, LABELS, 256 // cores, 9, verbose=2, callbacks=callbacks, cores=cores, class_weight={0: 2.0},
        validation_data=HELD, validation_freq=5, validation_step_freq=4, dry_run=True,
    )  # fmt: skip
    assert [call[:2] for call in record.calls] == [
        *[("train", i) for i in (0, 1)],
        ("test", 0),
        ("test", 1),
        ("epoch", 0),
    ]
    assert {"loss", "accuracy", "val_loss", "val_accuracy"} <= set(record.calls[-1][2]) <= {*tried.history}
    assert record.losses == [] and callbacks[1].best == 0 and callbacks[4].best is None
    assert capsys.readouterr().out.splitlines() == [
        f"dry run on {runtime.start(None, 'test')}: trained, validated and predicted on 2 batches with Record, "
        "ModelCheckpoint (1 file), ModelCheckpoint (9 files), TensorBoard (2 files), EarlyStopping, "
        f"{'OneCycle' if earlier else 'LearningRateScheduler'}, SwapEMAWeights. Everything is as it was"
    ]
    assert os.listdir(tmp_path) == ["temporary"] and not [*(tmp_path / "temporary").glob("tpufit*")]
    assert model.history is history and model._last_saved is None

    assert_equal(everything(model), before)
    assert fit(model, cores, 2) == fit(twin, cores, 2)
    assert_equal(everything(model), everything(twin))


@on_cores
def test_an_error_in_it_is_the_users_and_undone_too(cores, tmp_path):
    class Fail(Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise ValueError("in my callback")

    model, twin = compiled(Net), compiled(Net)
    tpufit.set_random_seed(0)
    checkpoint = ModelCheckpoint(tmp_path / "w.safetensors", save_freq=1)
    for callbacks, error in ((Fail(), CallbackError), ([checkpoint, Fail()], CallbackError), (Fail, ArgumentError)):
        with pytest.raises(error):
            model.fit(IMAGES, LABELS, 256 // cores, verbose=0, callbacks=callbacks, dry_run=3, cores=cores)
        assert files(tmp_path) == []
    twin.evaluate(*HELD, verbose=0)
    assert_equal(everything(model), everything(twin))


class Silent(Callback):
    """Would send something away."""

    def for_dry_run(self, folder):
        return None

    def on_epoch_end(self, epoch, logs=None):
        raise AssertionError


class Own:
    """No `Callback`, but with a hook."""

    def __init__(self):
        self.seen = 0

    def on_epoch_end(self, epoch, logs=None):
        self.seen += 1


@on_cores
def test_callbacks_may_be_left_out_or_be_of_any_class(cores, capsys):
    own, model = Own(), compiled(Net)
    capsys.readouterr()
    history = model.fit(
        IMAGES, LABELS, 256 // cores, verbose=2, callbacks=[Silent(), own], dry_run=1, cores=cores
    ).history
    assert own.seen == 0 and len(history["loss"]) == 1
    assert capsys.readouterr().out.endswith(": trained and predicted on 1 batch with Own. Everything is as it was\n")


@on_cores
def test_a_step_of_ones_own_predicts_only_if_it_says_how(cores, capsys):
    class Parts(tpufit.Model):
        def train_step(self, batch):
            x, y = batch
            loss = nn.functional.cross_entropy(self.module["net"](x), y)
            self.apply_gradients(loss)
            return {"loss": loss}

    class Predicting(Parts):
        def predict_step(self, batch):
            return self.module["net"](batch[0])

    for kind, says in ((Parts, "trained on 2"), (Predicting, "trained and predicted on 2")):
        model = kind(nn.ModuleDict({"net": Net()}))
        model.compile("sgd")
        capsys.readouterr()
        model.fit(IMAGES, LABELS, 256 // cores, verbose=1, dry_run=True, cores=cores)
        assert f": {says} batches. Everything" in capsys.readouterr().out


@on_cores
@pytest.mark.parametrize("wrong", [0, -1, 1.5, "yes"])
def test_wrong_numbers(cores, wrong):
    with pytest.raises(ArgumentError, match="dry_run must be a whole number of at least 1 or True, got"):
        compiled().fit(IMAGES, LABELS, dry_run=wrong, cores=cores)


@on_cores
def test_the_graphs_are_then_found_compiled(cores):
    model = compiled(Net)
    arguments = {"batch_size": 256 // cores, "verbose": 0, "validation_data": (IMAGES[:512], LABELS[:512])}
    model.fit(IMAGES, LABELS, dry_run=True, cores=cores, **arguments)
    before = runtime.counts()
    history = model.fit(IMAGES[:1024], LABELS[:1024], **arguments).history
    assert (runtime.counts() - before).graphs.get("train", 0) == 0 and np.isfinite(history["loss"]).all()
    assert isinstance(model.learning_rate, float) and torch.isfinite(model.state_dict()["head.bias"]).all()
