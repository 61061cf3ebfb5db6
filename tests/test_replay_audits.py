"""When replays are audited: the first of a pass, then at doubling distances that time allows."""

import pytest

from tpufit.runtime import replay_audits


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(replay_audits, "perf_counter", clock)
    return clock


def captured(in_lockstep=False, cost=0.5, agreed=True):
    """The audits of a captured graph, after the audit at the beginning of a pass."""
    audits = replay_audits.Audits(in_lockstep)
    audits.note_capture("graph")
    audits.begin_pass()
    assert audits.is_due("graph", None)
    audits.note_audit("graph", cost, agreed)
    return audits


def steps_audited(audits, clock, steps, seconds, remaining=lambda i: None, after=lambda audits: None):
    """Return the steps of a pass that are preceded by an audit."""
    found = []
    for i in range(steps):
        if audits.is_due("graph", remaining(i)):
            found.append(i)
            audits.note_audit("graph", 0.5, agreed=True)
        audits.note_replay("graph", 1)
        clock.now += seconds
        after(audits)
    return found


def test_distances_between_audits_double(clock):
    assert steps_audited(captured(in_lockstep=True), clock, 200, 0.0) == [4, 12, 28, 60, 124]


def test_each_pass_begins_with_an_audit(clock):
    audits = captured(in_lockstep=True)
    steps_audited(audits, clock, 50, 0.0)
    audits.begin_pass()
    assert steps_audited(audits, clock, 14, 0.0) == [0, 4, 12]


def test_audits_take_a_hundredth_of_the_time(clock):
    audits = captured(cost=0.5)
    assert steps_audited(audits, clock, 1000, 0.25) == [201, 402, 603, 804]
    assert steps_audited(captured(cost=0.5), clock, 20, 100.0) == [4, 12]


def test_the_last_steps_are_audited_if_cheap_or_users_code_runs(clock):
    def countdown(i):
        return 9 - i

    assert steps_audited(captured(), clock, 10, 0.1, countdown) == []
    assert steps_audited(captured(), clock, 10, 30.0, countdown) == [4, 8]
    hooked = steps_audited(
        captured(), clock, 10, 0.1, countdown, lambda audits: audits.note_user_code(every_batch=True)
    )
    assert hooked == [8, 9]


def test_no_audit_soon_after_an_expensive_capture(clock):
    audits = replay_audits.Audits()
    audits.note_capture("graph")  # compiled
    audits.note_capture("graph", 0.5)
    assert steps_audited(audits, clock, 400, 0.25) == [201]


def test_an_audit_follows_rarely_run_user_code(clock):
    audits = captured()
    audits.note_replay("graph", 3)
    assert not audits.is_due("graph", None)
    audits.note_user_code(every_batch=False)
    assert audits.is_due("graph", None)


@pytest.mark.parametrize(("user_code_runs", "doubtful"), [(False, 7), (True, 4)], ids=["by itself", "by user code"])
def test_steps_before_user_code_ran_are_not_doubtful(clock, user_code_runs, doubtful):
    audits = captured()
    audits.note_replay("graph", 3)
    if user_code_runs:
        audits.note_user_code(every_batch=True)
    audits.note_replay("graph", 4)
    assert audits.count_doubtful_steps("graph") == doubtful


def test_a_change_between_passes_leaves_no_doubtful_step(clock):
    audits = captured()
    audits.note_replay("graph", 3)
    audits.note_user_code(every_batch=False)  # on_epoch_end
    audits.begin_pass()
    assert audits.is_due("graph", None) and audits.count_doubtful_steps("graph") == 0


def test_after_a_difference_all_graphs_are_doubtful(clock):
    audits = captured()
    audits.note_capture("short batch")
    assert not audits.is_due("short batch", None)
    audits.note_audit("graph", 0.5, agreed=False)
    assert audits.is_due("short batch", None) and not audits.is_due("graph", None)


def test_a_failed_comparison_is_followed_by_another_audit(clock):
    audits = captured(in_lockstep=True)
    audits.note_disturbed_audit("graph")
    assert audits.is_due("graph", None)
