"""Placements of steps: tensors are sent and read back unchanged, whole or split by rows."""

import pytest
import torch
from call_costs import spent

from tpufit import runtime
from tpufit.backend import HOST, Sharding
from tpufit.metrics import PassMetrics
from tpufit.runtime.driver import driver
from tpufit.runtime.program_recorder import Recorder

pytestmark = pytest.mark.cores(1, 8, quick=True)


@pytest.mark.parametrize("rows", [1, 3, 8, 13, 16])
@pytest.mark.parametrize("sharding", [Sharding.ROWS, Sharding.WHOLE], ids=["rows", "whole"])
def test_tensors_are_sent_and_read_back(place, rows, sharding):
    values = [
        torch.randn(rows, 4),
        torch.randn(rows, 2, 3).to(torch.bfloat16),
        torch.arange(rows),
        torch.arange(rows, dtype=torch.int32),
        torch.arange(rows, dtype=torch.uint8),
        torch.arange(rows) % 2 == 0,
        torch.tensor(3.5),
        torch.randn(4, rows).t(),  # not contiguous
    ]
    sent, counts = spent(lambda: runtime.to_device(values, place, sharding))
    assert all(tensor.device.type == driver().device_type for tensor in sent) and not counts.waits
    back, counts = spent(lambda: runtime.to_host(sent, "test"))
    assert counts.waits == {"test": 1} and not counts.graphs
    for value, result in zip(values, back, strict=True):
        assert result.dtype is value.dtype and torch.equal(result, value)


def test_sending_keeps_device_tensors_in_order(place):
    rows, whole = torch.arange(16.0), torch.arange(3.0)
    (there,) = runtime.to_device([whole], place)
    sent = runtime.to_device([rows, there, rows + 1], place, [Sharding.ROWS, Sharding.WHOLE, Sharding.ROWS])
    assert sent[1] is there
    for tensor, value in zip(runtime.to_host(sent, "test"), (rows, whole, rows + 1), strict=True):
        assert torch.equal(tensor, value)


@pytest.mark.runtime("torch_xla")
def test_rows_are_split_only_on_several_cores(place, cores):
    import torch_xla

    rows, whole = runtime.to_device([torch.ones(16, 2)] * 2, place, [Sharding.ROWS, Sharding.WHOLE])
    specs = [torch_xla._XLAC._get_xla_sharding_spec(t) for t in (rows, whole)]
    assert specs == (["", ""] if cores == 1 else ["{devices=[8,1]0,1,2,3,4,5,6,7}", "{replicated}"])


def test_placements_are_equal_if_they_share_tensors(place, cores):
    assert place == runtime.make_placement(runtime.start(cores, "test")) and place != HOST
    assert (place.count, place.hosts, place.on_host, place.has_mesh) == (cores, 1, False, cores > 1)
    assert place.local_shards == (None if cores == 1 else tuple(range(cores)))
    assert (HOST.count, HOST.hosts, HOST.on_host, HOST.has_mesh, HOST.local_shards) == (1, 1, True, False, None)


def test_on_the_host_tensors_are_unchanged():
    tensors = [torch.ones(2), torch.zeros(3)]
    assert all(one is other for one, other in zip(HOST.send(tensors, Sharding.ROWS), tensors, strict=True))
    assert HOST.pin(tensors[0]) is HOST.lay_out(tensors[0], Sharding.ROWS) is HOST.gather(tensors[0]) is tensors[0]


def test_a_different_layout_has_the_same_values(place):
    """A tensor keeps its layout; a copy of it may have another layout, in a traced step."""

    def body(inputs, seed):
        seed(0)
        own = place.lay_out(inputs[0] + 1, Sharding.ROWS)
        return own, place.gather(own * 2)

    program = runtime.make_program(place, "predict", runtime.make_state(place, []), PassMetrics([], place))
    (x,) = place.send([torch.arange(24.0).reshape(12, 2)])
    rows, whole = runtime.to_host(program("key", [x], [0], body), "test")
    assert torch.equal(rows, torch.arange(24.0).reshape(12, 2) + 1) and torch.equal(whole, 2 * rows)


@pytest.mark.runtime("torch_xla")  # a preflight needs it
def test_absent_cores_run_nothing(place, cores):
    recorder = Recorder()
    absent = runtime.make_placement(place.cores, recorder)
    sent = absent.send([torch.empty(16, 2, device="meta"), torch.ones(3)], [Sharding.ROWS, Sharding.WHOLE])
    assert [tuple(tensor.shape) for tensor in sent] == [(16, 2), (3,)]
    assert absent.count == cores and absent.in_flight().add(sent[0], 1) is None
    assert place.runs and not absent.runs
