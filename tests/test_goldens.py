"""Whatever is rebuilt, trainings come to what they came to when `tests/goldens/` was recorded.

On a CPU with the features of the one that it was recorded on they come to it to the bit: the logs of each step and
epoch, predictions, final weights, the optimizer's state. XLA and PyTorch compute in another order where there are other
vector instructions. There the losses are held to 1e-4 of themselves. The counts of graphs, waits and operations on the
host are exact everywhere, but for the waits that keep the host from running ahead ("throttle"), which go by the clock.

All items for one number of cores run in one process of their own (see `goldens.py`).
"""

import goldens
import pytest

QUICK = ("checkpoint", "saved", "ResNet", "GAN", "bag of words", "three steps as one")


def marks_of(cores, name):
    if name not in QUICK:
        return pytest.mark.soak
    return pytest.mark.slow if cores > 1 else []


@pytest.fixture(scope="module")
def left(request):
    """What an item has left on a number of cores. All that are asked for on that number run together."""
    here = [item for item in request.session.items if item.path == request.path]
    wanted = [item.callspec.params for item in here if "name" in item.callspec.params]
    processes = {}

    def left(cores, name):
        if cores not in processes:
            names = {params["name"] for params in wanted if params["cores"] == cores}
            processes[cores] = goldens.run(cores, names, goldens.recorded(cores)["environment"])
        found, said = processes[cores]
        assert name in found, f"the process ended before it came to this item: {said}"
        return found[name]

    return left


@pytest.mark.parametrize(
    ("cores", "name"),
    [
        pytest.param(cores, name, id=f"{name}-{cores}", marks=marks_of(cores, name))
        for cores in goldens.CORES
        for name in goldens.ITEMS
    ],
)
def test_it_comes_to_what_was_recorded(left, cores, name):
    recorded, found = goldens.recorded(cores), left(cores, name)
    assert "error" not in found, found["error"]
    expected = recorded["items"][name]
    assert found["counts"] == expected["counts"]
    if goldens.cpu() == recorded["cpu"]:
        assert found == expected
    else:
        assert goldens.losses(found) == pytest.approx(goldens.losses(expected), rel=1e-4, nan_ok=True)


@pytest.mark.parametrize("cores", goldens.CORES)
def test_everything_is_recorded(cores):
    recorded = goldens.recorded(cores)
    assert list(recorded["items"]) == list(goldens.ITEMS)
    assert recorded["environment"] == goldens.ENVIRONMENT
