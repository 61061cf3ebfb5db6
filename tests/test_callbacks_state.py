"""A callback that resumes from its state, through JSON, behaves as without an interruption."""

import json
from functools import partial

import numpy as np
import pytest
from fake_model import FakeModel
from torch.optim import lr_scheduler

from tpufit.callbacks import (
    BackupAndRestore,
    EarlyStopping,
    History,
    LRScheduler,
    ModelCheckpoint,
    OneCycle,
    ReduceLROnPlateau,
)

LOSSES = [1.0, 0.8, 0.9, 0.85, 0.7, 0.75, 0.74, 0.73, 0.72, 0.71]
EPOCHS, STEPS, CUT = 10, 3, 4


def through_json(state):
    """Convert a state as a checkpoint does: weights stay tensors, everything else becomes JSON."""
    weights = state.get("best_weights")
    plain = json.loads(json.dumps({name: value for name, value in state.items() if name != "best_weights"}))
    return plain if weights is None else plain | {"best_weights": {n: t.clone() for n, t in weights.items()}}


def begin(callback, model, steps=STEPS):
    callback.set_model(model)
    callback.set_params({"epochs": EPOCHS, "steps": steps, "verbose": 0})
    callback.on_train_begin({})
    return callback


def train(callback, seen, first=(0, 0), until=(EPOCHS, 0)):
    """Call the hooks from one (epoch, batch) to another; append the rate of each step to `seen`."""
    epoch, batch = first
    while (epoch, batch) < until and not callback.model.stop_training:
        callback.on_epoch_begin(epoch, {})
        while batch < STEPS and (epoch, batch) < until:
            callback.on_train_step_begin(batch, {"iterations": epoch * STEPS + batch})
            seen.append(callback.model.learning_rate)
            batch += 1
        if batch < STEPS:
            return
        callback.model.weight = epoch
        logs = {"loss": LOSSES[epoch]}
        callback.on_epoch_end(epoch, logs)
        seen.append(logs)
        epoch, batch = epoch + 1, 0


def resumed(make, first=(CUT, 0), steps=STEPS):
    """Return the results of an interrupted training that new objects resume, and of an uninterrupted training."""
    whole, parts = [], []
    callback = begin(make(), FakeModel(lr=0.4), steps)
    train(callback, whole)
    cut = begin(make(), FakeModel(lr=0.4), steps)
    train(cut, parts, until=first)
    state = through_json(cut.state_dict())
    # The checkpoint keeps the optimizer's rates separately.
    again = begin(make(), FakeModel(lr=cut.model.learning_rate), steps)
    again.load_state_dict(state)
    train(again, parts, first=first)
    assert parts == whole
    return callback, again


@pytest.mark.parametrize("patience", [3, 5, 9])
def test_early_stopping(patience):
    whole, again = resumed(partial(EarlyStopping, "loss", patience=patience, restore_best_weights=True))
    for name in ("wait", "best", "best_epoch", "stopped_epoch"):
        assert getattr(again, name) == getattr(whole, name)
    again.on_train_end({})
    assert again.model.weight == again.best_epoch


def test_the_best_weights_survive_an_interruption():
    stopping = begin(EarlyStopping("loss", restore_best_weights=True), FakeModel())
    stopping.model.weight = 7
    stopping.on_epoch_end(0, {"loss": 0.5})
    again = begin(EarlyStopping("loss", restore_best_weights=True), FakeModel())
    again.load_state_dict(through_json(stopping.state_dict()))
    again.on_epoch_end(1, {"loss": 0.6})
    again.on_train_end({})
    assert again.model.weight == 7


@pytest.mark.parametrize("cooldown", [0, 2])
def test_reduce_lr_on_plateau_resumes_as_if_uninterrupted(cooldown):
    whole, again = resumed(partial(ReduceLROnPlateau, "loss", patience=2, factor=0.5, cooldown=cooldown))
    assert again.model.learning_rate == whole.model.learning_rate < 0.4


def sequential(optimizer):
    phases = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.SequentialLR(optimizer, phases, milestones=[3])


def chained(optimizer):
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(optimizer, total_iters=6), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    )


