"""A preflight's trace on TorchTPU, without a TPU or another plugin, gives the program of a fit."""

import json

import pytest

pytestmark = pytest.mark.runtime("torch_tpu")

TRACE = """
    import json, sys
    from pathlib import Path
    import torch, tpufit
    from torch import nn
    from tpufit.preflight.preflight_plan import TRACED
    from tpufit.preflight.run_preflight import PreflightRun
    from tpufit.preflight.tpu_slices import find_slice
    from tpufit.data.user_data import recognize
    from tpufit.trainer.fit_arguments import TrainingData, ValidationData

    def traced(net, on, rows, compile=None, **data):
        model = tpufit.Model(net)
        model.compile(**(compile or {"optimizer": "adamw", "loss": "cross_entropy", "metrics": ["accuracy"]}))
        folder = Path(on)
        folder.mkdir()
        train = TrainingData(recognize(**data), batch_size=rows)
        run = PreflightRun(model._engine, train, ValidationData(), None, 300.0, False)
        run.trace(run.plan(find_slice(on)), folder)
        return json.loads((folder / TRACED).read_text()), (folder / "0.hlo").read_text()
"""


def test_the_traced_program_equals_the_step(run_python, tmp_path):
    code = f"""
    {TRACE}
    torch.manual_seed(0)
    x, y = torch.randn(8, 3), torch.randn(8, 1)
    net = nn.Linear(3, 1)
    facts, text = traced(net, "v5e-1", 8, {{"optimizer": "sgd", "loss": "mse"}}, x=x, y=y)
    torch.save([x, y, net.weight.detach(), net.bias.detach(), text, facts["0"]["arguments"]], "step.pt")
    """
    ended = run_python(code, env={"TPU_LIBRARY_PATH": None})
    assert ended.returncode == 0, ended.stderr
    code = """
    import torch, tpufit
    from torch.nn import functional as F
    from tpufit import runtime
    from tpufit.drivers.torchtpu.compute_modes import computing
    from tpufit.drivers.torchtpu.programs import compile_text

    runtime.start(1, "test")
    x, y, weight, bias, text, arguments = torch.load("step.pt")
    known = {"weight": weight, "bias": bias}
    inputs = iter([x, y])
    given = []
    for one in arguments:
        if one["source"] == "state" and one["name"]:
            value = known[one["name"]]
        elif one["source"] == "input" and one["shape"][:1] == [8]:
            value = next(inputs)
        else:  # the rate, and sums
            value = torch.full(one["shape"], 0.01 if one["source"] == "input" else 0.0)
        given.append(value)
    with computing():
        program, _ = compile_text(text)
        results = [r.cpu() for r in program([value.to("tpu") for value in given])]
    weight, bias = weight.clone().requires_grad_(), bias.clone().requires_grad_()
    F.mse_loss(x @ weight.T + bias, y).backward()
    torch.testing.assert_close(results[:2], [weight.detach() - 0.01 * weight.grad, bias.detach() - 0.01 * bias.grad])
    assert text.count("tf.aliasing_output") == 2
    print("done")
    """
    ended = run_python(code)
    assert ended.stdout.strip() == "done", ended.stderr


def test_the_program_of_8_cores_has_all_shardings(run_python):
    code = f"""
    {TRACE}
    net = nn.Sequential(nn.Embedding(50, 8), nn.Flatten(), nn.LayerNorm(32), nn.Dropout(0.1), nn.Linear(32, 10))
    x, y = torch.zeros(200, 4, dtype=torch.int64), torch.zeros(200, dtype=torch.int64)
    facts, text = traced(net, "v5e-8", 16, x=x, y=y)
    head = text[: text.index("return")].partition(") -> ")[0]
    print(json.dumps([facts, head, "num_partitions = 8" in text, text.count("stablehlo.while")]))
    """
    ended = run_python(code, env={"TPU_LIBRARY_PATH": None})
    assert ended.returncode == 0, ended.stderr
    facts, head, parted, _ = json.loads(ended.stdout)
    step = facts["0"]
    assert parted and step["role"] == "train" and step["rows"] == 128
    of_state = [one for one in step["arguments"] if one["source"] == "state"]
    assert head.count("tf.aliasing_output") == len(of_state) > 12
    rows = [one for one in step["arguments"] if one["axis"] == 0]
    assert [one["shape"] for one in rows] == [[128, 4], [128]]
    assert head.count("devices=[8,1]<=[8]") == head.count("devices=[8]<=[8]") == 1
    assert head.count("{replicated}") == len(step["arguments"]) - 2


