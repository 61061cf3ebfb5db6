"""The norms of a step on several cores equal PyTorch's, without gathering the batch on every core."""

import copy
import json
import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tpufit import runtime
from tpufit.backend import HOST, Sharding
from tpufit.runtime.driver import driver
from tpufit.runtime.ops.kernels import replace_kernels

NORMS = {
    "batch norm of (N, C)": (lambda: nn.BatchNorm1d(6), (13, 6)),
    "batch norm of (N, C, L)": (lambda: nn.BatchNorm1d(6), (4, 6, 5)),
    "batch norm of (N, C, H, W)": (lambda: nn.BatchNorm2d(6), (4, 6, 3, 5)),
    "batch norm of (N, C, D, H, W)": (lambda: nn.BatchNorm3d(6), (3, 6, 2, 3, 2)),
    "batch norm, not affine": (lambda: nn.BatchNorm2d(6, affine=False), (4, 6, 3, 5)),
    "batch norm, not tracking": (lambda: nn.BatchNorm2d(6, track_running_stats=False), (4, 6, 3, 5)),
    "batch norm, cumulative": (lambda: nn.BatchNorm2d(6, momentum=None), (4, 6, 3, 5)),
    "batch norm, momentum and eps": (lambda: nn.BatchNorm2d(6, momentum=0.7, eps=0.1), (4, 6, 3, 5)),
    "batch norm, momentum 1": (lambda: nn.BatchNorm1d(6, momentum=1.0), (4, 6)),
    "instance norm of (C, L)": (lambda: nn.InstanceNorm1d(6), (6, 5)),
    "instance norm of (N, C, L)": (lambda: nn.InstanceNorm1d(6, affine=True), (4, 6, 5)),
    "instance norm, tracking": (
        lambda: nn.InstanceNorm2d(6, affine=True, track_running_stats=True, momentum=0.3),
        (4, 6, 3, 5),
    ),
    "instance norm of (N, C, D, H, W)": (lambda: nn.InstanceNorm3d(6), (3, 6, 2, 3, 2)),
    "group norm of (N, C)": (lambda: nn.GroupNorm(2, 12), (5, 12)),
    "group norm of (N, C, H, W)": (lambda: nn.GroupNorm(2, 6), (4, 6, 3, 5)),
    "group norm, one group": (lambda: nn.GroupNorm(1, 6, eps=0.1), (4, 6, 3)),
    "group norm, not affine": (lambda: nn.GroupNorm(6, 6, affine=False), (4, 6, 3)),
    "layer norm over one dimension": (lambda: nn.LayerNorm(7), (4, 5, 7)),
    "layer norm over several": (lambda: nn.LayerNorm((3, 5), eps=0.1), (4, 6, 3, 5)),
    "layer norm over all": (lambda: nn.LayerNorm((4, 6)), (4, 6)),
    "layer norm without bias": (lambda: nn.LayerNorm(7, bias=False), (4, 7)),
    "layer norm, not affine": (lambda: nn.LayerNorm(7, elementwise_affine=False), (4, 7)),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_modules_equal_pytorchs(name, dtype):
    make, shape = NORMS[name]
    native = _randomized(make()).to(dtype)
    ours = copy.deepcopy(native)
    tolerance = 1e-12 if dtype is torch.float64 else 1e-6
    for training in (True, True, False):
        x = torch.randn(shape, dtype=dtype) * 3 + 2
        upstream = torch.randn(shape, dtype=dtype)
        expected = _results(native.train(training), x, upstream)
        with replace_kernels("CPU"):
            results = _results(ours.train(training), x, upstream)
        assert results.keys() == expected.keys()
        for what, value in expected.items():
            # The gradient of a weight is a sum, with rounding errors relative to its terms.
            largest = max(1.0, float(value.abs().max()))
            torch.testing.assert_close(results[what], value, rtol=0, atol=tolerance * largest, msg=what)


@pytest.mark.parametrize("name", ["batch norm of (N, C, L)", "group norm of (N, C)", "layer norm over one dimension"])
def test_second_derivatives(name):
    make, shape = NORMS[name]
    norm = _randomized(make()).double()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)

    def penalty():
        (gradient,) = torch.autograd.grad(norm(x).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), [x, norm.weight])

    expected = penalty()
    with replace_kernels("CPU"):
        torch.testing.assert_close(penalty(), expected)


