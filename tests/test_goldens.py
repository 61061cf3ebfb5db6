"""Whatever is rebuilt, trainings come to what they came to when `tests/goldens/` was recorded.

On a CPU with the features of the one that an item was recorded on, and with that release of torch, it comes to that to
the bit: the logs of each step and epoch, predictions, final weights, the optimizer's state. Elsewhere XLA and PyTorch
compute in another order. There the losses are held to 1e-4 of themselves, which is much: rounding moves them by 1e-6,
because no weight is moved by rounding alone. The counts of graphs, waits and operations on the host are exact
everywhere, but for the waits that keep the host from running ahead ("throttle"), which go by the clock.

All items for one number of cores run in one process of their own (see `goldens.py`).
"""

from functools import partial

import goldens
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

import tpufit

QUICK = ("checkpoint", "saved", "GAN", "bag of words", "three steps as one")


def marks_of(cores, name):
    return pytest.mark.soak if name not in QUICK or cores > 1 else []


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
    if goldens.computer() == expected["computer"]:
        assert found | {"computer": goldens.computer()} == expected
    else:
        assert goldens.losses(found) == pytest.approx(goldens.losses(expected), rel=1e-4, nan_ok=True)


class InFloat64(TorchFunctionMode):
    """Operations see a float64 in place of each float32."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*tree_map(self.widened, args), **tree_map(self.widened, kwargs or {}))

    def widened(self, value):
        return value.double() if isinstance(value, torch.Tensor) and value.dtype == torch.float32 else value


TRAININGS = {name: item for name, item in goldens.ITEMS.items() if isinstance(item, goldens.Training)}
# The small net is that of many.
NETS = {name: item for name, item in TRAININGS.items() if getattr(item.net, "func", None) is not goldens.small}
NETS["small"] = goldens.trained(12)
NETS["with bias"] = goldens.Training(partial(goldens.with_bias, 12), goldens.adamw, compile={"loss": "cross_entropy"})


def keep(gradients, own, gradient):
    gradients.setdefault(own, gradient.clone())  # the first; a step of two optimizers goes on to others


@pytest.mark.cores(1)
@pytest.mark.parametrize("net_of", NETS)
def test_no_weight_is_moved_by_rounding_alone(net_of):
    """In float64 a gradient that is zero but for rounding is below 1e-15 of the largest; no other is below 1e-11."""
    item = NETS[net_of]
    tpufit.set_random_seed(0)
    net, gradients = item.net().double(), {}
    for own, parameter in net.named_parameters():
        if parameter.requires_grad:
            parameter.register_hook(partial(keep, gradients, own))
    model = item.model(net)
    of_loss = {key: item.compile[key] for key in ("loss", "loss_weights") if key in item.compile}
    model.compile(item.optimizer(net), **of_loss, run_eagerly=True)
    data = item.data if isinstance(item.data, tuple) else (goldens.VECTORS, goldens.LABELS)
    with InFloat64():
        model.train_on_batch(*tree_map(lambda rows: rows[: goldens.BATCH], data))
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    by_rounding = {
        own: int(((gradient != 0) & (gradient.abs() < 1e-12 * largest)).sum()) for own, gradient in gradients.items()
    }
    assert {own: count for own, count in by_rounding.items() if count} == {}


@pytest.mark.parametrize("cores", goldens.CORES)
def test_everything_is_recorded(cores):
    recorded = goldens.recorded(cores)
    assert list(recorded["items"]) == list(goldens.ITEMS)
    assert recorded["environment"] == goldens.ENVIRONMENT
