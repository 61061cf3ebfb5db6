"""The steps of a pass are started one after another, and counted."""

import pytest
import torch
from engines import engine_on
from torch import nn

import tpufit
from tpufit import runtime
from tpufit.errors import LabelError
from tpufit.step.batch import join_groups
from tpufit.step.runner import StepRunner

pytestmark = pytest.mark.cores(1, 8, quick=True)

ROWS = 16
X = torch.randn(5, ROWS, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(5 * ROWS).reshape(5, ROWS) % 3
BATCHES = list(zip(X, Y, strict=True))


class Noisy(nn.Module):
    """Adds noise, in evaluations too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x) + nn.functional.dropout(torch.ones_like(x[:, :1]), 0.5)


def engine(cores, net=None, **arguments):
    """The engine of a compiled model, on its cores."""
    torch.manual_seed(0)
    model = tpufit.Model(nn.Linear(4, 3) if net is None else net)
    model.compile(loss="cross_entropy", scale_lr=None, **{"optimizer": "sgd"} | arguments)
    return engine_on(cores, model)


def run_over(run, batches, each=1):
    """Run a step for each batch, several in a graph; return the results."""
    found = []
    for first in range(0, len(batches), each):
        for group in run.send(batches[first : first + each]):
            found.append(run(group, last=first + each >= len(batches)))
    return found


def test_steps_are_started_one_after_another(cores):
    own = engine(cores)
    run = StepRunner(own, "train")
    run_over(run, BATCHES[:2])  # the second run finds the graphs of the first
    before = runtime.counts()
    run_over(run, BATCHES[2:])
    spent = runtime.counts() - before
    assert not spent.graphs and set(spent.waits) <= {"throttle"}  # which keeps the host back, see test_in_flight.py
    assert (run.tally.steps, run.tally.batches, run.tally.rows) == (5, 5, 5 * ROWS)
    assert (own.state.numbers.step, own.state.numbers.rows_seen) == (5, 5 * ROWS)
    assert own.latest is own.roles["train"] and not run.step_in_progress and not run.eager


def test_evaluations_count_rows_but_no_training_steps(cores):
    net = nn.Linear(4, 3)
    expected = nn.functional.cross_entropy(net(X[:3]).flatten(0, 1), Y[:3].flatten()).item()
    own = engine(cores, net)
    run = StepRunner(own, "eval")
    run_over(run, BATCHES[:3])
    assert (own.state.numbers.step, own.state.numbers.rows_seen, run.tally.steps) == (0, 3 * ROWS, 3)
    assert run.results()["loss"] == pytest.approx(expected, rel=1e-5)


def test_a_steps_random_numbers_depend_on_its_number(cores):
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
def test_a_hook_before_a_step_can_set_its_rate(cores, each):
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
    assert not run.step_in_progress
    assert (run.tally.steps, own.state.numbers.step, own.state.numbers.rows_seen) == (1, 1, ROWS)
    run_over(run, BATCHES[1:])
    assert run.tally.steps == 5


def test_a_failed_step_is_marked_incomplete(cores):
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
    assert run.step_in_progress and (run.tally.steps, own.state.numbers.step) == (1, 1)


def test_the_first_nonfinite_step_is_named_by_its_number(cores):
    own = engine(cores)
    run = StepRunner(own, "train")
    run_over(run, BATCHES[:2])
    assert run.first_bad_step() is None
    bad = X[0].clone()
    bad[3] = float("nan")
    run_over(run, [(bad, Y[0]), BATCHES[3]])
    assert run.first_bad_step() == 3 == own.log.first_bad_step
    second = StepRunner(own, "train")  # the first of a run stays
    run_over(second, BATCHES[:1])
    assert second.first_bad_step() == 3


def test_joining_steps_needs_batches_and_a_device(cores):
    own = engine(cores, steps_per_execution=3)
    run = StepRunner(own, "train")
    assert run.group_size == run.batches_per_hook == 3
    assert [len(group.forms) for group in run.send(BATCHES[:3])] == [3]
    assert [len(group.forms) for group in run.send(BATCHES[:2])] == [1, 1]
    eager = StepRunner(engine(cores, steps_per_execution=3, run_eagerly=True), "train")
    assert (eager.group_size, eager.batches_per_hook, eager.eager) == (1, 3, True)
    chosen = StepRunner(engine(cores, steps_per_execution="auto"), "train")
    assert chosen.group_size == chosen.batches_per_hook == 1  # its pace is still unknown
    chosen_before = engine(cores, steps_per_execution="auto")
    chosen_before.state.numbers.chosen_steps["eval"] = 5
    assert [StepRunner(chosen_before, role).group_size for role in ("train", "eval")] == [1, 5]


def test_batches_too_large_to_stack_are_joined_too(cores):
    own = engine(cores, nn.Linear(4096, 3), steps_per_execution=2)
    run = StepRunner(own, "train")
    large = [(torch.ones(ROWS, 4096), Y[0])] * 3
    groups = run.send(large)
    assert [(len(group.forms), group.stacked) for group in groups] == [(1, False)] * 3
    (both,) = join_groups(groups[:2], 2)
    assert (len(both.forms), both.rows, both.stacked, len(both.tensors)) == (2, 2 * ROWS, False, 4)
    for few, size in ((groups[:1], 2), (groups[:2], 3), (groups[:2], 1)):
        assert join_groups(few, size) is few
    others = run.send([large[0], (torch.ones(8, 4096), Y[0][:8])])
    assert join_groups(others, 2) is others
    run(both)
    assert (run.tally.steps, run.tally.rows, own.state.numbers.step) == (2, 2 * ROWS, 2)


def test_gradients_of_an_interrupted_pass_are_dropped(cores):
    own = engine(cores, accumulate_steps=3)
    run = StepRunner(own, "train")
    for group in run.send(BATCHES[:2]):
        run(group)
    assert own.state.numbers.batches_waiting == 2
    StepRunner(own, "eval")
    assert own.state.numbers.batches_waiting == 2
    StepRunner(own, "train")
    assert own.state.numbers.batches_waiting == 0
