"""A compiled model's programs and state: at the start of each `fit` and `compile`, and after a trial step."""

import pytest
import torch
from engines import engine_of, engine_on
from torch import nn

import tpufit
from tpufit import runtime
from tpufit.backend import HOST, Cores
from tpufit.errors import ArgumentError
from tpufit.runtime.aliases import identify_storage, is_shared_elsewhere
from tpufit.runtime.driver import driver
from tpufit.step.engine import FitOptions
from tpufit.step.runner import StepRunner

pytestmark = pytest.mark.cores(1, 8, quick=True)

X = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(32) % 3


def make(**arguments):
    torch.manual_seed(0)
    model = tpufit.Model(nn.Linear(4, 3))
    model.compile(**{"optimizer": "adam", "loss": "cross_entropy"} | arguments)
    return model


def engine(cores, **arguments):
    """Return the engine of a compiled model, on its cores."""
    return engine_on(cores, make(**arguments))


def step(own, rows=32):
    """Take a step of training."""
    run = StepRunner(own, "train")
    for group in run.send([(X[:rows], Y[:rows])]):
        run(group)


def weights(own):
    own.expose()
    return [tensor.clone() for tensor in runtime.to_host(list(own.model.module.parameters()), "test")]


def equal(some, others):
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def test_inside_fit_an_evaluations_seed_depends_on_the_run():
    own, other = engine_of(make()), engine_of(make())
    for one in (own, other):
        one.begin_fit(None, FitOptions(fitting=True), seed=7)
    first = [own.seed_of_pass() for _ in range(3)]
    torch.rand(2)  # of the data, in their thread
    assert [other.seed_of_pass() for _ in range(3)] == first and len(set(first)) == 3
    assert own.state.numbers.passes == 3
    other.begin_fit(None, FitOptions(fitting=True), seed=8)
    assert other.seed_of_pass() not in first


def test_outside_of_fit_the_seed_is_from_pytorchs_generator():
    own = engine_of(make())
    torch.manual_seed(5)
    first, second = own.seed_of_pass(), own.seed_of_pass()
    torch.manual_seed(5)
    assert own.seed_of_pass() == first != second and own.state.numbers.passes == 0


def test_a_trial_is_undone_and_its_graphs_are_not_kept(cores):
    own = engine(cores)
    step(own)
    before, traced = weights(own), len(own.roles["train"].program.traced_keys)
    with pytest.raises(ZeroDivisionError), own.trial():
        step(own)
        assert not equal(before, weights(own)) and own.state.numbers.step == 2
        raise ZeroDivisionError
    assert equal(before, weights(own)) and own.state.numbers.step == traced == 1
    with own.trial():  # its values are still held at the end
        step(own)
    assert equal(before, weights(own)) and own.state.numbers.step == 1
    assert own.roles["train"].program is None
    step(own)
    assert own.state.numbers.step == 2


@pytest.mark.parametrize(("scaling", "factor"), [("linear", 8.0), ("sqrt", 8**0.5), (None, 1.0)])
def test_rates_are_scaled_by_cores_and_the_base_is_reported(scaling, factor):
    own = engine_of(make(scale_lr=scaling))
    rate = own.model.optimizer.param_groups[0]["lr"]
    assert own.scale_rates(8) == [rate] and own.model.optimizer.param_groups[0]["lr"] == pytest.approx(rate * factor)


def test_eager_steps_run_on_a_single_host(cores):
    own = engine_of(make(run_eagerly=True))
    assert own.place_on(runtime.start(cores, "test")) is HOST
    with pytest.raises(ArgumentError, match="run_eagerly=True computes on one host's processor, but this is one"):
        own.place_on(Cores(8, 0, "CPU", "test", hosts=2))


def test_the_next_compile_keeps_weights_and_the_count_of_steps(cores):
    own = engine(cores)
    step(own)
    before = weights(own)
    own.model.compile("sgd", "cross_entropy")
    after = engine_of(own.model)
    assert after is not own and not after.programs and after.state.numbers.step == 1 and after.log is own.log
    assert after.state.placement == own.state.placement and equal(before, weights(after))
    assert after.observed.formats is None and after.observed.shapes == own.observed.shapes


def test_a_fit_starts_with_empty_counts(cores):
    own = engine(cores)
    step(own)
    own.log.first_bad_step = 4
    assert own.report(verbose=False).counts.waits["capture"]
    own.begin_fit(None, FitOptions(), seed=3)
    report = own.report(verbose=False)
    assert not report.passes and not report.counts.waits and own.log.first_bad_step is None
    assert own.state.numbers.seed == 3 and report.cores == cores and not report.joined


class Grows(nn.Linear):
    """Gets a buffer in the first batch of 16 rows."""

    def forward(self, x):
        if len(x) == 16 and not hasattr(self, "shift"):
            self.register_buffer("shift", torch.zeros(3, device=x.device))
        y = super().forward(x)
        return y + self.shift if hasattr(self, "shift") else y


def test_new_state_makes_older_graphs_invalid(cores):
    torch.manual_seed(0)
    net, plain = Grows(4, 3), nn.Linear(4, 3)
    plain.load_state_dict(net.state_dict())
    model = tpufit.Model(net)
    model.compile("adam", "cross_entropy", scale_lr=None)
    optimizer = torch.optim.Adam(plain.parameters(), lr=model.learning_rate)
    own = engine_on(cores, model)
    for rows in (32, 32, 32, 16, 32, 16, 32):
        step(own, rows)
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(X[:rows]), Y[:rows]).backward()
        optimizer.step()
    for one, other in zip(weights(own), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=1e-4, atol=1e-6)
    assert net.shift.device.type == driver().device_type


def test_a_single_tensor_shares_no_memory(place):
    weight = torch.zeros(2, device=place.device)
    identify_storage(weight)  # newer releases of PyTorch count the reference that this makes
    assert not is_shared_elsewhere([weight])
    same = weight.detach()
    assert is_shared_elsewhere([weight]) and not is_shared_elsewhere([weight, same])
