"""Options of an optimizer that change at each step: as in plain PyTorch, without a graph for each value."""

import math
from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.optim import lr_scheduler

import tpufit
from tpufit import runtime
from tpufit.callbacks import Callback, LRScheduler, ModelCheckpoint, OneCycle
from tpufit.errors import ArgumentError

pytestmark = [pytest.mark.cores(1, 8, timeout=600), pytest.mark.soak_on(8)]

ROWS, STEPS, EPOCHS = 16, 8, 2
X = torch.randn(STEPS * ROWS, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(STEPS * ROWS) % 3


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def vary(option, step):
    """Return an option's value at a step, never 0."""
    if isinstance(option, tuple):
        return tuple(vary(number, step) for number in option)
    return option * (1 - 0.05 * (step % 4))


class Varying(Callback):
    """Sets an option anew for each step."""

    reads_weights = False

    def __init__(self, name):
        self.name = name

    def on_train_begin(self, logs=None):
        self.first = [group[self.name] for group in self.model.optimizer.param_groups]

    def on_train_step_begin(self, batch, logs=None):
        for group, first in zip(self.model.optimizer.param_groups, self.first, strict=True):
            group[self.name] = vary(first, batch)


def fit(make, cores, callbacks, epochs=EPOCHS, **options):
    model = tpufit.Model(net())
    model.compile(make, "cross_entropy", scale_lr=None, **options)
    before = runtime.counts()
    model.fit(X, Y, ROWS // cores, epochs, shuffle=False, verbose=0, callbacks=callbacks, cores=cores)
    return model, runtime.counts() - before


def plain(make, before_step):
    """Train in plain PyTorch, and call a function of the optimizer and the batch's number before each step."""
    module = net()
    optimizer = make(module.parameters())
    for _ in range(EPOCHS):
        for i, (x, y) in enumerate(zip(X.split(ROWS), Y.split(ROWS), strict=True)):
            before_step(optimizer, i)
            optimizer.zero_grad()
            F.cross_entropy(module(x), y).backward()
            optimizer.step()
    return module.state_dict()


def assert_equal(model, expected):
    for name, value in expected.items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=0, atol=2e-5)


SGD = partial(optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01)
ADAM = partial(optim.Adam, lr=0.01, weight_decay=0.01)
OPTIONS = [
    ("sgd", SGD, "momentum"),
    ("adamw", partial(optim.AdamW, lr=0.01), "betas"),
    *(
        pytest.param(*case, marks=pytest.mark.soak)
        for case in [
            ("sgd", SGD, "weight_decay"),
            ("sgd", partial(optim.SGD, lr=0.05, momentum=0.9, dampening=0.5), "dampening"),
            ("adam", ADAM, "eps"),
            ("adam", ADAM, "weight_decay"),
            ("adamw", partial(optim.AdamW, lr=0.01), "weight_decay"),
            ("rmsprop", partial(optim.RMSprop, lr=0.01, momentum=0.9), "alpha"),
            ("rmsprop", partial(optim.RMSprop, lr=0.01, momentum=0.9), "momentum"),
            ("adagrad", optim.Adagrad, "eps"),
            ("adadelta", optim.Adadelta, "rho"),
            ("adamax", optim.Adamax, "betas"),
            ("nadam", optim.NAdam, "momentum_decay"),
            ("radam", optim.RAdam, "betas"),
            ("asgd", optim.ASGD, "lambd"),
            ("rprop", optim.Rprop, "etas"),
            ("rprop", optim.Rprop, "step_sizes"),
        ]
    ),
]


@pytest.mark.parametrize("joined", [1, 3])
@pytest.mark.parametrize(("name", "make", "option"), OPTIONS)
def test_an_option_with_a_new_value_at_each_step(cores, name, make, option, joined):
    def change(optimizer, step):
        for group, first in zip(optimizer.param_groups, firsts, strict=True):
            group[option] = vary(first, step)

    firsts = [group[option] for group in make(net().parameters()).param_groups]
    model, counts = fit(make, cores, [Varying(option)], steps_per_execution=joined)
    assert_equal(model, plain(make, change))
    # A graph with the number inside, and one with it as an input; for the last two steps of 8 in threes as well.
    assert counts.graphs["train"] <= (2 if joined == 1 else 3)
    assert set(counts.captures.values()) <= {1} and not model.report().traced["train"]


CYCLES = {
    "one cycle": partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=STEPS * EPOCHS),
    "cyclic": partial(lr_scheduler.CyclicLR, base_lr=0.01, max_lr=0.1, step_size_up=3),
}


def follow(cycle):
    """Return a function for `plain` that takes a scheduler's steps."""
    schedules = []

    def change(optimizer, step):
        if schedules:
            schedules[0].step()
        else:
            schedules.append(cycle(optimizer))

    return change


