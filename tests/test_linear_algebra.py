"""Linear algebra that torch_xla lacks: PyTorch's values and gradients, in replayed steps."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import tpufit
from tpufit.runtime.ops import linear_algebra


def draw(*shape, scale=1.0, skew=False):
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * scale
    return values - values.mT if skew else values


REFLECTIONS = {
    "tall": (draw(7, 3), draw(3).sigmoid()),
    "square": (draw(5, 5), draw(5).sigmoid()),
    "batches": (draw(4, 6, 5, scale=0.3), draw(4, 5).sigmoid()),
    "fewer factors": (draw(6, 5), draw(3).sigmoid()),
    "zero factors": (draw(5, 3), torch.zeros(3)),
}
EXPONENTS = {
    "zeros": torch.zeros(3, 3),
    "small": draw(2, 5, 5, scale=0.01),
    "skew": draw(3, 6, 6, scale=20.0, skew=True),
    "float64": draw(4, 4).double(),
}


def assert_like_pytorch(ours, pytorchs, *values):
    results = []
    for function in (ours, pytorchs):
        inputs = [value.clone().requires_grad_() for value in values]
        output = function(*inputs)
        output.cos().sum().backward()
        results.append([output, *(one.grad for one in inputs)])
    for own, other in zip(*results, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore:torch.triangular_solve is deprecated")  # on the host only
@pytest.mark.parametrize("name", REFLECTIONS)
def test_householder_product(name):
    pytorchs = torch.linalg.householder_product
    assert_like_pytorch(linear_algebra.householder_product, pytorchs, *REFLECTIONS[name])


@pytest.mark.parametrize("name", EXPONENTS)
def test_matrix_exp(name):
    assert_like_pytorch(linear_algebra.matrix_exp, torch.matrix_exp, EXPONENTS[name])


@pytest.mark.parametrize("shape", [(4, 4), (3, 4, 4)])
def test_slogdet(shape):
    assert_like_pytorch(
        lambda x: linear_algebra.slogdet(x)[1], torch.logdet, torch.eye(4) * 3 + draw(*shape, scale=0.3)
    )


def test_matrix_exp_of_a_large_norm_is_nan():
    assert linear_algebra.matrix_exp(torch.full((2, 2), 2000.0)).isnan().all()


class Net(nn.Sequential):
    """A layer for each parametrization."""

    def __init__(self):
        super().__init__(*(nn.Linear(6, 6) for _ in range(3)), nn.Linear(6, 3))
        for layer, name in zip(self, ("matrix_exp", "householder"), strict=False):
            parametrizations.orthogonal(layer, orthogonal_map=name)
        parametrizations.spectral_norm(self[2])
        parametrizations.weight_norm(self[3])


@pytest.mark.slow
@pytest.mark.cores(1, 8)
def test_parametrized_layers_are_replayed(cores):
    x, y = draw(48, 6), torch.arange(48) % 3

    def train(**how):
        torch.manual_seed(0)
        model = tpufit.Model(Net())
        model.compile(lambda parameters: torch.optim.SGD(parameters, 0.1), "cross_entropy", scale_lr=None, **how)
        history = model.fit(x, y, 16 // cores, 3, shuffle=False, verbose=0, cores=cores)
        return model, history.history["loss"]

    model, losses = train()
    assert not any(model.report().traced.values())
    assert losses == pytest.approx(train(run_eagerly=True)[1], rel=1e-4)
