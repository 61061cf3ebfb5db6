"""Settings that torch_xla reads only during lowering: two fits that differ in one get two programs."""

import gc
import importlib
import os
import pickle
import textwrap

import numpy as np
import pytest
import torch
from torch import nn

import tpufit
from tpufit import runtime
from tpufit.callbacks import Callback
from tpufit.runtime.driver import driver

GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(64, 6)).astype("float32")
Y = GENERATOR.integers(0, 3, 64)


def compiled(matmul_precision="default", **options):
    torch.manual_seed(0)
    model = tpufit.Model(nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 3)))
    model.compile("sgd", "cross_entropy", matmul_precision=matmul_precision, scale_lr=None, **options)
    return model


def graphs_of(model, cores, **options):
    before = runtime.counts()
    model.fit(X, Y, 16 // cores, 2, verbose=0, cores=cores, **options)
    return (runtime.counts() - before).graphs["train"]


@pytest.mark.cores(1, 8)
@pytest.mark.parametrize("jit_compile", ["auto", False], ids=["replayed", "traced"])
@pytest.mark.usefixtures("compiles_anew")
def test_each_precision_has_its_own_program(cores, jit_compile):
    wanted = ["default", "highest", "high", "default", "highest", "high"]
    counts = [graphs_of(compiled(name, jit_compile=jit_compile), cores) for name in wanted]
    assert counts == [1, 1, 1, 0, 0, 0]  # and each is found again


@pytest.mark.cores(1, 8)
@pytest.mark.parametrize("name", ["XLA_STABLEHLO_COMPILE", "CONVERT_SHLO_TO_SHARDY"])
@pytest.mark.runtime("torch_xla")
@pytest.mark.usefixtures("compiles_anew")
def test_a_variable_that_is_read_at_each_compilation(cores, name, monkeypatch):
    model = compiled()
    assert graphs_of(model, cores) == 1
    monkeypatch.setenv(name, "0")
    assert [graphs_of(model, cores), graphs_of(model, cores)] == [1, 0]
    monkeypatch.delenv(name)
    assert graphs_of(model, cores) == 0


@pytest.mark.cores(1, 8)
@pytest.mark.usefixtures("compiles_anew")
def test_autocast_is_part_of_a_graph(cores):
    precisions = ["fp32", "bf16", "fp32", "bf16"]
    assert [graphs_of(compiled(precision=one), cores) for one in precisions] == [1, 1, 0, 0]


class Meanwhile(Callback):
    """Predicts with another model, of the default precision, while this model trains."""

    def __init__(self):
        self.other = compiled()

    def on_epoch_begin(self, epoch, logs=None):
        self.other.predict(X, verbose=0)


@pytest.mark.cores(1)
@pytest.mark.usefixtures("compiles_anew")
def test_another_model_in_a_callback_leaves_the_precision_alone(cores):
    assert graphs_of(compiled("highest"), cores, callbacks=[Meanwhile()]) == 1
    assert graphs_of(compiled("highest"), cores) == 0  # it was lowered with its own precision
    assert graphs_of(compiled(), cores) == 1


@pytest.mark.runtime("torch_xla")
@pytest.mark.parametrize("cores", [pytest.param(1, marks=pytest.mark.soak), 8])
def test_the_text_of_the_programs_has_the_precision(cores, run_python, tmp_path):
    """XLA writes each program into a file before it optimizes it."""
    flags = f"--xla_dump_to={tmp_path / 'hlo'} --xla_dump_hlo_as_text --xla_backend_optimization_level=0"
    code = f"""
        import torch, tpufit
        from torch import nn
        x, y = torch.zeros(32, 6), torch.zeros(32, dtype=torch.int64)
        for name in ("default", "highest", "high", "default"):
            torch.manual_seed(0)
            model = tpufit.Model(nn.Linear(6, 3))
            model.compile("sgd", "cross_entropy", matmul_precision=name)
            model.fit(x, y, batch_size={32 // cores}, epochs=2, verbose=0, cores={cores})
    """
    done = run_python(textwrap.dedent(code), env={"XLA_FLAGS": flags})
    assert done.returncode == 0, done.stderr
    steps = []
    for path in sorted((tmp_path / "hlo").glob("*before_optimizations.txt"), key=os.path.getmtime):
        products = [line for line in path.read_text().splitlines() if " dot(" in line]
        if len(products) == 2:  # of a step, forward and backward: the input needs no gradient
            steps.append({word for word in ("highest", "high") if all(f"={{{word},{word}}}" in p for p in products)})
    assert steps == [set(), {"highest"}, {"high"}]


class Routed(nn.Module):
    """Layers of one shape, called in a given order."""

    def __init__(self, order):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.order = order

    def forward(self, x):
        for i in self.order:
            x = self.layers[i](x).tanh()
        return x


@pytest.mark.cores(1, 8)
def test_layers_called_in_another_order_are_another_program(cores):
    x = torch.from_numpy(X)
    for order in ([0, 1, 0], [0, 1, 1], [1, 0, 0]):
        net = Routed(order)
        expected = net(x).detach()
        predicted = tpufit.Model(net).predict(X, verbose=0, cores=cores)
        torch.testing.assert_close(torch.from_numpy(predicted), expected, rtol=0, atol=1e-6)


@pytest.mark.cores(1)
@pytest.mark.parametrize("when", ["between two fits", "between two epochs"])
def test_layers_of_one_shape_that_are_swapped_are_noticed(cores, when):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.head = nn.Linear(4, 1)
            self.swapped = False

        def forward(self, x):
            one, other = self.first(x), self.second(x)
            return self.head(other - one.tanh() if self.swapped else one - other.tanh())

    def trained(run_eagerly):
        torch.manual_seed(0)
        model = tpufit.Model(Net())
        model.compile("sgd", "mse", run_eagerly=run_eagerly)

        def swap(epoch, logs):
            model.module.swapped = epoch >= 2

        x = torch.randn(24, 4)
        data = {"x": x, "y": x.sum(1, keepdim=True), "batch_size": 8, "shuffle": False, "verbose": 0, "cores": cores}
        callbacks = [tpufit.callbacks.LambdaCallback(on_epoch_begin=swap)] if when == "between two epochs" else []
        losses = model.fit(**data, epochs=3, callbacks=callbacks).history["loss"]
        model.module.swapped = True
        return losses + model.fit(**data, epochs=2).history["loss"]

    assert trained(False) == pytest.approx(trained(True), rel=1e-5)


# All of these go through torch_xla's own search for a program. Each returns the value of a tensor of one number.
READS = {
    "item": lambda t: t.item(),
    "cpu": lambda t: float(t.cpu()),
    "format": lambda t: float(f"{t}".strip("tensor([])").split(",")[0].strip("]")),
    "copy_": lambda t: float(torch.zeros(1).copy_(t)),
    "an operation that runs on the host": lambda t: float(torch.histc(t, 3, 0, 3).argmax()) + 0.5,
    "torch_xla.sync": lambda t: (importlib.import_module("torch_xla").sync(), t.item())[1],
    "torch_xla.sync of tensors that gc.freeze hides": lambda t: (
        gc.freeze(),
        importlib.import_module("torch_xla").sync(),
        t.item(),
    )[-1],
    "pickle": lambda t: float(pickle.loads(pickle.dumps(t))),
}


@pytest.mark.cores(1, 8)
@pytest.mark.parametrize(
    "read", [pytest.param(name, marks=pytest.mark.runtime("torch_xla") if "sync" in name else ()) for name in READS]
)
def test_a_read_tells_operands_of_one_shape_apart(cores, read):
    placement = runtime.make_placement(runtime.start(cores, "test"))
    three, one = placement.send([torch.tensor([3.0]), torch.tensor([1.0])])
    placement.launch("transfer")
    found = [READS[read](top / (three - one)) for top in (three, one, three)]
    assert found == [1.5, 0.5, 1.5]


@pytest.mark.cores(1, 8)
@pytest.mark.parametrize("call", ["predict", "evaluate", "model"])
@pytest.mark.parametrize("jit_compile", ["auto", False], ids=["replayed", "traced"])
def test_each_call_tells_layers_of_one_shape_apart(cores, call, jit_compile):
    x = torch.from_numpy(X)
    for order in ([0, 1, 0], [0, 1, 1]):
        net = Routed(order)
        expected = net(x).detach()
        model = tpufit.Model(net)
        model.compile("sgd", "mse", jit_compile=jit_compile)
        if call == "evaluate":
            found = torch.tensor(model.evaluate(X, X, verbose=0, cores=cores))
            expected = nn.functional.mse_loss(expected, x)
        else:
            predicted = model.predict(X, verbose=0, cores=cores)
            found = model(x).detach().cpu() if call == "model" else torch.from_numpy(predicted)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.cores(1, 8)
@pytest.mark.runtime("torch_xla")
@pytest.mark.usefixtures("compiles_anew")
def test_a_graph_is_compiled_once_however_often_it_is_read(cores):
    placement = runtime.make_placement(runtime.start(cores, "test"))
    a, b = placement.send([torch.ones(3), torch.ones(3)])
    before = driver().count_compiled()
    for _ in range(3):
        (a * (a - b)).sum().item()
    assert driver().count_compiled() - before == 1
