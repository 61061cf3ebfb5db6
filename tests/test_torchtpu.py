"""TorchTPU, torch_xla's successor, on the plugin of `pod/as_tpu.cc`, and without a TPU."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tpufit
from tpufit import runtime
from tpufit.callbacks import Callback, TensorBoard

X = torch.arange(72.0).reshape(24, 3) / 72
Y = X.sum(1, keepdim=True)

pytestmark = pytest.mark.runtime("torch_tpu")


def test_torch_tpu_computes_on_the_plugin(run_python):
    """Without a TPU on the bus it isn't loaded before the first call."""
    code = """
    import torch
    from torch_tpu import _loader

    _loader._init_device("tpu")
    torch.manual_seed(0)
    x, w = torch.randn(5, 3), torch.randn(3, 2)
    found = []
    for device in ("cpu", "tpu"):
        weight = w.clone().to(device).requires_grad_()
        loss = (x.to(device) @ weight).tanh().square().mean()
        loss.backward()
        found.append((loss.detach().cpu(), weight.grad.cpu()))
    torch.testing.assert_close(*found)
    assert torch.accelerator.device_count() == 1
    print("done")
    """
    process = run_python(code, fresh=True)
    assert process.stdout.strip() == "done", process.stderr


def test_torch_compile_imports_its_passes_on_use(run_python):
    code = """
    import sys, torch, tpufit

    tpufit.init(1)
    assert "torch._inductor.pattern_matcher" not in sys.modules
    twice = torch.compile(lambda x: x * 2, backend="tpu")
    print(twice(torch.ones(3, device="tpu")).tolist())
    """
    process = run_python(code, fresh=True)
    assert process.stdout.strip() == "[2.0, 2.0, 2.0]", process.stderr


def test_without_a_tpu_steps_on_the_host_work(run_python):
    code = """
    import torch, tpufit

    def made(**options):
        torch.manual_seed(0)
        model = tpufit.Model(torch.nn.Linear(3, 1))
        model.compile("adam", "mse", metrics=["mae"], **options)
        return model

    x, y = torch.randn(24, 3), torch.randn(24, 1)
    try:
        made().fit(x, y)
    except tpufit.errors.StartError as error:
        print(error)
    model, callback = made(run_eagerly=True), tpufit.callbacks.ModelCheckpoint("run")
    model.fit(x, y, 8, 2, verbose=0, shuffle=False, callbacks=[callback])
    again = made(run_eagerly=True)
    again.fit(x, y, 8, 3, verbose=0, shuffle=False, callbacks=[tpufit.callbacks.ModelCheckpoint("run")], resume=True)
    model.fit(x, y, 8, 3, verbose=0, shuffle=False, initial_epoch=2)
    assert torch.equal(model.module.weight, again.module.weight)
    assert model.evaluate(x, y, verbose=0) == again.evaluate(x, y, verbose=0)
    assert torch.equal(torch.tensor(model.predict(x, verbose=0)), model.module(x).detach())
    print("done")
    """
    process = run_python(code, env={"TPU_LIBRARY_PATH": None})
    first, last = process.stdout.splitlines()
    assert "no TPU chip on its PCI bus" in first and "run_eagerly=True" in first
    assert last == "done", process.stderr


@pytest.mark.parametrize("early", [True, False])
def test_a_backward_pass_on_the_host_needs_tpufit_imported_first(run_python, early):
    # `import torch` itself loads torch_tpu, which doesn't name its device without a TPU on the bus.
    order = ["import tpufit", "torch.nn.Linear(3, 1)(torch.ones(2, 3)).sum().backward()"]
    code = f"""
    import torch
    {"; ".join(order if early else reversed(order))}
    model = tpufit.Model(torch.nn.Linear(3, 1))
    model.compile("sgd", "mse")
    model.fit(torch.ones(8, 3), torch.ones(8, 1), verbose=0)
    weight = model.module.weight
    (gradient,) = torch.autograd.grad(weight.sum(), weight)
    print(gradient.cpu().tolist())
    """
    process = run_python(code, env={"TORCH_DEVICE_BACKEND_AUTOLOAD": None}, fresh=True)
    if early:
        assert process.stdout.strip() == "[[1.0, 1.0, 1.0]]", process.stderr
    else:
        assert "StartError: a backward pass ran on the host before torch_tpu's device had a name" in process.stderr


@pytest.mark.cores(1)
def test_a_step_that_reads_a_value_runs_operation_by_operation(cores):
    class Reads(tpufit.Model):
        def train_step(self, batch):
            x, y = batch
            loss = self.compute_loss(x, y, self(x))
            self.apply_gradients(loss if float(loss.detach()) > 1 else loss * 0.5)
            return {"loss": loss}

    def trained(run_eagerly):
        torch.manual_seed(0)
        model = Reads(nn.Linear(3, 1))
        model.compile("sgd", "mse", run_eagerly=run_eagerly)
        history = model.fit(X, Y, batch_size=8, epochs=3, shuffle=False, verbose=0, cores=cores)
        return history.history["loss"], model

    with pytest.warns(UserWarning, match="the train step runs operation by operation, which is slow, because it reads"):
        losses, model = trained(False)
    assert losses == pytest.approx(trained(True)[0], rel=1e-5)
    report = model.report()
    assert report.eager == {"train"}
    assert any(said.startswith("the train step runs operation by operation") for said in report.problems)
    assert "eager: it reads a value" in " ".join(str(report).split())