def test_split_weights_stay_split_after_a_step(run_python):
    code = f"""
    {TRACE}
    options = {{"optimizer": "adamw", "loss": "mse", "shard": "fsdp"}}
    facts, text = traced(nn.Linear(512, 1024), "v5e-8", 8, options, x=torch.zeros(64, 512), y=torch.zeros(64, 1024))
    split = [one["axis"] for one in facts["0"]["arguments"] if one["shape"] == [1024, 512]]
    print(json.dumps([[one["role"] for one in facts.values() if "role" in one], split]))
    """
    ended = run_python(code, env={"TPU_LIBRARY_PATH": None})
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == [["train"], [0, 0, 0]]  # one program, and the weight and its two averages


def test_an_lstm_is_products_in_the_format_of_autocast(run_python):
    code = f"""
    {TRACE}
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(3, 8, num_layers=2, batch_first=True, dropout=0.5)
            self.head = nn.Linear(8, 10)

        def forward(self, x):
            return self.head(self.lstm(x)[0][:, -1])

    how = {{"optimizer": "sgd", "loss": "cross_entropy", "precision": "bf16"}}
    _, text = traced(Net(), "v5e-1", 4, how, x=torch.zeros(4, 5, 3), y=torch.zeros(4, dtype=torch.int64))
    products = [line for line in text.splitlines() if "stablehlo.dot" in line]
    print(len(products) >= 20 and all("bf16>" in line.partition(" : ")[2] for line in products))
    """
    ended = run_python(code, env={"TPU_LIBRARY_PATH": None})
    assert ended.stdout.strip() == "True", ended.stderr


def test_torchtpu_parses_the_program_of_flash_attention(run_python, tmp_path):
    pytest.importorskip("jax")
    code = f"""
    {TRACE}
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(50, 384)

        def forward(self, x):
            q, k, v = self.words(x).unflatten(2, (3, 2, 64)).permute(2, 0, 3, 1, 4)
            return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).mean((1, 2))

    how = {{"optimizer": "sgd", "loss": "cross_entropy", "precision": "bf16"}}
    x, y = torch.zeros(8, 1024, dtype=torch.int64), torch.zeros(8, dtype=torch.int64)
    facts, text = traced(Net(), "v5e-8", 1, how, x=x, y=y)
    Path("text").write_text(text)
    from tpufit.runtime.kernel_work import find_kernel_work
    print(sum(work.operations for work in map(find_kernel_work, text.splitlines()) if work))
    """
    ended = run_python(code, env={"TPU_LIBRARY_PATH": None})
    assert ended.returncode == 0, ended.stderr
    scores = 2 * 3 * 512 * 512  # of two heads; a causal mask leaves three of four blocks
    assert int(ended.stdout) == 2 * 64 * scores * (2 + 3 + 4)
    code = """
    from pathlib import Path
    from tpufit import runtime
    from tpufit.drivers.torchtpu.private_names import names

    runtime.start(1, "test")
    text = names().serialize_text(names().parse_text(Path("text").read_text()))
    print(*(text.count(name) for name in ("tpu_custom_call", "SPMDFullToShardShape", "SPMDShardToFullShape")))
    """
    ended = run_python(code)
    # Of the kernels: the result and its gradients; queries, keys, values and the gradient on each core.
    assert ended.stdout.split() == ["3", "4", "4"], ended.stderr


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("x * torch.rand(x.shape, device=x.device)", "draws random numbers by aten::rand"),
        ("x if x.sum() > 0 else -x", "reads a value"),
    ],
)
def test_steps_that_need_a_device_are_refused(run_python, body, said):
    code = f"""
    {TRACE}
    class Net(nn.Linear):
        def forward(self, x):
            x = super().forward(x)
            return {body}

    try:
        traced(Net(3, 10), "v5e-8", 2, x=torch.zeros(16, 3), y=torch.zeros(16, dtype=torch.int64))
    except tpufit.errors.PreflightError as error:
        print(error)
    """
    ended = run_python(code, env={"TPU_LIBRARY_PATH": None})
    assert said in ended.stdout, ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("tpu", ["v5p-8", "v6e-8", "v7x-8"])
