"""Everything that training changes, in one place: planned, moved, saved, loaded and restored."""

import copy
import inspect

import pytest
import torch
from torch import nn

import tpufit
from tpufit.backend import HOST
from tpufit.errors import CheckpointMismatchError
from tpufit.optimizers import UpdatePlan
from tpufit.runtime.driver import driver
from tpufit.step.compile_config import CompileConfig
from tpufit.step.saved_state import collect_state, load_state
from tpufit.step.snapshot import put_back, take_snapshot
from tpufit.step.state import TrainNumbers, TrainState

pytestmark = pytest.mark.cores(1, 8, quick=True)


class Owner:
    """The part of a model that the state needs: a net and an optimizer."""

    def __init__(self, kind=torch.optim.Adam):
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        self.optimizer = kind(self.module.parameters(), lr=0.1)


def config(**arguments):
    """Return the arguments of `compile`, with its defaults."""
    defaults = {name: one.default for name, one in inspect.signature(tpufit.Model.compile).parameters.items()}
    return CompileConfig.of(defaults | arguments, nn.Linear(1, 1))


def stepped(owner):
    """Take a step of the optimizer on the host."""
    owner.module(torch.ones(2, 4)).sum().backward()
    owner.optimizer.step()
    owner.optimizer.zero_grad()


def values(owner):
    state = [value for own in owner.optimizer.state.values() for value in own.values()]
    return [tensor.detach().cpu().clone() for tensor in (*owner.module.state_dict().values(), *state)]


def same(some, others):
    return len(some) == len(others) and all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def plans(state, steps, last=False):
    return [(plan.takes_step, plan.overwrites) for plan in state.next_updates(steps, last)]


def test_without_accumulation_each_batch_is_a_step():
    state = TrainState(Owner(), config(use_ema=True))
    assert state.next_updates(3, last=True) == []
    state.numbers.step = 7
    assert state.optimizer_steps == 7 and state.count_batches_until(5) == 5


def test_a_step_follows_three_batches_or_the_epochs_last_batches():
    state = TrainState(Owner(), config(accumulate_steps=3))
    assert plans(state, 4) == [(False, False), (False, False), (True, False), (False, False)]
    assert state.numbers == TrainNumbers()  # a plan changes nothing
    state.count_updates(state.next_updates(4, last=False))
    assert (state.numbers.updates, state.numbers.batches_waiting, state.optimizer_steps) == (1, 1, 1)
    assert state.count_batches_until(2) == 5  # one of the six exists
    assert plans(state, 1) == [(False, False)] and plans(state, 1, last=True) == [(True, False)]
    assert plans(state, 3, last=True) == [(False, False), (True, False), (True, False)]
    state.count_updates([UpdatePlan(takes_step=True)])
    assert (state.numbers.updates, state.numbers.batches_waiting) == (2, 0)


def test_averages_overwrite_the_weights_every_second_step():
    options = {"use_ema": True, "ema_overwrite_frequency": 2}
    state = TrainState(Owner(), config(**options))
    assert plans(state, 4) == [(True, False), (True, True), (True, False), (True, True)]
    state.count_updates(state.next_updates(3, last=False))
    assert plans(state, 2) == [(True, True), (True, False)]
    state = TrainState(Owner(), config(**options, accumulate_steps=2))
    assert plans(state, 5) == [(False, False), (True, False), (False, False), (True, True), (False, False)]


def test_state_moves_in_place_and_back(place):
    owner = Owner()
    stepped(owner)
    before, objects = values(owner), list(owner.module.parameters())
    state = TrainState(owner, config(use_ema=True))
    assert state.move_to(place) and not state.move_to(place)
    tensors, names = state.tensors()
    assert {t.device.type for t in tensors.values()} == {driver().device_type}
    assert set(names.values()) == {*dict(owner.module.named_parameters()), *dict(owner.module.named_buffers())}
    assert [*tensors] == [id(t) for t in state.device.tensors]
    assert state.move_to(HOST) and not state.move_to(HOST)
    assert all(one is other for one, other in zip(objects, owner.module.parameters(), strict=True))
    assert same(before[:7], values(owner)[:7])  # a count of steps for each has become one for all
    assert owner.optimizer.state[objects[0]]["step"] == 1


def test_new_state_is_adopted_once():
    owner = Owner(torch.optim.SGD)
    state = TrainState(owner, config())
    state.move_to(HOST)
    assert not state.register_new()
    owner.module.register_buffer("seen", torch.zeros(2))
    assert state.register_new() and not state.register_new()
    assert any(tensor is owner.module.seen for tensor in state.device.tensors)