@pytest.mark.cores(1)
@pytest.mark.filterwarnings("ignore:the train step runs operation by operation")
def test_a_step_that_counts_distinct_values_trains(cores):
    """torch_tpu's kernels of both operations end the process."""

    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def forward(self, x):
            distinct, where, counts = torch.unique(x.round(), return_inverse=True, return_counts=True)
            runs = torch.unique_consecutive(x.flatten().round()).numel()
            return self.layer(x) * runs / len(distinct) + counts[where].sum(1, keepdim=True) / x.numel()

    def trained(run_eagerly):
        torch.manual_seed(0)
        model = tpufit.Model(Counts())
        model.compile("sgd", "mse", run_eagerly=run_eagerly)
        return model.fit(X, Y, batch_size=8, epochs=3, shuffle=False, verbose=0, cores=cores).history["loss"]

    assert trained(False) == pytest.approx(trained(True), rel=1e-5)


# What torch_tpu's own kernels compute wrongly, or without a gradient.
MENDED = {
    "avg_pool1d": lambda x: F.avg_pool1d(x, 2),
    "celu": lambda x: F.celu(x, 2.0),
    "elu of less": lambda x: F.elu(x, 0.5),
    "crop by replication": lambda x: F.pad(x, (-2, 3), mode="replicate"),
    "vdot of complex numbers": lambda x: torch.view_as_real(torch.vdot(*torch.complex(x, x + 1).flatten(1))),
    "index_reduce": lambda x: x.index_reduce(1, torch.tensor([1, 0, 1], device=x.device), x[:, :3] + 1, "mean"),
}


@pytest.mark.cores(1)
@pytest.mark.parametrize("name", MENDED)
@pytest.mark.filterwarnings("ignore:index_reduce.* is in beta")
def test_values_and_gradients_equal_pytorchs(cores, name):
    device = runtime.make_placement(runtime.start(cores, "test")).device
    found = []
    for place in ("cpu", device):
        x = torch.linspace(-2, 2, 24).reshape(2, 3, 4).to(place).requires_grad_()
        y = MENDED[name](x)
        (gradient,) = torch.autograd.grad(y.square().sum(), x)
        found.append([y.detach().cpu(), gradient.cpu()])
    torch.testing.assert_close(*found)


@pytest.mark.cores(1)
@pytest.mark.parametrize("name", ["argmax", "kthvalue", "max", "min", "sort", "topk"])
def test_nan_and_infinity_are_ordered_as_in_pytorch(cores, name):
    device = runtime.make_placement(runtime.start(cores, "test")).device
    infinite = torch.tensor([[-math.inf] * 3, [math.inf] * 3, [-math.inf, 0.0, math.inf]])
    nan = torch.tensor([[1.0, math.nan, 3.0], [math.nan, 2.0, math.nan]])
    for x in (infinite,) if name in ("max", "min") else (infinite, nan):  # NaN in maxima depends on the plugin
        arguments = (2, 1) if name in ("kthvalue", "topk") else (1,)
        ours, pytorchs = (getattr(torch, name)(x.to(place), *arguments) for place in (device, "cpu"))
        one, other = (found if name == "argmax" else found.values for found in (ours, pytorchs))
        torch.testing.assert_close(one.cpu(), other, equal_nan=True)


@pytest.mark.cores(1)
@pytest.mark.filterwarnings("ignore:the train step")
def test_a_step_may_use_views_of_a_weight(cores):
    """The weight's stand-in in the trace has views with shared memory too."""

    class Keeps(tpufit.Model):
        def train_step(self, batch):
            x, y = batch
            loss = self.compute_loss(x, y, self(x)) + (self.kept * self.module[1].weight).sum()
            self.apply_gradients(loss)
            return {"loss": loss}

    class Keep(Callback):
        def on_train_begin(self, logs=None):
            self.model.kept = self.model.module[0].weight.detach()

    def trained(run_eagerly):
        torch.manual_seed(0)
        model = Keeps(nn.Sequential(nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 1)))
        model.compile("sgd", "mse", run_eagerly=run_eagerly)
        fit = {"batch_size": 8, "epochs": 3, "shuffle": False, "verbose": 0, "cores": cores, "callbacks": [Keep()]}
        return model.fit(X, Y, **fit).history["loss"]

    assert trained(False) == pytest.approx(trained(True), rel=1e-5)


@pytest.mark.cores(1)
def test_tensorboard_gets_a_profile(cores, tmp_path):
    model = tpufit.Model(nn.Linear(3, 1))
    model.compile("sgd", "mse")
    profiling = TensorBoard(tmp_path, profile_batch=(2, 3))
    model.fit(X, Y, batch_size=4, epochs=1, verbose=0, cores=cores, callbacks=[profiling])
    (written,) = tmp_path.glob("train/plugins/profile/*/*.xplane.pb")
    assert written.stat().st_size > 0


def test_an_interrupt_while_torch_tpu_is_imported_comes_after_it(run_python):
    """In the middle of an import it would leave packages that can't be used, such as half of sympy."""
    code = """
    import os, signal, sys
    import torch, tpufit
    from torch import nn

    class Interrupts:
        seen = 0

        def find_spec(self, name, path=None, target=None):
            self.seen += bool(self.seen or name == "torch_tpu")
            if self.seen in (20, 160):
                os.kill(os.getpid(), signal.SIGINT)

    sys.meta_path.insert(0, interrupts := Interrupts())
    for _ in range(2):
        try:
            model = tpufit.Model(nn.Linear(3, 4))
            model.compile("sgd", "cross_entropy", scale_lr=None)
            model.fit(torch.zeros(8, 3), torch.zeros(8, dtype=torch.int64), 4, verbose=0, cores=1)
            print("trained")
        except KeyboardInterrupt:
            print("interrupted", interrupts.seen > 200)
    """
    process = run_python(code, fresh=True)
    assert process.stdout == "interrupted True\ntrained\n", process.stderr
