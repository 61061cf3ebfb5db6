"""The dtypes in which a module computes, and errors for unsupported settings."""

import re
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import tpufit
from tpufit import runtime
from tpufit.callbacks import OneCycle
from tpufit.errors import BatchError, UnknownNameError
from tpufit.optimizers import list_device_state
from tpufit.step import precision
from tpufit.utils.text import format_bytes

pytestmark = pytest.mark.cores(1, 8, timeout=300)

X = np.random.default_rng(0).normal(size=(133, 6)).astype("float32")
Y = (X.sum(1) > 0).astype("int64")


class Spy(nn.Module):
    """Records the dtypes in a step."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(6, 6, bias=False)
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.norm, self.last = nn.BatchNorm1d(6), nn.Linear(6, 2)
        self.formats = {}

    def forward(self, x):
        h = self.norm(self.head(torch.relu(self.embedding(x))))
        self.formats = {"x": x.dtype, "h": h.dtype, "weight": self.last.weight.dtype}
        return self.last(h)


@pytest.mark.parametrize("name", ["fp32", "bf16", "bf16-true"])
def test_inputs_weights_and_loss_have_the_formats_of_the_precision(cores, name):
    class Model(tpufit.Model):
        def train_step(self, batch):
            logs = super().train_step(batch)
            formats["loss"] = logs["loss"].dtype
            return logs

    torch.manual_seed(0)
    formats, net = {}, Spy()
    model = Model(net)
    model.compile(
        lambda p: torch.optim.AdamW(p, 0.01), "cross_entropy", metrics=["accuracy"], precision=name, scale_lr=None
    )
    history = model.fit(X, Y, 16 // cores, 4, verbose=0, cores=cores).history
    whole = torch.bfloat16 if name == "bf16-true" else torch.float32
    assert net.formats["x"] is net.formats["weight"] is whole
    assert formats["loss"] is torch.float32
    moments = [value.dtype for state in model.optimizer.state.values() for key, value in state.items() if key != "step"]
    assert set(moments) == {whole}
    assert net.head.weight is net.embedding.weight  # still tied
    assert history["loss"][-1] < history["loss"][0] and history["accuracy"][-1] > 0.7
    assert model.predict(X, verbose=0).dtype == np.float32
    assert model.state_dict()["last.weight"].dtype is whole
    assert not model.report().traced["train"]
    lines = []
    model.summary(lines.append)
    products = "float32" if name == "fp32" else "bfloat16"
    weights = "bfloat16" if name == "bf16-true" else "float32"
    said = f"precision {name}: matrix products in {products}, weights in {weights}, loss in float32"
    assert lines[0].splitlines()[-1] == said
    shapes = {line.split()[0]: line.split()[2] for line in lines[0].splitlines()[1:] if line.startswith(" ")}
    assert shapes["last"].startswith("16x")  # the whole batch of the first step
    kept = list_device_state(model.optimizer)  # with the step counter that the weights share, and its spare
    gradients, state = (format_bytes(sum(t.nbytes for t in tensors)) for tensors in (net.parameters(), kept))
    assert f"{gradients} gradients + {state} optimizer" in lines[0]


def test_a_precision_without_effect_is_reported(cores):
    class Stubborn(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 2)

        def forward(self, x):
            with torch.autocast(x.device.type, enabled=False):
                return self.layer(x)

    model = tpufit.Model(Stubborn())
    model.compile("sgd", "cross_entropy", precision="bf16")
    with pytest.warns(
        UserWarning, match="precision='bf16', but the first step computed its matrix products in float32"
    ):
        model.fit(X, Y, 16 // cores, 1, verbose=0, cores=cores)


def test_weights_in_float64_have_a_cure(cores):
    model = tpufit.Model(nn.Sequential(nn.Linear(6, 2)).double())
    model.compile("sgd", "cross_entropy")
    with pytest.raises(BatchError, match=r"has weights in float64, which a TPU lacks.*float32: module.float\(\)"):
        model.fit(X.astype("float64"), Y, 16 // cores, verbose=0, cores=cores)
    model.module.float()
    assert len(model.fit(X.astype("float64"), Y, 16 // cores, verbose=0, cores=cores).history["loss"]) == 1


def share_of_best(y_pred, y):
    return y_pred.softmax(1).amax(1)


@pytest.mark.parametrize("options", [{}, {"accumulate_steps": 2, "use_ema": True, "clip_norm": 0.1}], ids=["", "more"])
@pytest.mark.soak_on(8)
def test_rates_and_sums_stay_float32_with_another_default_dtype(cores, options):
    def trained(default):
        torch.manual_seed(0)
        model = tpufit.Model(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)))
        torch.set_default_dtype(default)
        try:
            make = partial(torch.optim.AdamW, lr=0.0123)
            model.compile(make, "cross_entropy", metrics=[share_of_best], scale_lr=None, **options)
            how = {"validation_data": (X, Y, np.linspace(0, 1, len(X))), "class_weight": {1: 0.3}, "cores": cores}
            history = model.fit(X, Y, 16 // cores, 2, verbose=0, callbacks=[OneCycle(0.0123)], **how).history
        finally:
            torch.set_default_dtype(torch.float32)
        return history, model.get_weights()

    history, weights = trained(torch.float32)
    found, others = trained(torch.bfloat16)
    assert found == history and all(map(np.array_equal, others, weights))


@pytest.mark.soak_on(8)
def test_a_trained_module_can_become_bfloat16(cores):
    model = tpufit.Model(Spy())
    model.compile("sgd", "cross_entropy", scale_lr=None)
    model.fit(X, Y, 16 // cores, 1, verbose=0, cores=cores)
    before = model.state_dict()["last.weight"]
    model.compile("sgd", "cross_entropy", precision="bf16-true", scale_lr=None)
    assert torch.equal(model.state_dict()["last.weight"], before.bfloat16())
    model.fit(X, Y, 16 // cores, 1, verbose=0)
    assert model.module.last.weight.dtype is torch.bfloat16


@pytest.mark.runtime("torch_xla")
def test_matmul_precision_is_passed_to_torch_xla(cores):
    import torch_xla

    model = tpufit.Model(Spy())
    for name in ("highest", "default"):
        model.compile("sgd", "cross_entropy", matmul_precision=name)
        model.fit(X, Y, 16 // cores, 1, verbose=0, cores=cores)
        assert torch_xla._XLAC._xla_get_mat_mul_precision() == name
    with pytest.raises(UnknownNameError, match="unknown matmul_precision 'higher': did you mean 'high"):
        model.compile("sgd", "cross_entropy", matmul_precision="higher")


@pytest.mark.parametrize(("name", "written"), [("default", ""), ("high", "high,high"), ("highest", "highest,highest")])
@pytest.mark.runtime("torch_xla")
def test_a_program_has_the_precision_of_each_product(name, written):
    """The same meaning on every torch_xla; an unwritten precision is one pass of bfloat16 on a TPU."""
    import torch_xla

    runtime.set_matmul_precision(name)
    x = torch.ones(2, 4, 8, device="xla")
    products = [x[0] @ x[0].T, nn.functional.conv1d(x, x), torch.bmm(x, x.mT)]
    hlo = torch_xla._XLAC._get_xla_tensors_hlo(products)
    runtime.set_matmul_precision("default")
    lines = [line for line in hlo.splitlines() if re.search(r" (dot|convolution)\(", line)]
    found = [re.search(r"operand_precision=\{(.*?)\}", line) for line in lines]
    assert [match[1] if match else "" for match in found] == [written] * 3


@pytest.mark.parametrize("variable", ["XLA_USE_BF16", "XLA_DOWNCAST_F16"])
def test_retired_variables_are_warned_of(monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    with pytest.warns(UserWarning, match=f"the environment sets {variable}.*precision='bf16'"):
        precision.check("fp32")
    monkeypatch.setenv(variable, "0")
    precision.check("fp32")
