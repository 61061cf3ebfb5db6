"""The steps of one pass: started one after another, and counted."""

import pytest
import torch
from engines import engine_on
from torch import nn

import tpufit
from tpufit import runtime
from tpufit.errors import LabelError
from tpufit.step.batch import joined
from tpufit.step.runner import StepRunner

pytestmark = pytest.mark.cores(1, 8, quick=True)

ROWS = 16
X = torch.randn(5, ROWS, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(5 * ROWS).reshape(5, ROWS) % 3
BATCHES = list(zip(X, Y, strict=True))


class Noisy(nn.Module):
    """Adds noise, also where it is evaluated."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x) + nn.functional.dropout(torch.ones_like(x[:, :1]), 0.5)


def engine(cores, net=None, **arguments):
    """The engine of a model that is compiled, on its cores."""
    torch.manual_seed(0)
    model = tpufit.Model(nn.Linear(4, 3) if net is None else net)
    model.compile(loss="cross_entropy", scale_lr=None, **{"optimizer": "sgd"} | arguments)
    return engine_on(cores, model)


def run_over(run, batches, each=1):
    """Run a step for each batch, so many in a graph; return what they return."""
    found = []
    for first in range(0, len(batches), each):
        for group in run.send(batches[first : first + each]):
            found.append(run(group, last=first + each >= len(batches)))
    return found


def test_steps_are_started_one_after_another(cores):
    own = engine(cores)
    run = StepRunner(own, "train")
    run_over(run, BATCHES[:2])  # the second finds what the first has captured
    before = runtime.counts()
    run_over(run, BATCHES[2:])
    spent = runtime.counts() - before
    assert not spent.graphs and set(spent.waits) <= {"throttle"}  # which holds back, see test_in_flight.py
    assert (run.tally.steps, run.tally.batches, run.tally.rows) == (5, 5, 5 * ROWS)
    assert (own.state.numbers.step, own.state.numbers.rows_seen) == (5, 5 * ROWS)
    assert own.latest is own.roles["train"] and not run.inside and not run.on_host


def test_evaluations_count_rows_but_no_step_of_training(cores):
    net = nn.Linear(4, 3)
    expected = nn.functional.cross_entropy(net(X[:3]).flatten(0, 1), Y[:3].flatten()).item()
    own = engine(cores, net)
    run = StepRunner(own, "eval")
    run_over(run, BATCHES[:3])
    assert (own.state.numbers.step, own.state.numbers.rows_seen, run.tally.steps) == (0, 3 * ROWS, 3)
    assert run.results()["loss"] == pytest.approx(expected, rel=1e-5)


def test_a_step_has_the_random_numbers_of_its_number_in_the_pass(cores):
    net = Noisy()
    plain = net.layer(X).detach()
    own = engine(cores, net)

    def noise(seed, each=1, after=0):
        run = StepRunner(own, "predict")
        run.tally.seed, run.tally.steps = seed, after
        outputs = [one for group in run_over(run, BATCHES[after:4], each) for one in group]
        host = runtime.to_host(outputs, "test")
        return [(one - x).round().tolist() for one, x in zip(host, plain[after:], strict=False)]

    first = noise(3)
    assert len(first) == 4 and all(one not in first[:i] for i, one in enumerate(first))
    assert noise(3, each=2) == first and noise(3, after=2) == first[2:]
    assert noise(4)[0] != first[0]


@pytest.mark.parametrize("each", [1, 2])
def test_what_is_called_before_a_step_may_set_the_rate_of_that_step(cores, each):
    own, seen = engine(cores, optimizer="adam", steps_per_execution=each), []
    run = StepRunner(own, "train")
    weight = own.model.module.weight

    def before_step(iterations):
        seen.append(iterations)
        own.model.optimizer.param_groups[0]["lr"] = 0.0 if iterations < 4 else 0.1

    run.before_step = before_step
    own.state.write_back()
    start = runtime.to_host([weight], "test")[0]
    run_over(run, BATCHES[:4], each)
    own.state.write_back()
    torch.testing.assert_close(runtime.to_host([weight], "test")[0], start)
    run_over(run, BATCHES[4:], each)
    own.state.write_back()
    moved = (runtime.to_host([weight], "test")[0] - start).abs()
    assert seen == [0, 1, 2, 3, 4] and 0.01 < moved.max() < 0.11


def test_a_label_out_of_range_is_refused_before_anything_changes(cores):
    own = engine(cores)
    run = StepRunner(own, "train")
    run_over(run, BATCHES[:1])
    with pytest.raises(LabelError, match="7"):
        run_over(run, [(X[0], torch.full((ROWS,), 7))])
    assert not run.inside and (run.tally.steps, own.state.numbers.step, own.state.numbers.rows_seen) == (1, 1, ROWS)
    run_over(run, BATCHES[1:])
    assert run.tally.steps == 5


def test_after_an_error_of_the_step_itself_it_is_known_to_be_half_done(cores):
    class Fails(nn.Linear):
        def forward(self, x):
            if len(x) != ROWS:
                raise ZeroDivisionError("an odd batch")
            return super().forward(x)

    own = engine(cores, Fails(4, 3))
    run = StepRunner(own, "train")
    run_over(run, BATCHES[:1])
    with pytest.raises(ZeroDivisionError):
        run_over(run, [(X[1][:8], Y[1][:8])])
    assert run.inside and (run.tally.steps, own.state.numbers.step) == (1, 1)


def test_the_first_step_that_is_not_finite_is_told_by_its_number_in_the_training(cores):
    own = engine(cores)
    run = StepRunner(own, "train")
    run_over(run, BATCHES[:2])
    assert run.first_bad_step() is None
    bad = X[0].clone()
    bad[3] = float("nan")
    run_over(run, [(bad, Y[0]), BATCHES[3]])
    assert run.first_bad_step() == 3 == own.log.first_bad_step
    second = StepRunner(own, "train")  # the first one of a run stays
    run_over(second, BATCHES[:1])
    assert second.first_bad_step() == 3


def test_joined_steps_need_as_many_batches_and_the_host_joins_none(cores):
    own = engine(cores, steps_per_execution=3)
    run = StepRunner(own, "train")
    assert run.group_size == run.batches_per_hook == 3
    assert [len(group.forms) for group in run.send(BATCHES[:3])] == [3]
    assert [len(group.forms) for group in run.send(BATCHES[:2])] == [1, 1]
    eager = StepRunner(engine(cores, steps_per_execution=3, run_eagerly=True), "train")
    assert (eager.group_size, eager.batches_per_hook, eager.on_host) == (1, 3, True)
    chosen = StepRunner(engine(cores, steps_per_execution="auto"), "train")
    assert chosen.group_size == chosen.batches_per_hook == 1  # nothing is known of its pace yet
    chosen_before = engine(cores, steps_per_execution="auto")
    chosen_before.state.numbers.chosen_steps["eval"] = 5
    assert [StepRunner(chosen_before, role).group_size for role in ("train", "eval")] == [1, 5]


def test_batches_that_are_too_large_to_be_stacked_are_joined_all_the_same(cores):
    own = engine(cores, nn.Linear(4096, 3), steps_per_execution=2)
    run = StepRunner(own, "train")
    large = [(torch.ones(ROWS, 4096), Y[0])] * 3
    groups = run.send(large)
    assert [(len(group.forms), group.stacked) for group in groups] == [(1, False)] * 3
    (both,) = joined(groups[:2], 2)
    assert (len(both.forms), both.rows, both.stacked, len(both.tensors)) == (2, 2 * ROWS, False, 4)
    for few, size in ((groups[:1], 2), (groups[:2], 3), (groups[:2], 1)):
        assert joined(few, size) is few
    others = run.send([large[0], (torch.ones(8, 4096), Y[0][:8])])
    assert joined(others, 2) is others
    run(both)
    assert (run.tally.steps, run.tally.rows, own.state.numbers.step) == (2, 2 * ROWS, 2)


def test_gradients_left_by_a_pass_that_broke_off_are_dropped_by_the_next(cores):
    own = engine(cores, accumulate_steps=3)
    run = StepRunner(own, "train")
    for group in run.send(BATCHES[:2]):
        run(group)
    assert own.state.numbers.batches_waiting == 2
    StepRunner(own, "eval")
    assert own.state.numbers.batches_waiting == 2
    StepRunner(own, "train")
    assert own.state.numbers.batches_waiting == 0
