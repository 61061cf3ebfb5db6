"""Transforms of `torch.func` in a step: their results equal a plain loop's."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import tpufit

X = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(32) % 3


def clip_gradients_of_rows(net, x, y):
    """As in differentially private training: set the mean of each row's gradient, clipped."""
    weights = {name: weight.detach() for name, weight in net.named_parameters()}

    def loss_of_row(weights, x, y):
        return F.cross_entropy(functional_call(net, weights, (x[None],)), y[None])

    gradients = vmap(grad(loss_of_row), (None, 0, 0))(weights, x, y)
    norms = sum(gradient.flatten(1).pow(2).sum(1) for gradient in gradients.values()).sqrt()
    for name, weight in net.named_parameters():
        weight.grad = torch.einsum("n,n...->...", (0.5 / norms).clamp(max=1), gradients[name]) / len(x)
    return norms.mean()


def differentiate_twice(net, x, y):
    """As in a physics-informed net: a loss of second derivatives by the inputs."""
    curvatures = vmap(hessian(lambda row: net(row[None]).sum()))(x)
    loss = (curvatures.diagonal(dim1=1, dim2=2).sum(1) - y).pow(2).mean()
    loss.backward()
    return loss.detach()


def flatten_jacobians(net, x, y):
    """As in a contractive autoencoder: a loss of each row's jacobian, by reverse and by forward mode."""
    loss = 0
    for jacobian in (torch.func.jacrev, torch.func.jacfwd):
        loss = loss + vmap(jacobian(lambda row: net(row[None])[0]))(x).square().mean()
    loss.backward()
    return loss.detach()


def activations():
    layers = (nn.GELU("tanh"), nn.Hardswish(), nn.LeakyReLU(), nn.LogSigmoid(), nn.ReLU(), nn.Sigmoid(), nn.Softplus())
    return nn.Sequential(*(layer for activation in layers for layer in (nn.Linear(4, 4), activation)), nn.Linear(4, 3))


def with_attention():
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Linear(2, 4), layer, nn.Flatten(), nn.Linear(8, 3))


def with_max_pooling():
    pools = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.MaxPool2d(2), nn.Tanh(), nn.Flatten(1, 2), nn.MaxPool1d(1))
    return nn.Sequential(nn.Unflatten(1, (1, 2, 2)), pools, nn.Flatten(), nn.Linear(4, 3))


def with_adaptive_pooling():
    pools = (nn.Conv2d(1, 4, 3, padding=1), nn.AdaptiveMaxPool2d((1, 2)), nn.Tanh(), nn.Flatten())
    return nn.Sequential(nn.Unflatten(1, (1, 2, 2)), *pools, nn.Linear(8, 3))


def dense():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3))


def with_embedding():
    return nn.Sequential(nn.Embedding(3, 4), nn.Flatten(), nn.Linear(4, 3))


@pytest.mark.cores(1, 8)
@pytest.mark.parametrize(
    ("step", "make", "x"),
    [
        (clip_gradients_of_rows, dense, X),
        (clip_gradients_of_rows, with_embedding, Y[:, None]),
        (clip_gradients_of_rows, with_attention, X),
        (clip_gradients_of_rows, with_max_pooling, X),
        (differentiate_twice, dense, X),
        (differentiate_twice, with_max_pooling, X),
        (differentiate_twice, with_adaptive_pooling, X),
        (flatten_jacobians, activations, X),
        (flatten_jacobians, with_max_pooling, X),
    ],
    ids=[
        *("gradients of rows", "embeddings of rows", "attention of rows", "maxima of rows", "hessian"),
        *("hessian of maxima", "hessian of adaptive maxima", "jacobians", "jacobians of maxima"),
    ],
)
@pytest.mark.filterwarnings("ignore:the train step is traced again:UserWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # by torch's own hessian
def test_a_transform_in_a_step_equals_a_plain_loop(cores, step, make, x):
    tpufit.init(cores)  # first: autograd looks up the existing devices once

    class Own(tpufit.Model):
        def train_step(self, batch):
            result = step(self.module, *batch)
            self.optimizer.step()
            self.optimizer.zero_grad()
            return {"result": result}

    torch.manual_seed(0)
    net = make()
    plain = copy.deepcopy(net)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    results = []
    for i in (0, 16):
        with sdpa_kernel(SDPBackend.MATH):  # the only one with a rule for each transform
            results.append(step(plain, x[i : i + 16], Y[i : i + 16]))
        optimizer.step()
        optimizer.zero_grad()
    model = Own(net)
    model.compile(lambda parameters: torch.optim.SGD(parameters, 0.1), scale_lr=None)
    history = model.fit(x, Y, 16 // cores, shuffle=False, verbose=0, cores=cores).history
    assert history["result"] == pytest.approx([sum(results).item() / 2], abs=1e-4)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, plain.state_dict()[name], rtol=0, atol=2e-5)
