"""How far the host runs ahead of the device, and where it waits."""

import pytest
import torch
from call_costs import spent

from tpufit import runtime
from tpufit.backend import HOST
from tpufit.runtime.in_flight import RunsAhead

pytestmark = pytest.mark.cores(1, 8, quick=True)


@pytest.mark.parametrize(
    ("limits", "nbytes", "steps"),
    [
        # With at most 4, 16, 64 and then 256 pending steps, each wait leaves half.
        ({"max_pending": 256}, 100, [4, 18, 74, 298, 426]),
        ({"max_pending": 10}, 100, [4, 12, 17, 22, 27]),
        ({"max_pending": 256, "nbytes": 600}, 100, [4, 8, 11, 14, 17]),
        ({"max_pending": 256, "nbytes": 600}, 1000, [4, 5, 6, 7, 8]),
    ],
)
def test_steps_run_ahead_until_they_are_too_many(place, limits, nbytes, steps):
    flying, waited = RunsAhead(seconds=1e9, **limits), []
    for step in range(1, steps[-1] + 1):
        (result,) = runtime.to_device([torch.tensor([float(step)])], place)
        reached, counts = spent(lambda result=result: flying.add(result, nbytes))
        assert (reached is not None) == (counts.waits["throttle"] == 1)
        if reached is not None:
            waited.append(step)
            assert reached.item() < step
    assert waited == steps


def test_all_roles_and_models_run_ahead_by_three_times_one_limit(place):
    roles = [RunsAhead(seconds=1e9, max_pending=10) for _ in range(6)]
    most = 0
    for turn in range(12):
        for role in roles:
            (result,) = runtime.to_device([torch.tensor([float(turn)])], place)
            role.add(result, 100)
            most = max(most, sum(len(one.started) for one in roles))
    assert 25 <= most <= 30


def test_on_the_host_no_step_is_pending():
    result = torch.ones(1)
    under_way = HOST.in_flight()
    assert under_way.add(result, 1 << 40) is result and HOST.max_in_flight == 0