SCHEDULES = {
    "lambda": partial(lr_scheduler.LambdaLR, lr_lambda=lambda n: 0.9**n),
    "multiplicative": partial(lr_scheduler.MultiplicativeLR, lr_lambda=lambda n: 1 - n / 100),
    "step": partial(lr_scheduler.StepLR, step_size=3),
    "multi-step": partial(lr_scheduler.MultiStepLR, milestones=[2, 5, 13]),
    "constant": partial(lr_scheduler.ConstantLR, total_iters=6),
    "linear": partial(lr_scheduler.LinearLR, total_iters=7),
    "exponential": partial(lr_scheduler.ExponentialLR, gamma=0.9),
    "polynomial": partial(lr_scheduler.PolynomialLR, total_iters=20, power=2.0),
    "cosine": partial(lr_scheduler.CosineAnnealingLR, T_max=8),
    "warm restarts": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=3, T_mult=2),
    "cyclic": partial(lr_scheduler.CyclicLR, base_lr=0.1, max_lr=0.4, step_size_up=4),
    "one cycle": partial(lr_scheduler.OneCycleLR, max_lr=0.4, total_steps=40),
    "plateau": partial(lr_scheduler.ReduceLROnPlateau, patience=1),
    "sequential": sequential,
    "chained": chained,
}


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")  # PyTorch's SequentialLR passes it
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(
    ("interval", "first"), [("epoch", (CUT, 0)), ("step", (CUT, 0)), ("step", (CUT, 2)), ("step", (0, 0))]
)
def test_every_pytorch_scheduler(name, interval, first):
    if name == "plateau" and interval == "step":
        interval = "epoch"  # it depends on a log of the epoch
    resumed(partial(LRScheduler, SCHEDULES[name], interval, monitor="loss"), first)


@pytest.mark.parametrize(("name", "falls"), [("exponential", True), ("plateau", False)])
def test_a_schedule_by_epoch_counts_the_skipped_epoch(name, falls):
    callback = begin(LRScheduler(SCHEDULES[name], monitor="loss"), FakeModel(lr=0.4))
    callback.on_epoch_begin(0, {})
    again = begin(LRScheduler(SCHEDULES[name], monitor="loss"), FakeModel(lr=0.4))
    again.load_state_dict(through_json(callback.state_dict()))
    again.on_epoch_begin(1, {})  # after resuming with "next_epoch", epoch 0 has no end
    assert again.model.learning_rate == pytest.approx(0.36 if falls else 0.4)
    train(again, [], first=(1, 0))
    assert again.scheduler.last_epoch == 10 - (not falls)


@pytest.mark.parametrize("first", [(CUT, 0), (CUT, 2)], ids=["between epochs", "in an epoch"])
@pytest.mark.parametrize("steps", [STEPS, None], ids=["steps known", "steps unknown"])
def test_one_cycle(first, steps):
    whole, _ = resumed(partial(OneCycle, 0.4, EPOCHS * STEPS, cycle_momentum=False), first, steps)
    assert whole.model.learning_rate < 1e-4


def test_historys_state_is_restored():
    history, again = History(), History()
    for epoch in range(4):
        validation = {"val_loss": 1} if epoch % 2 else {}
        history.on_epoch_end(epoch, {"loss": 0.5, "recall": np.array([0.25, 0.5]), **validation})
    again.load_state_dict(through_json(history.state_dict()))
    assert again.epoch == [0, 1, 2, 3] and again.history["val_loss"] == [1, 1]
    assert again.history["recall"] == [[0.25, 0.5]] * 4
    again.on_epoch_end(4, {"loss": 0.4})
    assert (again.epoch[-1], again.history["loss"][-1]) == (4, 0.4)
    assert len(history.epoch) == len(history.history["loss"]) == 4  # they share no objects


@pytest.mark.parametrize(
    ("make", "state"),
    [
        (partial(ModelCheckpoint, save_freq=4), {"monitor": {"best": 0.5, "wait": 0}, "steps_since_save": 2}),
        (partial(BackupAndRestore, save_freq=4), {"steps_since_save": 2}),
    ],
)
@pytest.mark.parametrize("in_epoch", [False, True])
def test_a_resumed_training_saves_at_the_same_steps(tmp_path, make, state, in_epoch):
    callback = begin(make(tmp_path), FakeModel())
    if in_epoch:
        callback.on_epoch_begin(1, {})
    callback.model.steps_taken = 14  # as the checkpoint's model had
    callback.load_state_dict(through_json(state))
    if not in_epoch:
        callback.on_epoch_begin(1, {})
    saved = []
    for batch in range(2, 9):
        callback.model.steps_taken += 1
        callback.on_train_batch_end(batch, {})
        saved += [callback.model.steps_taken] * (len(callback.model.wanted) > len(saved))
    callback.on_exception(ValueError(), {})
    callback.on_train_end({})
    assert saved == [16, 20]


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
def test_later_training_doesnt_change_a_state():
    """Another thread may write the state while training continues."""
    for callback in (
        EarlyStopping("loss", patience=5, restore_best_weights=True),
        History(),
        LRScheduler(SCHEDULES["sequential"]),
    ):
        begin(callback, FakeModel())
        callback.on_epoch_end(0, {"loss": 1.0})
        state = callback.state_dict()
        as_it_was = repr(state)
        for epoch in range(1, 5):
            callback.model.weight = epoch
            callback.on_epoch_end(epoch, {"loss": 1 / epoch - 0.1})
        assert repr(state) == as_it_was != repr(callback.state_dict())