def test_a_large_mean_does_not_cancel():
    x = torch.randn(64, 16) + 1000
    reference = F.layer_norm(x.double(), (16,))
    with replace_kernels("CPU"):
        torch.testing.assert_close(F.layer_norm(x, (16,)).double(), reference, rtol=0, atol=5e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_half_precision_is_computed_in_float32(name, dtype):
    make, shape = NORMS[name]
    norm = _randomized(make())
    x = (torch.randn(shape) * 3 + 2).to(dtype)
    expected = norm.to(dtype).float()(x.float())  # the same rounded weights
    with replace_kernels("CPU"):
        result = norm.to(dtype)(x)
    assert result.dtype is dtype
    torch.testing.assert_close(result, expected.to(dtype))


REFUSED = {
    "one value per channel": lambda: F.batch_norm(torch.ones(1, 3), None, None, training=True),
    "no statistics": lambda: F.batch_norm(torch.ones(2, 3), None, None),
    "one dimension": lambda: F.batch_norm(torch.ones(3), None, None, training=True),
    "another number of channels": lambda: F.batch_norm(torch.ones(2, 3), torch.ones(1), torch.ones(1)),
    "one statistic": lambda: F.instance_norm(torch.ones(2, 3, 2), None, torch.ones(3)),
    "one pixel": lambda: F.instance_norm(torch.ones(2, 3, 1)),
    "groups that don't divide": lambda: F.group_norm(torch.ones(2, 3), 2),
    "one value per group": lambda: F.group_norm(torch.ones(1, 3), 3),
    "another shape": lambda: F.layer_norm(torch.ones(2, 3), (2,)),
    "a weight of another shape": lambda: F.layer_norm(torch.ones(2, 3), (3,), torch.ones(1)),
    "whole numbers": lambda: F.layer_norm(torch.ones(2, 3, dtype=torch.int64), (3,)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors_equal_pytorchs(name):
    with pytest.raises(Exception) as native:
        REFUSED[name]()
    with pytest.raises(Exception) as ours, replace_kernels("CPU"):
        REFUSED[name]()
    assert (ours.type, str(ours.value)) == (native.type, str(native.value))


def test_replaced_kernels_are_restored_at_the_contexts_end():
    x = torch.randn(3, 4, requires_grad=True)
    with pytest.raises(ZeroDivisionError), replace_kernels("CPU"):
        assert "NativeLayerNorm" not in F.layer_norm(x, (4,)).grad_fn.name()
        raise ZeroDivisionError
    assert "NativeLayerNorm" in F.layer_norm(x, (4,)).grad_fn.name()


class Block(nn.Module):
    """A transformer block without `nn.MultiheadAttention`, which would gather the batch."""

    def __init__(self, width=8, heads=2):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projections, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = self.projections(self.before(x)).unflatten(2, (3 * self.heads, -1)).transpose(1, 2).chunk(3, dim=1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.wide(self.between(x))


class Checkpointed(Block):
    """A block that is recomputed in the backward pass, in autograd's thread."""

    def forward(self, x):
        if x.device.type == "cpu":
            return super().forward(x)
        from torch_xla.utils.checkpoint import checkpoint  # torch's context doesn't know the device

        return checkpoint(super().forward, x)


def _convolutional(*norms):
    # Not ReLU: rounding, which differs between processors, could move a sum near 0 across its kink.
    convolutions = [[nn.Conv2d(8 if i else 3, 8, 3, padding=1, bias=False), n, nn.SiLU()] for i, n in enumerate(norms)]
    return nn.Sequential(*sum(convolutions, []))


NETS = {
    "batch norm": (lambda: _convolutional(nn.BatchNorm2d(8), nn.BatchNorm2d(8)), (3, 6, 5)),
    "frozen batch norm": (lambda: _convolutional(nn.BatchNorm2d(8).eval(), nn.BatchNorm2d(8)), (3, 6, 5)),
    "group and instance norm": (lambda: _convolutional(nn.GroupNorm(4, 8), nn.InstanceNorm2d(8)), (3, 6, 5)),
    "transformer": (lambda: nn.Sequential(Block(), Block()), (5, 8)),
    "checkpointed": (lambda: nn.Sequential(Block(), Checkpointed()), (5, 8)),
}


def one_step(name, rows, place, context):
    """Take a step of gradient descent on a fixed net and batch; return the differences."""
    make, shape = NETS[name]
    torch.manual_seed(0)
    net = make()
    x, weight = torch.randn(rows, *shape) + 1, torch.randn(rows, 1)
    runtime.move([*net.parameters(), *net.buffers()], place)
    x, weight = runtime.to_device([x, weight], place, Sharding.ROWS)
    with context():
        loss = (net(x).flatten(1).square() * weight).mean()
        loss.backward()
    with torch.no_grad():
        for parameter in net.parameters():
            place.pin(parameter.sub_(0.1 * parameter.grad))
    state = net.state_dict()
    return dict(zip(["loss", *state], runtime.to_host([loss, *state.values()], "test"), strict=True))


@pytest.mark.cores(8)
@pytest.mark.parametrize("rows", [13, 16])
@pytest.mark.parametrize("name", NETS)
def test_a_step_equals_pytorchs_on_the_host(cores, name, rows):
    from contextlib import nullcontext

    place = runtime.make_placement(runtime.start(cores, "test"))  # first: autograd looks up the existing devices once
    expected = one_step(name, rows, HOST, nullcontext)
    result = one_step(name, rows, place, replace_kernels)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.cores(1, 8)
@pytest.mark.runtime("torch_xla")  # TorchTPU's native norms, used for comparison, don't compile for two dtypes
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16, None], ids=str)
@pytest.mark.parametrize("inputs", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_equals_pytorchs_except_batch_norms_dtype(cores, inputs, weights):
    """Batch and instance norm keep their input's dtype, as in CUDA's autocast."""
    place = runtime.make_placement(runtime.start(cores, "test"))
    torch.manual_seed(0)
    x, w, b = torch.randn(13, 6, 4) * 3 + 2, torch.randn(6), torch.randn(6)
    parameters = [] if weights is None else [w.to(weights), b.to(weights)]
    (x,) = runtime.to_device([x.to(inputs)], place, Sharding.ROWS)
    parameters = runtime.to_device(parameters, place)

    def compute():
        affine = dict(zip(["weight", "bias"], parameters, strict=False))
        with torch.autocast(driver().device_type, torch.bfloat16):
            return [
                F.batch_norm(x, None, None, training=True, **affine),
                F.instance_norm(x, **affine),
                F.group_norm(x, 2, **affine),
                F.layer_norm(x.transpose(1, 2), (6,), **affine),
            ]

    batch, instance, *others = runtime.to_host(compute(), "test")
    expected = [batch.to(inputs), instance.to(inputs), *others]
    with replace_kernels():
        results = runtime.to_host(compute(), "test")
    # Both round to bfloat16 at some places, the native norms also in between.
    tolerance = 2e-6 if inputs is weights is torch.float32 else 3e-2
    for result, native in zip(results, expected, strict=True):
        torch.testing.assert_close(result, native, rtol=tolerance, atol=tolerance)  # dtypes too


PROGRAM = """
import contextlib, json, pathlib, re, sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, {tests!r})
from test_norms import HOST, NETS, one_step, runtime, replace_kernels

place = runtime.make_placement(runtime.start(8, "test"))
moves = {{}}
for context in (replace_kernels, contextlib.nullcontext):
    for name in NETS:
        if name == "frozen batch norm" and context is not replace_kernels:
            continue  # natively, its backward pass is an error of torch_xla
        before = set(pathlib.Path("hlo").glob("*after_optimizations.txt"))
        one_step(name, {rows}, place, context)
        new = set(pathlib.Path("hlo").glob("*after_optimizations.txt")) - before
        text = "".join(path.read_text() for path in new)
        moves[f"{{context.__name__}}: {{name}}"] = re.findall(
            r" = (.*?) ((?:all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?)\\(", text
        )
print(json.dumps(moves))
"""


@pytest.mark.slow
@pytest.mark.parametrize("rows", [pytest.param(13, marks=pytest.mark.soak), 16])
def test_the_partitioned_program_gathers_no_activations(run_python, request, rows):
    code = PROGRAM.format(tests=str(request.path.parent), rows=rows)
    flags = os.environ["XLA_FLAGS"] + " --xla_dump_to=hlo --xla_dump_hlo_as_text"
    process = run_python(code, env={"XLA_FLAGS": flags}, timeout=300)
    assert process.returncode == 0, process.stderr
    moves = json.loads(process.stdout.splitlines()[-1])
    for name, (_, shape) in NETS.items():
        if rows % 8 and len(shape) < 3:
            continue  # `nn.Linear` merges rows and positions, and 13 x 5 is split differently from 13
        ours = moves[f"replace_kernels: {name}"]
        assert {operation for _, operation in ours} == {"all-reduce"}, name  # of sums; nothing else is exchanged
        native = moves.get(f"nullcontext: {name}")
        assert native is None or any(operation.startswith("all-gather") for _, operation in native), name


def _randomized(norm):
    torch.manual_seed(0)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return norm


def _results(norm, x, upstream):
    x = x.clone().requires_grad_()
    norm.zero_grad()
    y = norm(x)
    y.backward(upstream)
    gradients = {name: p.grad.clone() for name, p in norm.named_parameters()}
    return {"output": y.detach(), "input": x.grad, **gradients, **{n: b.clone() for n, b in norm.named_buffers()}}
