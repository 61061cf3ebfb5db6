"""The runtime: tensors are sent and read back unchanged, and the counters count."""

from functools import partial

import pytest
import torch
from call_costs import spent

from tpufit import runtime
from tpufit.backend import HOST, Sharding
from tpufit.metrics import PassMetrics
from tpufit.runtime.driver import driver
from tpufit.runtime.ops.kernels import replace_kernels
from tpufit.utils import counters as report

pytestmark = pytest.mark.cores(1, 8, quick=True)


@pytest.mark.usefixtures("compiles_anew")
def test_reading_results_compiles_no_graph(place):
    """torch_xla itself would compile a gather for each tensor that is split over the cores."""
    (x,) = runtime.to_device([torch.arange(64.0).reshape(16, 4)], place, Sharding.ROWS)
    program = _program(lambda t: (t * 2, t.sum()), place)
    (y, total), counts = spent(lambda: program("key", [x], [0]))
    assert counts.graphs == {"predict": 1} and counts.waits == {"capture": 2}
    (doubled, summed), counts = spent(lambda: runtime.to_host([y, total], "test"))
    assert not counts.graphs and counts.waits == {"test": 1}
    assert torch.equal(doubled, torch.arange(64.0).reshape(16, 4) * 2) and summed == 64 * 63 / 2


def test_returned_inputs_belong_to_their_own_run(place):
    program = _program(lambda t: {"same": t, "more": t + 1, "word": "x"}, place)
    for i in range(4):
        (x,) = runtime.to_device([torch.full((8, 2), float(i))], place, Sharding.ROWS)
        out = program("key", [x], [0])
        same, more = runtime.to_host([out["same"], out["more"]], "test")
        assert same.unique().tolist() == [i] and more.unique().tolist() == [i + 1] and out["word"] == "x"


@pytest.mark.usefixtures("compiles_anew")
def test_the_same_graph_is_compiled_once(place):
    program = _program(lambda t: t.sin().sum(), place, role="eval")

    def step(value):
        (x,) = runtime.to_device([torch.full((8, 2), value)], place, Sharding.ROWS)
        return program("key", [x], [0])

    results, counts = spent(lambda: [step(float(i)) for i in range(5)])
    assert counts.graphs == {"eval": 1}
    for i, result in enumerate(runtime.to_host(results, "test")):
        torch.testing.assert_close(result, 16 * torch.tensor(float(i)).sin())


def test_random_numbers_depend_only_on_the_seed(place):
    program = _program(torch.nn.functional.dropout, place)

    def draw(seed):
        (x,) = runtime.to_device([torch.ones(16, 4)], place, Sharding.ROWS)
        return runtime.to_host([program("key", [x], [seed])], "test")[0]

    first = draw(7)
    draw(8)
    assert torch.equal(draw(7), first) and not torch.equal(draw(8), first)
    assert not torch.equal(draw(2**63 - 1), first)


def test_moving_in_place_keeps_objects_and_attributes(place):
    parameter = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    parameter.mark = "mine"
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    buffer = torch.zeros((), dtype=torch.int64)
    tensors = [parameter, frozen, buffer]
    view = parameter.detach()
    for target in (place, HOST):
        runtime.move(tensors, target)
        assert {t.device.type for t in tensors} == {"cpu" if target.on_host else driver().device_type}
        assert type(parameter) is torch.nn.Parameter and parameter.mark == "mine"
        assert parameter.requires_grad and not frozen.requires_grad and type(buffer) is torch.Tensor
    assert parameter.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]] and view.tolist() == parameter.tolist()


def test_copy_into_overwrites_a_device_tensor(place):
    (target,) = runtime.to_device([torch.zeros(3)], place)
    runtime.copy_into([target], [torch.ones(3)], place)
    assert runtime.to_host([target], "test")[0].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.runtime("torch_xla")
def test_fallbacks_and_host_reads_are_counted(place):
    def step(x):
        x.sum().item()
        return torch.bucketize(x, x[0])

    (x,) = runtime.to_device([torch.ones(8, 2)], place)
    program = _program(step, place, role="metric")
    with pytest.warns(
        UserWarning, match=r"traced again .* because it reads a value from the device at test_runtime.py:\d+"
    ):
        _, counts = spent(lambda: program("key", [x], [0]))
    assert counts.host_reads == 1 and counts.fallbacks["aten::bucketize.Tensor"] >= 1


@pytest.mark.parametrize("options", [{"is_causal": True}, {"attn_mask": torch.tensor([True, False, True])}])
@pytest.mark.runtime("torch_xla")
def test_attention_has_no_64_bit_numbers(place, options):
    import torch_xla

    query, *mask = runtime.to_device([torch.randn(8, 2, 3, 4), *(v for v in options.values() if v is not True)], place)
    options = dict(zip(options, mask, strict=True)) if mask else options
    with replace_kernels():
        shares = torch.nn.functional.scaled_dot_product_attention(query, query, query, **options)
    program = torch_xla._XLAC._get_xla_tensors_hlo([shares])
    assert "f32[8,2,3,4]" in program and "f64" not in program


def test_reports_know_all_roles(place):
    assert set(report.ROLES) == {"train", "eval", "predict", "init", "transfer", "metric"}


def _program(function, place, role="predict"):
    """A function of one tensor as a program without state."""

    def body(inputs, seed):
        seed(0)
        return function(*inputs)

    program = runtime.make_program(place, role, runtime.make_state(place, []), PassMetrics([], place))
    return partial(program, body=body)
