"""Trainings give the results that were recorded in `tests/goldens/`.

On a CPU with the features of the recorded CPU, and with the same release of torch, results are equal bit for bit: the
logs of each step and epoch, predictions, final weights, the optimizer's state. Elsewhere XLA and PyTorch compute in
another order, and losses may differ by a relative 1e-4. This is generous: rounding changes them by 1e-6, because no
weight is moved by rounding alone. The counts of graphs, waits and operations on the host are exact everywhere, except
for the waits that keep the host from running ahead ("throttle"), which depend on the clock.

On TorchTPU the losses are compared, in the same way, with torch_xla's on one core. One item resumes from a checkpoint
of torch_xla, and on torch_xla another item resumes from a checkpoint of TorchTPU.

All items for one number of cores run in one separate process (see `goldens.py`).
"""

import json
from functools import partial
from importlib.util import find_spec

import goldens
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

import tpufit

ON_TORCH_XLA = find_spec("torch_xla") is not None
QUICK = ("checkpoint", "saved", "GAN", "bag of words", "three steps as one")
QUICK += () if ON_TORCH_XLA else ("LSTM", "Llama", "bf16")
# On the device, TorchTPU's generator draws other random numbers, as in torch.randn and between a GRU's layers.
DRAWS = ("GRU", "VAE", "GAN", "WGAN with gradient penalty", "diffusion", "BYOL")
DRAWS += ("two optimizers", "two optimizers, accumulated, clipped, averaged")
# XLA's plugin for the CPU is too old for TorchTPU's EmbeddingBag.
TOO_NEW = ("bag of words",)
NAMES = [name for name in goldens.ITEMS if ON_TORCH_XLA or name not in DRAWS + TOO_NEW]
# TorchTPU has a different erf, and rounds to bfloat16 at other places.
BY_MORE = {"ConvNeXt": 1e-3, "bf16": 2e-3, "bf16-true": 2e-3}


def marks_of(cores, name):
    return pytest.mark.soak if name not in QUICK or cores > 1 else []


@pytest.fixture(scope="module")
def left(request):
    """Return the results of an item on a number of cores. All items for a number run together."""
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
        for cores in (goldens.CORES if ON_TORCH_XLA else (1,))
        for name in NAMES
    ],
)
def test_results_equal_the_record(left, cores, name):
    recorded, found = goldens.recorded(cores), left(cores, name)
    assert "error" not in found, found["error"]
    expected = recorded["items"][name]
    if not ON_TORCH_XLA:
        assert found.get("drawn next") == expected.get("drawn next")
        by = BY_MORE.get(name, 1e-4)
        assert goldens.losses(found) == pytest.approx(goldens.losses(expected), rel=by, nan_ok=True)
        return
    assert found["counts"] == expected["counts"]
    if goldens.computer() == expected["computer"]:
        assert found | {"computer": goldens.computer()} == expected
    else:
        assert goldens.losses(found) == pytest.approx(goldens.losses(expected), rel=1e-4, nan_ok=True)


@pytest.mark.parametrize(("cores", "name"), [(1, "checkpoint by torch_tpu")])
def test_a_training_from_torch_tpu_resumes_up_to_rounding(left, cores, name):
    """On TorchTPU itself it is the same training."""
    found = left(cores, name)
    assert "error" not in found, found["error"]
    expected = json.loads(goldens.CROSSING.with_suffix(".json").read_text())
    assert goldens.losses(found) == pytest.approx(goldens.losses(expected), rel=1e-5)


class InFloat64(TorchFunctionMode):
    """Operations see a float64 in place of each float32."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*tree_map(self.widened, args), **tree_map(self.widened, kwargs or {}))

    def widened(self, value):
        return value.double() if isinstance(value, torch.Tensor) and value.dtype == torch.float32 else value


TRAININGS = {name: item for name, item in goldens.ITEMS.items() if isinstance(item, goldens.Training)}
# Many items use the small net.
NETS = {name: item for name, item in TRAININGS.items() if getattr(item.net, "func", None) is not goldens.small}
NETS["small"] = goldens.trained(12)
NETS["with bias"] = goldens.Training(partial(goldens.with_bias, 12), goldens.adamw, compile={"loss": "cross_entropy"})


def keep(gradients, own, gradient):
    gradients.setdefault(own, gradient.clone())  # the first model; a step with two optimizers continues with others


@pytest.mark.cores(1)
@pytest.mark.parametrize("net_of", NETS)
def test_no_weight_is_moved_by_rounding_alone(net_of):
    """In float64 a gradient of only rounding is below 1e-15 of the largest; no other is below 1e-11."""
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
