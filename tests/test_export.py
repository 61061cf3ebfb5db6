"""`export` writes a program that plain PyTorch loads, with the current weights, for any number of rows."""

import pytest
import torch
from torch import nn

import tpufit
from tpufit.errors import ArgumentError
from tpufit.runtime.driver import driver

# A warning of PyTorch while it reads the file.
pytestmark = pytest.mark.filterwarnings("ignore:The given buffer is not writable")


class Pair(nn.Module):
    """Two inputs, nested outputs, tied weights, and layers that behave differently in training."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.rest = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout())
        self.register_buffer("two", torch.tensor(2.0), persistent=False)

    def forward(self, left, right):
        return {"sum": self.rest(self.a(left) + self.b(right)) * self.two}


def loaded(path):
    return torch.export.load(path).module()


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("named", [False, True])
def test_several_inputs(tmp_path, named, rows):
    model = tpufit.Model(Pair())
    left, right = torch.ones(rows, 4), torch.ones(rows, 4)
    model.export(tmp_path / "pair.pt2", {"right": right.numpy(), "left": left} if named else (left, right))
    assert model.module.training
    program = loaded(tmp_path / "pair.pt2")
    for count in (1, 5):
        left, right = torch.randn(2, count, 4)
        found = program(left=left, right=right) if named else program(left, right)
        torch.testing.assert_close(found, model.module.eval()(left, right))


@pytest.mark.cores(1, 8)
@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.soak), "bf16-true"])
@pytest.mark.soak_on(8)
def test_the_current_weights_are_exported(cores, tmp_path, precision, run_python):
    def exported():
        model.export(path, x)
        return loaded(path)(x.to(dtype)).float().detach()

    x, path = torch.randn(32, 4), tmp_path / "net.pt2"
    dtype, error = (torch.float32, 1e-5) if precision == "fp32" else (torch.bfloat16, 0.05)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 2))
    model = tpufit.Model(net)
    model.compile("adam", "mse", precision=precision, use_ema=True, ema_momentum=0.5)
    model.fit(x, x[:, :2], batch_size=2, verbose=0, cores=cores)
    model.train_on_batch(x, x[:, :2])  # afterwards the averages differ from the weights
    tensors, random = list(map(id, net.parameters())), torch.get_rng_state()
    weights = exported()
    assert list(map(id, net.parameters())) == tensors
    assert {p.device.type for p in net.parameters()} == {driver().device_type}
    assert torch.equal(torch.get_rng_state(), random)
    torch.testing.assert_close(weights, torch.tensor(model.predict(x, verbose=0)).float(), rtol=error, atol=error)
    model.swap_ema_weights()
    averages = exported()
    torch.testing.assert_close(averages, torch.tensor(model.predict(x, verbose=0)).float(), rtol=error, atol=error)
    assert not torch.equal(weights, averages)
    model.fit(x, x[:, :2], batch_size=2, verbose=0)  # and training continues
    result = run_python(f"""
        import sys; sys.modules["torch_xla"] = sys.modules["tpufit"] = None
        import torch
        print(*torch.export.load("net.pt2").module()(torch.zeros(7, 4, dtype={dtype})).shape)
    """)
    assert result.stdout == "7 2\n", result.stderr


class ByValue(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum().item() > 0 else x


class ByRows(nn.Module):
    def forward(self, x):
        return x.reshape(3, 4) + 1


@pytest.mark.parametrize("net", [ByValue(), ByRows(), Pair()])
def test_a_module_that_cannot_be_exported_is_one_error(tmp_path, net):
    with pytest.raises(ArgumentError, match=rf"{type(net).__name__} can't be exported.*PyTorch says: \S"):
        tpufit.Model(net).export(tmp_path / "net.pt2", torch.ones(3, 4))
    assert list(tmp_path.iterdir()) == []


def test_the_suffix_selects_the_format(tmp_path):
    with pytest.raises(ArgumentError, match=r"LiteRT has its own converter.*litert_torch\.convert\("):
        tpufit.Model(nn.Linear(2, 2)).export(tmp_path / "net.tflite", torch.ones(1, 2))
    with pytest.raises(ArgumentError, match=r"is a \.pt2 or \.onnx file, got filepath='.*net\.pt'"):
        tpufit.Model(nn.Linear(2, 2)).export(tmp_path / "net.pt", torch.ones(1, 2))
    assert not list(tmp_path.iterdir())


def test_onnx_without_its_packages(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "onnxscript", None)
    with pytest.raises(ArgumentError, match=r"onnxscript: pip install 'tpufit\[onnx\]'"):
        tpufit.Model(nn.Linear(2, 2)).export(tmp_path / "net.onnx", torch.ones(1, 2))


class Attention(nn.Module):
    """Words, attention, a norm, and a mask from the other input."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(10, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, ids, mask):
        return {"logits": self.layer(self.words(ids), src_key_padding_mask=mask), "rows": ids.sum(1)}


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("named", [False, True])
def test_onnx_computes_the_same_for_any_number_of_rows(tmp_path, named):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    model = tpufit.Model(Attention())
    ids, mask = torch.randint(0, 10, (1, 6)), torch.zeros(1, 6, dtype=torch.bool)
    model.export(tmp_path / "net.onnx", {"ids": ids, "mask": mask} if named else (ids, mask))
    assert [path.name for path in tmp_path.iterdir()] == ["net.onnx"] and model.module.training
    session = runtime.InferenceSession(tmp_path / "net.onnx")
    assert [(one.name, one.shape) for one in session.get_inputs()] == [("ids", ["batch", 6]), ("mask", ["batch", 6])]
    assert [one.shape for one in session.get_outputs()] == [["batch", 6, 8], ["batch"]]
    for rows in (1, 5):
        ids, mask = torch.randint(0, 10, (rows, 6)), torch.zeros(rows, 6, dtype=torch.bool)
        mask[:, 4:] = True
        logits, sums = session.run(None, {"ids": ids.numpy(), "mask": mask.numpy()})
        expected = model.module.eval()(ids, mask)
        torch.testing.assert_close(torch.from_numpy(logits), expected["logits"], rtol=1e-4, atol=1e-5)
        assert torch.equal(torch.from_numpy(sums), expected["rows"])


@pytest.mark.soak
@pytest.mark.cores(1, 8)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_onnx_of_a_trained_net_predicts_what_the_model_does(cores, tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    x = torch.randn(32, 1, 6, 6)
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Dropout(), nn.Linear(48, 2))
    model = tpufit.Model(net)
    model.compile("adam", "mse")
    model.fit(x, torch.randn(32, 2), batch_size=2, verbose=0, cores=cores)
    model.export(tmp_path / "net.onnx", x[:1])
    session = runtime.InferenceSession(tmp_path / "net.onnx")
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), torch.tensor(model.predict(x, verbose=0)), rtol=1e-4, atol=1e-5)


class Scores(nn.Module):
    def forward(self, x):
        return {"twice": 2 * x, "norm": x.norm(dim=1)}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.soak
def test_the_outputs_of_onnx_have_the_names_of_a_dict(tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    tpufit.Model(Scores()).export(tmp_path / "net.onnx", torch.ones(1, 2))
    session = runtime.InferenceSession(tmp_path / "net.onnx")
    assert [output.name for output in session.get_outputs()] == ["twice", "norm"]
    x = torch.randn(3, 2)
    for found, wanted in zip(session.run(None, {"x": x.numpy()}), Scores()(x).values(), strict=True):
        torch.testing.assert_close(torch.from_numpy(found), wanted)
