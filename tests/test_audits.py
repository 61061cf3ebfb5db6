"""When a replay is audited: at the first one of a pass, then at doubling distances that the clock affords."""

import pytest

from tpufit.runtime import audits


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(audits, "perf_counter", clock)
    return clock


def captured(in_lockstep=False, cost=0.5, agreed=True):
    """The audits of a graph that has been captured, and audited at the beginning of a pass."""
    own = audits.Audits(in_lockstep)
    own.captured("graph")
    own.begin_pass()
    assert own.due("graph", None)
    own.ended("graph", cost, agreed)
    return own


def steps_audited(own, clock, steps, seconds, left=lambda i: None, after=lambda own: None):
    """The steps of a pass before which an audit comes."""
    found = []
    for i in range(steps):
        if own.due("graph", left(i)):
            found.append(i)
            own.ended("graph", 0.5, agreed=True)
        own.replayed("graph", 1)
        clock.now += seconds
        after(own)
    return found


def test_distances_double(clock):
    assert steps_audited(captured(in_lockstep=True), clock, 200, 0.0) == [4, 12, 28, 60, 124]


def test_they_begin_anew_with_each_pass(clock):
    own = captured(in_lockstep=True)
    steps_audited(own, clock, 50, 0.0)
    own.begin_pass()
    assert steps_audited(own, clock, 14, 0.0) == [0, 4, 12]


def test_they_take_a_hundredth_of_the_time(clock):
    own = captured(cost=0.5)
    assert steps_audited(own, clock, 1000, 0.25) == [201, 402, 603, 804]
    assert steps_audited(captured(cost=0.5), clock, 20, 100.0) == [4, 12]


def test_the_last_steps_are_audited_if_it_is_affordable_or_code_of_the_users_runs(clock):
    def countdown(i):
        return 9 - i

    assert steps_audited(captured(), clock, 10, 0.1, countdown) == []
    assert steps_audited(captured(), clock, 10, 30.0, countdown) == [4, 8]
    hooked = steps_audited(captured(), clock, 10, 0.1, countdown, lambda own: own.note_users_code(seldom=False))
    assert hooked == [8, 9]


def test_none_comes_soon_after_a_capture_that_shows_what_it_costs(clock):
    own = audits.Audits()
    own.captured("graph")  # compiled
    own.captured("graph", 0.5)
    assert steps_audited(own, clock, 400, 0.25) == [201]


def test_code_that_runs_seldom_is_followed_by_an_audit(clock):
    own = captured()
    own.replayed("graph", 3)
    assert not own.due("graph", None)
    own.note_users_code(seldom=True)
    assert own.due("graph", None)


@pytest.mark.parametrize(("coded", "doubtful"), [(False, 7), (True, 4)], ids=["by itself", "by user code"])
def test_the_doubtful_steps(clock, coded, doubtful):
    own = captured()
    own.replayed("graph", 3)
    if coded:
        own.note_users_code(seldom=False)
    own.replayed("graph", 4)
    assert own.doubtful("graph") == doubtful


def test_a_change_between_two_passes_leaves_no_step_in_doubt(clock):
    own = captured()
    own.replayed("graph", 3)
    own.note_users_code(seldom=True)  # on_epoch_end
    own.begin_pass()
    assert own.due("graph", None) and own.doubtful("graph") == 0


def test_after_a_difference_all_graphs_are_in_doubt(clock):
    own = captured()
    own.captured("short batch")
    assert not own.due("short batch", None)
    own.ended("graph", 0.5, agreed=False)
    assert own.due("short batch", None) and not own.due("graph", None)


def test_an_audit_that_could_not_compare_is_followed_by_another(clock):
    own = captured(in_lockstep=True)
    own.disturbed("graph")
    assert own.due("graph", None)