def test_a_large_embedding_compiles_for_chips_with_sparse_cores(run_python, tpu):
    """Without tpufit's flags, libtpu gives the embedding to the SparseCores, and jaxlib can't read the program."""
    code = f"""
    import torch, tpufit
    from torch import nn
    model = tpufit.Model(nn.Sequential(nn.Embedding(50257, 768), nn.Linear(768, 8)))
    model.compile("sgd", "mse")
    x, y = torch.zeros(64, 1024, dtype=torch.long), torch.zeros(64, 1024, 8)
    report = model.preflight(x, y, batch_size=8, tpu="{tpu}", verbose=0)
    print(report.fits, report.step.cost.cycles > 1e5)
    """
    ended = run_python(code, env={"TPU_LIBRARY_PATH": None})
    assert ended.stdout.strip() == "True True", ended.stderr


SCANS = """
    module {
      func.func public @main(%x: tensor<2x5xf32>) -> (tensor<2x5xf32>, tensor<2x5xf32>) {
        %zero = stablehlo.constant dense<0.0> : tensor<2xf32>
        %one = stablehlo.constant dense<1.0> : tensor<5xf32>
        %a:2 = chlo.scan(%x) inits (%zero) dimension=1
            attributes {is_associative = true, is_reverse = false, scan_dim_size = 5 : i64} {
        ^bb0(%input: tensor<2xf32>, %carry: tensor<2xf32>):
          %s = stablehlo.add %input, %carry : tensor<2xf32>
          stablehlo.return %s, %s : tensor<2xf32>, tensor<2xf32>
        } : (tensor<2x5xf32>, tensor<2xf32>) -> (tensor<2x5xf32>, tensor<2xf32>)
        %b:2 = chlo.scan(%x) inits (%one) dimension=0
            attributes {is_associative = true, is_reverse = true, scan_dim_size = 2 : i64} {
        ^bb0(%input: tensor<5xf32>, %carry: tensor<5xf32>):
          %s = stablehlo.multiply %input, %carry : tensor<5xf32>
          stablehlo.return %s, %s : tensor<5xf32>, tensor<5xf32>
        } : (tensor<2x5xf32>, tensor<5xf32>) -> (tensor<2x5xf32>, tensor<5xf32>)
        return %a#0, %b#0 : tensor<2x5xf32>, tensor<2x5xf32>
      }
    }
"""


def test_rewritten_scans_compute_the_same(run_python):
    """Executed by JAX on the CPU, which can't compile the scans themselves."""
    code = f"""
    import jax, numpy, torch
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jax._src.lib.mlir import ir
    from tpufit.preflight.compiling import rewrite_scans

    with mlir.make_ir_context():
        module = ir.Module.parse({SCANS!r})
        rewrite_scans(module)
        code = mlir.module_to_bytecode(module)
    x = torch.arange(10.0).reshape(2, 5) + 1
    (device,) = jax.devices("cpu")
    executable = device.client.compile_and_load(code, [device], xla_client.CompileOptions())
    results = executable.execute_sharded([jax.device_put(x.numpy())]).disassemble_into_single_device_arrays()
    sums, products = (torch.from_numpy(numpy.array(result[0])) for result in results)
    print(torch.equal(sums, x.cumsum(1)), torch.equal(products, x.flip(0).cumprod(0).flip(0)))
    """
    ended = run_python(code, env={"JAX_PLATFORMS": "cpu"})
    assert ended.stdout.strip() == "True True", ended.stderr


@pytest.mark.slow
def test_cumulative_sums_compile_and_cumulative_maxima_are_refused(run_python):
    code = """
    import torch, tpufit
    from torch import nn

    class Net(nn.Module):
        def __init__(self, function):
            super().__init__()
            self.project, self.function = nn.Linear(8, 8), function

        def forward(self, x):
            return self.function(self.project(x))

    x = torch.randn(64, 8)
    for function in (lambda x: x.cumsum(1) + x.cumsum(0), lambda x: x.cumprod(1), lambda x: x.cummax(1).values):
        model = tpufit.Model(Net(function))
        model.compile("sgd", "mse")
        try:
            print(model.preflight(x, x, batch_size=8, tpu="v5e-8", verbose=0).fits)
        except tpufit.errors.PreflightError as error:
            print("torch.cummax" in str(error))
    """
    ended = run_python(code, env={"TPU_LIBRARY_PATH": None})
    assert ended.stdout.split() == ["True"] * 3, ended.stderr
