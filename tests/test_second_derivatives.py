"""Second derivatives on the device, e.g. of a gradient penalty, equal PyTorch's."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tpufit
from tpufit import runtime

X = torch.randn(2, 3, 6, 8, generator=torch.Generator().manual_seed(0))
FLAT = X[0, 0]

FUNCTIONS = {
    "adaptive average": (lambda x: F.adaptive_avg_pool2d(x.sin(), 2), X),
    "adaptive maximum": (lambda x: F.adaptive_max_pool2d(x, 2), X),
    "average pooling": (lambda x: F.avg_pool2d(x.sin(), 2), X),
    "batch norm": (lambda x: F.batch_norm(x, None, None, training=True), X),
    "bilinear": (lambda x: F.bilinear(x, x * 2, x[:2, :, None] * x[0]), FLAT),
    "binary cross-entropy": (lambda x: F.binary_cross_entropy_with_logits(x, x.detach().sigmoid()), FLAT),
    "convolution": (lambda x: F.conv2d(x, x[..., :3, :3].sin(), padding=1), X),
    "cross-entropy": (lambda x: F.cross_entropy(x, torch.arange(6, device=x.device), label_smoothing=0.1), FLAT),
    "cumulative sum": (lambda x: x.cumsum(-1), FLAT),
    "einsum of one": (lambda x: torch.einsum("ij->ji", x), FLAT),
    "einsum of two": (lambda x: torch.einsum("...i,...j->...ij", x, x.sin()), FLAT),
    "einsum of three": (lambda x: torch.einsum("ij,kj,kl->il", x, x, x), FLAT),
    "embedding": (lambda x: F.embedding(torch.tensor([0, 1, 1], device=x.device), x), FLAT),
    "group norm": (lambda x: F.group_norm(x, 3), X),
    "interpolation": (lambda x: F.interpolate(x, size=(7, 9), mode="bilinear"), X),
    "layer norm": (lambda x: F.layer_norm(x, (8,)), FLAT),
    "log-softmax": (lambda x: x.log_softmax(-1), FLAT),
    "matrix product": (lambda x: x @ x.T @ x, FLAT),
    "maximum": (lambda x: x.max(-1).values * x.amax(0).sum(), FLAT),
    "max pooling": (lambda x: F.max_pool2d(x, 2), X),
    "max pooling of 1 dimension": (lambda x: F.max_pool1d(x, 3, 1), FLAT),
    "max pooling of 3 dimensions": (lambda x: F.max_pool3d(x, 2), X),
    "max pooling, overlapping": (lambda x: F.max_pool2d(x, (3, 2), (2, 1), 1, ceil_mode=True), X),
    "max pooling with holes": (lambda x: F.max_pool2d(x, 2, 1, dilation=2), X),
    "norm": (lambda x: x.norm(dim=-1), FLAT),
    "padding by reflection": (lambda x: F.pad(x.sin(), (1, 2), mode="reflect"), FLAT),
    "padding by replication": (lambda x: F.pad(x.sin(), (1, 2), mode="replicate"), FLAT),
    "repeated rows": (lambda x: x.repeat_interleave(2, 0), FLAT),
    "scattered": (lambda x: torch.zeros_like(x).scatter_add(0, (x > 0).long(), x), FLAT),
    "sorted": (lambda x: x.sort(-1).values, FLAT),
    "standard deviation": (lambda x: x.std(-1), FLAT),
}
FUNCTIONS |= {
    name: (function, FLAT)
    for name in (
        "celu",
        "elu",
        "gelu",
        "hardtanh",
        "leaky_relu",
        "logsigmoid",
        "mish",
        "relu",
        "selu",
        "sigmoid",
        "silu",
    )
    for function in (getattr(F, name),)
}


def penalize(function, x):
    """Return a loss of the first derivatives."""
    y = function(x)
    weights = (torch.arange(y.numel(), device=y.device) % 3 + 1.0).reshape(y.shape)
    (gradient,) = torch.autograd.grad((weights * y).square().sum(), x, create_graph=True)
    factors = (torch.arange(x.numel(), device=x.device) % 5 - 1.0).reshape(x.shape)
    return (gradient * factors).square().mean()


def compare(name, function, x, device):
    own, exact = (x.clone().to(place).requires_grad_() for place in (device, "cpu"))
    for value in (own, exact):
        penalize(function, value).backward()
    tolerance = 1e-3 * float(exact.grad.abs().max())
    torch.testing.assert_close(
        own.grad.cpu(), exact.grad, rtol=1e-3, atol=tolerance, msg=lambda text: f"{name}: {text}"
    )


@pytest.mark.cores(1)
def test_second_derivatives_equal_pytorchs(cores):
    device = runtime.make_placement(runtime.start(cores, "test")).device
    for name, (function, x) in FUNCTIONS.items():
        compare(name, function, x, device)


@pytest.mark.cores(1)
@pytest.mark.runtime("torch_tpu")  # PyTorch 2.9 has no such derivative on the CPU
def test_second_derivatives_of_grid_sample_equal_pytorchs(cores):
    device = runtime.make_placement(runtime.start(cores, "test")).device
    for mode in ("bilinear", "bicubic"):
        compare(
            mode,
            lambda x, mode=mode: F.grid_sample(x, x[:, :2].movedim(1, -1).tanh(), mode, align_corners=True),
            X,
            device,
        )


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 3, padding=1)
        self.project = nn.Linear(4, 8)

    def forward(self, x):
        x = F.max_pool2d(self.convolution(x), 2).tanh()
        x = self.project(x.flatten(2).mT)
        scores = torch.einsum("bic,bjc->bij", x, x).softmax(-1)
        return torch.einsum("bij,bjc->bc", scores, x).sum(1)


def add_penalty(critic, x):
    """Set the gradients of a critic's loss with its gradient penalty, and return the loss."""
    x = x.clone().requires_grad_()
    score = critic(x).mean()
    (slope,) = torch.autograd.grad(score * len(x), x, create_graph=True)
    loss = score + slope.square().flatten(1).sum(1).mean()
    loss.backward()
    return loss.detach()


@pytest.mark.cores(1, 8)
def test_a_gradient_penalty_in_a_step_equals_a_plain_loop(cores):
    tpufit.init(cores)  # first: autograd looks up the existing devices once

    class Own(tpufit.Model):
        def train_step(self, batch):
            loss = add_penalty(self.module, batch[0])
            self.optimizer.step()
            self.optimizer.zero_grad()
            return {"loss": loss}

    torch.manual_seed(0)
    critic = Critic()
    x = torch.randn(32, 1, 8, 8)
    plain = copy.deepcopy(critic)
    optimizer = torch.optim.SGD(plain.parameters(), 0.01)
    losses = []
    for i in (0, 16):
        losses.append(add_penalty(plain, x[i : i + 16]))
        optimizer.step()
        optimizer.zero_grad()
    model = Own(critic)
    model.compile(lambda parameters: torch.optim.SGD(parameters, 0.01), scale_lr=None)
    history = model.fit(x, batch_size=16 // cores, shuffle=False, verbose=0, cores=cores).history
    assert history["loss"] == pytest.approx([sum(losses).item() / 2], rel=1e-4)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, plain.state_dict()[name], rtol=1e-4, atol=1e-5)