@pytest.mark.soak_on(8)
@pytest.mark.parametrize("joined", [1, pytest.param(3, marks=pytest.mark.soak)])
@pytest.mark.parametrize("make", [SGD, ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize("name", CYCLES)
def test_pytorchs_cycles_of_the_momentum_cost_one_graph(cores, name, make, joined):
    model, counts = fit(make, cores, [LRScheduler(CYCLES[name], interval="step")], steps_per_execution=joined)
    assert_equal(model, plain(make, follow(CYCLES[name])))
    assert counts.graphs["train"] <= 2 and not counts.captures


@pytest.mark.parametrize("joined", [1, 3])
@pytest.mark.parametrize("make", [SGD, ADAM], ids=["sgd", "adam"])
def test_one_cycle_takes_pytorchs_momenta_in_one_graph(cores, make, joined):
    model, counts = fit(make, cores, [OneCycle(max_lr=0.1)], steps_per_execution=joined)
    assert_equal(model, plain(make, follow(CYCLES["one cycle"])))
    assert counts.graphs["train"] <= 2 and not counts.captures


@pytest.mark.parametrize("make", [SGD, pytest.param(ADAM, marks=pytest.mark.soak)], ids=["sgd", "adam"])
def test_a_resumed_training_equals_a_whole_one_to_the_bit(cores, tmp_path, make):
    weights = []
    for part, epochs in (("whole", 2), ("halves", 1), ("halves", 2)):
        model = tpufit.Model(net())
        model.compile(make, "cross_entropy", scale_lr=None)
        callbacks = [Varying("momentum" if make is SGD else "betas"), ModelCheckpoint(tmp_path / part)]
        how = {"shuffle": False, "verbose": 0, "cores": cores, "resume": epochs == 2 and part == "halves"}
        model.fit(X, Y, ROWS // cores, epochs, callbacks=callbacks, **how)
        weights.append(model.state_dict())
    assert all(torch.equal(weights[0][name], value) for name, value in weights[2].items())


class Rooted(optim.Optimizer):
    """A custom optimizer, whose step reads one of its options with a function of C, and changes another."""

    def __init__(self, parameters, lr=0.1, share=0.81, pace=1.0, ways=1):
        super().__init__(parameters, {"lr": lr, "share": share, "pace": pace, "ways": ways})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            factor = math.sqrt(group["share"])
            for p in group["params"]:
                for _ in range(group["ways"]):
                    p.sub_(p.grad * factor * group["pace"] * group["lr"])
            group["pace"] = group["pace"] * 0.97


@pytest.mark.soak_on(8)
@pytest.mark.parametrize("joined", [1, 3])
def test_numbers_that_the_step_itself_changes(cores, joined):
    model, _ = fit(Rooted, cores, [], steps_per_execution=joined)
    assert_equal(model, plain(Rooted, lambda optimizer, step: None))
    assert model.optimizer.param_groups[0]["pace"] == pytest.approx(0.97 ** (STEPS * EPOCHS))
    assert not model.report().traced["train"]


@pytest.mark.soak_on(8)
@pytest.mark.parametrize("joined", [1, 3])
@pytest.mark.parametrize("option", ["share", "ways"])
def test_a_number_that_is_read_as_a_number_needs_a_graph_for_each_value(cores, option, joined):
    def change(optimizer, step):
        for group in optimizer.param_groups:
            group[option] = value(step)

    class Changing(Callback):
        reads_weights = False

        def on_train_step_begin(self, batch, logs=None):
            change(self.model.optimizer, batch)

    def value(step):
        return 1 + step % 2 if option == "ways" else 0.5 + 0.1 * (step % 2)

    model, _ = fit(Rooted, cores, [Changing()], steps_per_execution=joined)
    assert_equal(model, plain(Rooted, change))


@pytest.mark.soak_on(8)
def test_many_graphs_for_a_number_that_is_read_are_reported(cores):
    class Falling(Callback):
        def on_train_batch_begin(self, batch, logs=None):
            self.model.optimizer.param_groups[0]["share"] *= 0.99

    with pytest.warns(UserWarning, match="compiled 4 times because the outcome of a comparison of the optimizer's"):
        fit(Rooted, cores, [Falling()], epochs=1)


@pytest.mark.soak_on(8)
def test_a_flag_may_not_change_between_steps_of_one_graph(cores):
    class Toggling(Callback):
        def on_train_step_begin(self, batch, logs=None):
            self.model.optimizer.param_groups[0]["maximize"] = batch % 2 == 1

    sentence = "maximize in the optimizer's param_groups has changed from False to True between two steps that run as "
    with pytest.raises(ArgumentError, match=f"{sentence}one graph.*steps_per_execution=1"):
        fit(SGD, cores, [Toggling()], steps_per_execution=4)
    fit(SGD, cores, [Toggling()], epochs=1)


@pytest.mark.soak_on(8)
@pytest.mark.parametrize("hook", ["on_train_batch_begin", "on_train_batch_end"])
def test_a_batch_hook_that_sets_numbers_of_joined_steps_warns(cores, hook):
    def set_momentum(self, batch, logs=None):
        self.model.optimizer.param_groups[0]["momentum"] = 0.5 + 0.01 * batch

    callback = type("Own", (Callback,), {hook: set_momentum})()
    with pytest.warns(
        UserWarning, match=rf"{hook} has changed momentum of the optimizer.*once for 4 steps.*step_begin"
    ):
        fit(SGD, cores, [callback], steps_per_execution=4)
    fit(SGD, cores, [callback], epochs=1)