def test_saved_state_is_loaded_on_any_device(place):
    owner = Owner()
    stepped(owner)
    state = TrainState(owner, config(accumulate_steps=2, use_ema=True))
    state.move_to(HOST)
    state.numbers = TrainNumbers(3, 5, updates=1, batches_waiting=1, rows_seen=9, passes=2, chosen_steps={"eval": 4})
    owner.optimizer.param_groups[0]["lr"] = 0.25
    saved = copy.deepcopy(collect_state(state))
    other = Owner()
    loaded = TrainState(other, config(accumulate_steps=2, use_ema=True))
    loaded.move_to(place)
    loaded.numbers = TrainNumbers(rows_seen=1, chosen_steps={"train": 2})
    load_state(loaded, saved)
    assert loaded.numbers == TrainNumbers(3, 5, 1, 1, 1, 2, {"train": 2, "eval": 4})
    assert other.optimizer.param_groups[0]["lr"] == 0.25
    loaded.move_to(HOST)
    again = collect_state(loaded)
    for one, two in ((saved.weights, again.weights), (saved.training, again.training)):
        assert one.keys() == two.keys() and same([*one.values()], [*two.values()])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda saved: saved.numbers.update(left_out=["0.scale"]), "had frozen weights that this one lacks: 0.scale"),
        (lambda saved: saved.weights.pop("0.bias"), r"0\.bias"),
        (lambda saved: saved.optimizers.update(second={}), r"has the optimizers \['optimizer', 'second'\]"),
        (
            lambda saved: saved.optimizers["optimizer"].update({"class": "SGD"}),
            "has SGD, but the model's optimizer is Adam",
        ),
        (lambda saved: saved.optimizers["optimizer"]["groups"][0]["params"].pop(), r"\[3\] parameters then, \[4\] now"),
        (lambda saved: saved.training.pop("optimizer/exp_avg/0.bias"), "lacks optimizer/exp_avg/0.bias"),
        (
            lambda saved: saved.training.update({"optimizer/exp_avg/0.bias": torch.zeros(2)}),
            r"exp_avg/0\.bias: torch\.float32 \(2,\) then, torch\.float32 \(3,\) now",
        ),
    ],
)
def test_a_mismatched_state_changes_nothing(change, said):
    source, owner = Owner(), Owner()
    stepped(source)
    state, loaded = TrainState(source, config()), TrainState(owner, config())
    saved = copy.deepcopy(collect_state(state))
    loaded.move_to(HOST)
    change(saved)
    before = values(owner)
    with pytest.raises(CheckpointMismatchError, match=said):
        load_state(loaded, saved)
    assert same(before, values(owner)) and loaded.numbers == TrainNumbers()


def test_a_trial_is_undone_with_its_new_state(place, cores):
    owner = Owner()
    state = TrainState(owner, config())
    state.move_to(place)
    before, copied = take_snapshot(state), values(owner)
    assert state.placement.count == cores and before.values
    state.move_to(HOST)
    stepped(owner)
    owner.module.eval()
    owner.module.register_buffer("seen", torch.zeros(2))
    owner.optimizer.param_groups[0]["lr"] = 7.0
    state.numbers.step = 5
    torch.rand(3)
    state.move_to(place)
    put_back(state, before)
    drawn = torch.rand(2)
    before.random.restore()
    assert torch.equal(drawn, torch.rand(2))
    assert state.numbers == TrainNumbers() and owner.optimizer.param_groups[0]["lr"] == 0.1
    assert owner.module.training and not hasattr(owner.module, "seen")
    state.move_to(HOST)
    assert same(copied[:7], values(owner)[:7])


def test_a_reset_keeps_the_nets_tensors_and_drops_the_optimizers(place):
    owner = Owner()
    stepped(owner)
    state = TrainState(owner, config(accumulate_steps=2))
    state.move_to(place)
    state.numbers.batches_waiting = 1
    weight = owner.module[0].weight
    buffers = [buffer.cpu() for buffer in owner.module.buffers()]
    state.reset({id(weight): torch.full((3, 4), 2.0)})
    assert owner.module[0].weight is weight and weight.eq(2).all() and weight.grad is None
    assert state.placement is HOST and not state.numbers.batches_waiting
    assert same(buffers, list(owner.module.buffers()))
    assert not state.optimizers and not any(owner.optimizer.state.values())
