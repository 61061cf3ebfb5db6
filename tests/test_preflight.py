"""A training compiled for an absent TPU: its plan, its pickle, its programs and its report."""

import json
import os
import pickle
import random
import re
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torchmetrics
from engines import engine_of
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import tpufit
from tpufit.__main__ import main
from tpufit.data.user_data import recognize, recognize_held_out
from tpufit.errors import ArgumentError, LabelError, NotCompiledError, PreflightError, UnknownNameError
from tpufit.preflight import Comparison, PreflightReport
from tpufit.preflight.analysis import Collective, CompiledProgram, Cost, Memory, analyze
from tpufit.preflight.hlo import parse_arguments, parse_arrays, parse_operations
from tpufit.preflight.pickling import pickle_training
from tpufit.preflight.preflight_plan import make_plan
from tpufit.preflight.tpu_slices import find_slice
from tpufit.trainer.fit_arguments import TrainingData, ValidationData

pytestmark = pytest.mark.runtime("torch_xla")

X = np.random.default_rng(0).normal(size=(261, 6)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, 261)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3))


def made(kind=tpufit.Model, module=None, **compiling):
    model = kind(module or net())
    model.compile(**{"optimizer": "adamw", "loss": "cross_entropy", "metrics": ["accuracy"]} | compiling)
    return model


# Text of programs


@pytest.mark.parametrize(
    ("text", "shown", "nbytes", "padded"),
    [
        ("f32[]{:T(128)}", "f32[]", 4, 512),
        ("f32[100,10]{1,0:T(8,128)}", "f32[100,10]", 4000, 104 * 128 * 4),
        ("f32[100,10]{0,1:T(8,128)}", "f32[100,10]", 4000, 128 * 16 * 4),  # the other dimension is minor
        ("bf16[3,5,130]{2,1,0:T(8,128)(2,1)S(1)}", "bf16[3,5,130]", 3900, 3 * 8 * 256 * 2),
        ("pred[7]", "pred[7]", 7, 7),
        ("s4[8]{0}", "s4[8]", 4, 4),
        ("f8e4m3fn[4,4]{1,0}", "f8e4m3fn[4,4]", 16, 16),
        ("f8e5m2[4]{0}", "f8e5m2[4]", 4, 4),
        ("c128[2]{0}", "c128[2]", 32, 32),
        ("f32[0,4]{1,0}", "f32[0,4]", 0, 0),
    ],
)
def test_the_type_of_an_array(text, shown, nbytes, padded):
    (array,) = parse_arrays(text)
    assert (str(array), array.nbytes, array.padded) == (shown, nbytes, padded)


PROGRAM = """\
HloModule step, entry_computation_layout={(f32[100,10]{1,0:T(8,128)}, \
(s32[], bf16[3]{0}), f32[5000,2]{1,0:T(8,128)})->f32[]}

%add.clone (a: f32[], b: f32[]) -> f32[] {
  %a = f32[]{:T(128)} parameter(0)
  ROOT %sum = f32[]{:T(128)} add(%a, %a), metadata={op_name="~forward|0|0~/add"}
}

%once (p: f32[64]) -> f32[64] {
  %ar.1 = f32[64]{0} all-reduce(%p), channel_id=7, to_apply=%add.clone, metadata={op_name="~backward|0|1~/sum"}
}

%twice (p: f32[64]) -> f32[64] {
  %ar.2 = f32[64]{0} all-reduce(%p), channel_id=7, to_apply=%add.clone, metadata={op_name="~backward|0|1~/sum"}
}

ENTRY %main (p: f32[100,10]) -> f32[] {
  %p = f32[100,10]{1,0:T(8,128)} parameter(0)
  %both = (f32[8,2]{1,0}, (s64[4]{0}, pred[])) fusion(%p), kind=kLoop, \
metadata={op_name="~forward|0|0~/~forward|0.act|1~/mul"}, backend_config={"estimated_cycles":"1200"}
  %ag = f32[800,10]{1,0} all-gather-start(%p), channel_id=9, metadata={op_name="~forward||1~/gather"}
  %done = f32[800,10]{1,0} all-gather-done(%ag)
  %mine = f32[4]{0} all-reduce(%p), to_apply=%add.clone
  ROOT %result = f32[] custom-call(%both), custom_call_target="x", backend_config={"estimated_cycles":"34"}
}
"""


def test_the_operations_of_a_program():
    found = {operation.name: (operation, entry) for operation, entry in parse_operations(PROGRAM)}
    assert [name for name, (_, entry) in found.items() if entry] == ["p", "both", "ag", "done", "mine", "result"]
    both = found["both"][0]
    assert (both.kind, both.phase, both.layer, both.line) == ("fusion", "forward", "0.act", 1)  # the innermost scope
    assert [str(array) for array in both.arrays] == ["f32[8,2]", "s64[4]", "pred[]"]
    assert (both.cycles, both.nbytes, both.channel) == (1200, 64 + 32 + 1, None)
    assert found["ar.2"][0].channel == 7 and found["ag"][0].layer == ""
    result = found["result"][0]
    assert (result.kind, result.phase, result.line, result.cycles) == ("custom-call", "", None, 34)


def test_an_operation_without_an_estimate_adds_no_cycles():
    line = f'  %a = f32[8] fusion(%p), backend_config={{"estimated_cycles":"{2**63 - 1}"}}'
    assert [operation.cycles for operation, _ in parse_operations(line)] == [0]


def test_the_arguments_of_a_program():
    assert [str(array) for array in parse_arguments(PROGRAM)] == ["f32[100,10]", "s32[]", "bf16[3]", "f32[5000,2]"]
    assert parse_arguments("HloModule empty") == []


def argument(source="state", name="", nbytes=400, shape=(10, 10), axis=None):
    return {"source": source, "name": name, "nbytes": nbytes, "shape": [*shape], "donated": False, "axis": axis}


TRACED = {
    "role": "train",
    "cause": "it is the first step",
    "rows": 64,
    "steps": 1,
    "lines": ["train.py:3", "train.py:7"],
    "precision": "bf16",
    "remat": False,
    "arguments": [argument(name="0.weight"), argument(), argument("input"), argument("sum")],
}
STATS = {"argument": 1600, "output": 900, "alias": 800, "temp": 5000, "generated_code": 70}
FIGURES = {"memory": STATS, "flops": 2e6, "bytes": 1e4, "seconds": 1.5}


def test_a_program_is_analyzed():
    before = 'ENTRY %main {\n  %d = f32[8,8]{1,0} dot(%a, %b), metadata={op_name="~forward|0|1~/dot"}\n}\n'
    found = analyze(TRACED, FIGURES, before, PROGRAM, find_slice("v5e-8"))
    padded = [array.padded for array in parse_arguments(PROGRAM)]
    assert found.fits and found.memory.parts == {
        **dict(zip(("weights", "optimizer", "batch", "other"), padded, strict=True)),
        **{"outputs": 100, "temporaries": 5000, "code": 70},
    }
    assert found.memory.total == sum(padded) + 5170
    assert found.cost == Cost(2e6, 1e4, 1234) and found.layers == {("forward", "0.act"): 1200, ("", ""): 34}
    # An operation that occurs twice in the text counts once; without a channel, each occurrence counts.
    assert {(one.kind, one.where, one.count, one.nbytes) for one in found.collectives} == {
        ("all-gather", "train.py:7", 1, 32_000),
        ("all-reduce", "0 (backward) at train.py:7", 1, 256),
        ("all-reduce", "the step", 1, 16),
    }
    assert found.warnings.keys() == {"gathers", "float32"}
    assert found.warnings["gathers"].startswith("rows travel between cores, 1 time and 31.25 KiB per step, where sums")
    products = "1 matrix product in float32, with precision='bf16': 0 at train.py:7"
    assert found.warnings["float32"] == f"{products}. Call them inside autocast, or cast their inputs"


# A nested loop whose 64-bit counter is in two halves, and a loop that ends by a computed number.
LOOPED = """\
HloModule step, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

%inner (s: (u32[], f32[8], s32[])) -> (u32[], f32[8], s32[]) {
  %s = (u32[], f32[8]{0}, s32[]) parameter(0)
  %i = u32[] get-tuple-element(%s), index=0
  %one = u32[] constant(1)
  %x = f32[8]{0} get-tuple-element(%s), index=1
  %half = s32[] get-tuple-element(%s), index=2
  %next = u32[] add(%i, %one)
  %y = f32[8]{0} all-reduce(%x), channel_id=3, to_apply=%sum, backend_config={"estimated_cycles":"10"}
  ROOT %t = (u32[], f32[8]{0}, s32[]) tuple(%next, %y, %half)
}

%goes_on (s: (u32[], f32[8], s32[])) -> pred[] {
  %s.1 = (u32[], f32[8]{0}, s32[]) parameter(0)
  %i.1 = u32[] get-tuple-element(%s.1), index=0
  %half.1 = s32[] get-tuple-element(%s.1), index=2
  %four = u32[] constant(4)
  %zero = s32[] constant(0)
  %low = pred[] compare(%i.1, %four), direction=LT
  %none = pred[] compare(%half.1, %zero), direction=EQ
  %both = pred[] and(%low, %none)
  %less = pred[] compare(%half.1, %zero), direction=LT
  ROOT %or = pred[] or(%less, %both)
}

%outer (s: (s32[], f32[8], s32[])) -> (s32[], f32[8], s32[]) {
  %s.2 = (s32[], f32[8]{0}, s32[]) parameter(0)
  %j = s32[] get-tuple-element(%s.2), index=0
  %minus = s32[] constant(-2)
  %x.2 = f32[8]{0} get-tuple-element(%s.2), index=1
  %begin = s32[] get-tuple-element(%s.2), index=2
  %from = u32[] convert(%begin)
  %high = s32[] constant(0)
  %t.2 = (u32[], f32[8]{0}, s32[]) tuple(%from, %x.2, %high)
  %w = (u32[], f32[8]{0}, s32[]) while(%t.2), condition=%goes_on, body=%inner
  %y.2 = f32[8]{0} get-tuple-element(%w), index=1
  %z = f32[8]{0} fusion(%y.2), kind=kLoop, calls=%f, backend_config={"estimated_cycles":"1000"}
  %next.2 = s32[] add(%j, %minus)
  ROOT %t.3 = (s32[], f32[8]{0}, s32[]) tuple(%next.2, %z, %begin)
}

%positive (s: (s32[], f32[8], s32[])) -> pred[] {
  %s.3 = (s32[], f32[8]{0}, s32[]) parameter(0)
  %j.1 = s32[] get-tuple-element(%s.3), index=0
  %zero.1 = s32[] constant(0)
  ROOT %more = pred[] compare(%j.1, %zero.1), direction=GT
}

%body (s: (f32[8])) -> (f32[8]) {
  %s.4 = (f32[8]{0}) parameter(0)
  %x.4 = f32[8]{0} get-tuple-element(%s.4), index=0
  %z.4 = f32[8]{0} fusion(%x.4), kind=kLoop, calls=%f, backend_config={"estimated_cycles":"100000"}
  ROOT %t.4 = (f32[8]{0}) tuple(%z.4)
}

%large (s: (f32[8])) -> pred[] {
  %s.5 = (f32[8]{0}) parameter(0)
  %x.5 = f32[8]{0} get-tuple-element(%s.5), index=0
  %limit = f32[] constant(1)
  %total = f32[] fusion(%x.5), kind=kLoop, calls=%sums
  ROOT %larger = pred[] compare(%total, %limit), direction=GT
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %five = s32[] constant(5)
  %two = s32[] constant(2)
  %copied = s32[] copy(%five)
  %t.6 = (s32[], f32[8]{0}, s32[]) tuple(%copied, %p, %two)
  %w.6 = (s32[], f32[8]{0}, s32[]) while(%t.6), condition=%positive, body=%outer
  %y.6 = f32[8]{0} get-tuple-element(%w.6), index=1
  %t.7 = (f32[8]{0}) tuple(%y.6)
  %w.7 = (f32[8]{0}) while(%t.7), condition=%large, body=%body
  ROOT %out = f32[8]{0} get-tuple-element(%w.7), index=0
}
"""


def test_a_loops_body_counts_for_each_iteration():
    """The outer loop runs 5, 3 and 1 times, the inner loop 2 and 3; the last loop's count is unknown."""
    bodies = {"inner": 10.0, "outer": 1010.0, "body": 100_000.0}
    compiled = FIGURES | {"loops": {name: {"flops": n, "bytes": 2 * n} for name, n in bodies.items()}}
    compiled |= {"flops": 101_010.0, "bytes": 202_020.0}
    found = analyze(TRACED | {"arguments": [argument()]}, compiled, "", LOOPED, find_slice("v5e-8"))
    expected = 6 * 10 + 3 * 1000 + 100_000
    assert found.cost == Cost(expected, 2 * expected, expected, loops=1)
    assert [(one.kind, one.count, one.nbytes) for one in found.collectives] == [("all-reduce", 6, 6 * 32)]


def test_out_of_memory_is_a_report_and_other_compiler_errors_are_errors():
    words = (
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 24.50G of "
        "15.75G hbm. Exceeded hbm capacity by 8.75G.\n\n  Largest program allocations in hbm:\n\n"
        '  1. Size: 16.00G\n     Operator: op_name="~forward|0|1~/dot"\n     Shape: f32[65536,65536]{1,0:T(8,128)}\n'
    )
    found = analyze(TRACED, {"error": words, "seconds": 2.0}, "", "", find_slice("v5e-8"))
    assert not found.fits and found.memory.total == int(24.5 * 2**30) and found.memory.weights == 400
    said = found.warnings["memory"]
    assert said.startswith("it needs 24.5 GiB of a core's 15.75 GiB, 8.75 GiB too much. The largest: 1 x f32[65536,655")
    assert "of 0 (16 GiB)" in said and "smaller batch_size" in said
    words = (
        "RESOURCE_EXHAUSTED: Allocation (size=20971520000) would exceed memory (size=8589934592) :: #allocation67 "
        "[shape = 'f32[20000,262144]{1,0:T(8,128)}', space=hbm, size = 0xffffffffffffffff, tag = 'output of fusion@{}']"
    )
    found = analyze(TRACED, {"error": words, "seconds": 2.0}, "", "", find_slice("v2-8"))
    assert not found.fits and found.memory.total == 20_971_520_000
    assert "11.53 GiB too much. The largest: f32[20000,262144] alone" in found.warnings["memory"]
    with pytest.raises(ValueError, match="Mosaic"):
        analyze(TRACED, {"error": "INTERNAL: Mosaic failed", "seconds": 2.0}, "", "", find_slice("v5e-8"))


GIB = 1 << 30
FULL = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 24.50G of 15.75G hbm. Exceeded hbm capacity by"


@pytest.mark.parametrize(
    ("weights", "batch", "shape", "axis", "own", "advice"),
    [
        (GIB, 20 * GIB, (20, 1 << 28), 0, 3 * GIB, "smaller batch_size"),  # 20 rows on 8 cores: at most 3
        (GIB, 20 * GIB, (20, 1 << 28), None, 20 * GIB, "smaller batch_size"),  # whole on every core
        (GIB, 4, (), 0, 4, "smaller batch_size"),  # without dimensions, which is always whole
        (GIB, 0, (0, 6), 0, 0, "smaller batch_size"),
        (16 * GIB, 20 * GIB, (20, 1 << 28), 0, 3 * GIB, "state alone are too large, with any batch"),
        (16 * GIB, 20 * GIB, (20, 1 << 28), 0, 3 * GIB, "Try compile(shard='fsdp'), with 2 GiB instead of 16 GiB of"),
    ],
)
def test_too_large_a_program_reports_a_cores_batch(weights, batch, shape, axis, own, advice):
    arguments = [argument(name="0.weight", nbytes=weights), argument("input", "", batch, shape, axis)]
    found = analyze(TRACED | {"arguments": arguments}, {"error": FULL, "seconds": 2.0}, "", "", find_slice("v5e-8"))
    assert (found.memory.weights, found.memory.batch) == (weights, own)
    assert advice in found.warnings["memory"]


# The plan of a fit


class Samples(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, i):
        return torch.rand(6), i % 3  # random


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.rand(6), 1


def groups(x=X, y=Y, cores=8, validation=None, limit=None, compiling=None, **training):
    """Return the rows of the batches of each group, of each pass."""
    model = made(**compiling or {})
    arguments = {"batch_size": 4} | training
    held_out = dict(validation or {})
    if "data" in held_out:
        held_out["data"] = recognize_held_out(held_out["data"], "validation_data")
    plan = make_plan(
        engine_of(model), TrainingData(recognize(x, y), **arguments), ValidationData(**held_out), cores, limit
    )
    return [[[batch.rows for batch in group] for group in one.groups] for one in plan.passes]


BATCHES = [(torch.zeros(n, 6), torch.zeros(n, dtype=torch.int64)) for n in (16, 16, 16, 16, 9)]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, [[[32], [5]]]),  # 8 x 32 + 5
        ({"x": X[:256], "y": Y[:256]}, [[[32]]]),
        ({"x": X[:20], "y": Y[:20]}, [[[20]]]),  # all are in one batch
        ({"cores": 1}, [[[4], [1]]]),
        ({"batch_size": None, "cores": 1}, [[[32], [5]]]),
        ({"compiling": {"steps_per_execution": 3}}, [[[32] * 3, [32], [5]]]),  # 8 = 3 + 3 + 1 + 1
        ({"compiling": {"steps_per_execution": 4}}, [[[32] * 4, [5]]]),
        ({"compiling": {"steps_per_execution": 9}}, [[[32], [5]]]),  # more than there are
        ({"compiling": {"steps_per_execution": "auto"}}, [[[32], [5]]]),
        ({"steps_per_epoch": 9}, [[[32], [5]]]),
        ({"steps_per_epoch": 2}, [[[32], [5]]]),  # an epoch continues where the previous one ended
        ({"steps_per_epoch": 3, "compiling": {"steps_per_execution": 3}}, [[[32] * 3, [32], [5]]]),
        ({"last_batch": "pad", "compiling": {"steps_per_execution": 3, "module": nn.Linear(6, 3)}}, [[[32] * 3]]),
        ({"last_batch": "drop", "compiling": {"steps_per_execution": 4}}, [[[32] * 4]]),
        ({"limit": 2}, [[[32]]]),
        ({"limit": 0.5, "compiling": {"steps_per_execution": 2}}, [[[32] * 2]]),
        ({"limit": 9}, [[[32], [5]]]),
        ({"validation": {"split": 0.2}}, [[[32], [16]], [[32], [21]]]),  # 208 and 53 rows
        ({"validation": {"data": (X[:40], Y[:40]), "batch_size": 5}}, [[[32], [5]], [[40]]]),
        ({"validation": {"data": (X[:40], Y[:40]), "steps": 1}}, [[[32], [5]], [[32]]]),
        ({"validation": {"data": DataLoader(Samples(), 7)}}, [[[32], [5]], [[56], [44]]]),  # with its own batch size
        ({"x": Samples(), "y": None}, [[[32], [4]]]),
        ({"x": DataLoader(Samples(), 5), "y": None, "batch_size": None}, [[[40], [20]]]),
        ({"x": DataLoader(Samples(), 9, drop_last=True), "y": None, "batch_size": None}, [[[72], [27]]]),
        ({"x": DataLoader(Samples(), 5, num_workers=2), "y": None, "batch_size": None}, [[[40], [20]]]),
        ({"x": BATCHES, "y": None, "batch_size": None, "cores": 2}, [[[32], [9]]]),
        ({"x": BATCHES, "y": None, "batch_size": None}, [[[73]]]),  # fewer batches than cores
        ({"x": Endless(), "y": None, "batch_size": 3}, [[[24]]]),
        (
            {"x": Endless(), "y": None, "steps_per_epoch": 5, "compiling": {"steps_per_execution": 2}},
            [[[32] * 2, [32]]],
        ),
        ({"x": TensorDataset(torch.zeros(33, 6), torch.zeros(33).long()), "y": None}, [[[32], [1]]]),
    ],
)
def test_the_steps_of_a_fit(given, expected):
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert groups(**given) == expected
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    made()  # seeds PyTorch, as above
    assert torch.equal(after[0], torch.get_rng_state()) and after[1:] == before[1:]


def test_batches_have_only_the_range_of_their_labels():
    plan = make_plan(engine_of(made()), TrainingData(recognize({"a": X}, Y), batch_size=4), ValidationData(), 8)
    (batch,) = plan.passes[0].groups[0]
    x, y = batch.nest
    assert x["a"].is_meta and y.is_meta and (x["a"].shape, y.shape, y.dtype) == ((32, 6), (32,), torch.int64)
    assert batch.labels[:2] == (Y[:4].min(), Y[:4].max())


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ({"x": iter(BATCHES), "y": None, "batch_size": None}, ArgumentError, "x is an iterator, and a preflight would"),
        ({"validation": {"data": iter(BATCHES)}}, ArgumentError, "validation_data is an iterator"),
        ({"compiling": {"run_eagerly": True}}, ArgumentError, "run_eagerly=True. has no programs"),
        ({"limit": 0}, ArgumentError, "limit must be a whole number of batches of at least 1"),
        ({"y": Y + 7}, LabelError, "label 9 is outside the module's 3 classes"),
        ({"validation": {"data": (X, Y * 0 - 1)}}, LabelError, "label -1 is outside the module's 3 classes"),
        ({"y": Y[:5]}, tpufit.errors.DataError, "equally many rows"),
    ],
)
def test_arguments_are_checked_before_a_process_starts(given, error, says):
    with pytest.raises(error, match=says):
        groups(**given)


def test_an_iterator_keeps_its_batches():
    batches = iter(BATCHES)
    with pytest.raises(ArgumentError):
        groups(x=batches, y=None, batch_size=None)
    assert next(batches) is BATCHES[0]


def test_a_model_that_is_not_compiled():
    with pytest.raises(NotCompiledError, match="preflight needs a compiled model"):
        tpufit.Model(net()).preflight(X, Y)


def test_an_unknown_tpu_and_an_unknown_argument():
    with pytest.raises(UnknownNameError, match="v5e-7.*The number of a v5e counts its chips"):
        made().preflight(X, Y, tpu="v5e-7")
    with pytest.raises(ArgumentError, match="got none"):
        made().preflight(X, Y, tpu=[])
    with pytest.raises(ArgumentError, match="preflight takes the arguments of fit, tpu, remat and timeout, got epoch"):
        made().preflight(X, Y, epoch=3)
    with pytest.raises(ArgumentError, match="'auto' or 'global', got 'large'"):
        made().preflight(X, Y, batch_size="large")
    with pytest.raises(ArgumentError, match="'auto' needs arrays.*this list has batches already"):
        made().preflight(BATCHES, batch_size="auto")
    with pytest.raises(ArgumentError, match="remat must be 'auto' or None, got 'dots': compile takes the others"):
        made().preflight(X, Y, remat="dots")
    with pytest.raises(ArgumentError, match="needs a fixed batch_size, but got batch_size='auto' too"):
        made().preflight(X, Y, batch_size="auto", remat="auto")
    with pytest.raises(ArgumentError, match="remat='attention' looks for blocks"):
        made().preflight(X, Y, remat="auto")


# Pickling


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight
        self.head.weight.decay = False
        self.register_buffer("seen", torch.zeros(3))
        self.table = torch.arange(4.0)  # a constant

    def forward(self, x):
        return self.head(self.embed(x)).mean(1)


class Own(optim.SGD):
    def __init__(self, parameters, lr, note):
        super().__init__(parameters, lr=lr)
        self.note = note


class Rivals(tpufit.Model):
    """Two optimizers, a metric and an attribute of the user."""

    def __init__(self, module):
        super().__init__(module)
        self.second, self.seen = optim.AdamW(module[4].parameters(), 1e-3), torchmetrics.MeanMetric()
        self.shift = lambda x: x + 1

    def train_step(self, batch):
        x, y = batch
        for optimizer in (self.second, self.optimizer):
            optimizer.zero_grad()
            loss = F.cross_entropy(self.module(self.shift(x)), y)
            loss.backward()
            optimizer.step()
        self.seen.update(loss)
        return {"loss": loss}


def twin_of(model):
    state, _ = engine_of(model).state.tensors()
    return pickle.loads(pickle_training(model, model, state.keys()))


def test_ties_and_parameter_attributes_are_kept():
    model = made(module=Tied(), optimizer=lambda p: Own(p, 0.1, note=["mine"]), metrics=[])
    model.module.embed.weight.requires_grad_(False)
    twin = twin_of(model)
    weight = twin.module.embed.weight
    assert weight is twin.module.head.weight and type(weight) is nn.Parameter and weight.is_meta
    assert weight.shape == (50, 8) and not weight.requires_grad and weight.decay is False
    assert twin.module.seen.is_meta and torch.equal(twin.module.table, torch.arange(4.0))
    assert isinstance(twin.optimizer, Own) and twin.optimizer.note == ["mine"]
    assert twin.optimizer.param_groups[0]["params"][0] is weight and not model.module.embed.weight.is_meta


def test_groups_and_states_of_optimizers():
    def optimizer(parameters):
        first, *others = parameters
        return optim.AdamW([{"params": [first], "lr": 0.5, "weight_decay": 0.0}, {"params": others}], lr=0.1)

    model = made(optimizer=optimizer)
    for parameter in model.module.parameters():
        parameter.grad = torch.ones_like(parameter)
    model.optimizer.step()
    twin = twin_of(model).optimizer
    assert [(len(group["params"]), group["lr"]) for group in twin.param_groups] == [(1, 0.5), (5, 0.1)]
    assert twin.param_groups[0]["weight_decay"] == 0.0
    first = twin.param_groups[0]["params"][0]
    assert twin.state[first]["exp_avg"].is_meta and twin.state[first]["exp_avg"].shape == (16, 6)


def test_a_model_with_a_second_optimizer_metrics_and_lambdas():
    model = made(Rivals, loss=None, metrics=[])
    twin = twin_of(model)
    assert type(twin) is Rivals and twin.shift(1) == 2 and twin.history is None
    assert twin.second.param_groups[0]["params"][0] is twin.module[4].weight
    assert isinstance(twin.seen, torchmetrics.MeanMetric)


def test_classes_of_the_script_are_pickled_by_value():
    script = {"__name__": "__main__", "tpufit": tpufit}
    exec("class Mine(tpufit.Model):\n    def answer(self):\n        return 42", script)
    twin = twin_of(made(script["Mine"]))
    assert twin.answer() == 42


def test_an_object_that_cannot_be_pickled_is_named():
    model = made()
    model.module[2].guard = threading.Lock()
    with pytest.raises(
        PreflightError, match=r"sent to .*: module\.2\.guard is a lock, and cannot pickle .*Keep open files"
    ):
        twin_of(model)
    del model.module[2].guard
    model.log = open(sys.executable, "rb")  # noqa: SIM115
    with model.log, pytest.raises(PreflightError, match=r": log is a BufferedReader"):
        twin_of(model)
    model.log = None
    samples = Samples()
    samples.device_transform = partial(torch.add, threading.Lock())
    plan = make_plan(engine_of(model), TrainingData(recognize(samples)), ValidationData(), 8)
    with pytest.raises(PreflightError, match=r": passes\.0\.transform is a partial, and"):
        pickle_training(plan, model, {})


# The report


def report(tpu="v5e-8", fits=True, **memory):
    collectives = [Collective("all-reduce", "0 (backward)", 2, 8_000_000)] * fits
    layers = {("forward", "0"): 100_000, ("backward", "0"): 200_000, ("optimizer", ""): 50_000}
    sizes = Memory(**{"weights": 1 << 20, "batch": 1 << 21, "temporaries": 1 << 22} | memory)
    cost, warnings = (Cost(4e9, 1e8, 350_000), {}) if fits else (Cost(), {"memory": "it needs 24 GiB"})
    step = CompiledProgram(
        "train", "it is the first step", 512, 1, 2.0, fits, sizes, cost, layers, collectives, warnings, "HLO"
    )
    last = CompiledProgram("train", "x had another shape", 5, 1, 1.0, True, Memory(weights=7))
    return PreflightReport(find_slice(tpu), [step, last], 64, "bf16")


def test_the_text_of_a_report():
    found = report()
    assert found.fits and found.status == 0 and found.warnings == []
    # 2 x 7/8 of the bytes over the links, and the cycles at 1.5 GHz
    assert found.seconds == pytest.approx(350_000 / 1.5e9 + 2 * 8e6 * 7 / 8 / 200e9)
    assert found.rows_per_second == pytest.approx(512 / found.seconds)
    assert found.share_of_peak == pytest.approx(4e9 / found.seconds / 197e12)
    assert found.bound == "memory"
    text = str(found)
    assert "v5e-8: 8 cores, 512 rows per step, bf16" in text and "fits: 7 MiB of 16 GiB per core (0%)" in text
    assert re.search(r"^ 0 +67 us +133 us +86%$", text, re.MULTILINE)
    assert re.search(r"^ optimizer +33 us +14%$", text, re.MULTILINE)
    assert re.search(r"^ train +512 +2\.0 s +7 MiB +350,000 +2 all-reduce +it is the first step$", text, re.MULTILINE)


def test_figures_of_joined_steps_are_per_step():
    one, found = report(), report()
    step, last = found.programs
    cost = Cost(3 * step.cost.flops, 3 * step.cost.nbytes, 3 * step.cost.cycles)
    collectives = [replace(own, count=3 * own.count, nbytes=3 * own.nbytes) for own in step.collectives]
    layers = {place: 3 * cycles for place, cycles in step.layers.items()}
    three = replace(step, rows=3 * step.rows, steps=3, cost=cost, collectives=collectives, layers=layers)
    joined = replace(found, programs=[three, last], steps_per_execution=3)
    assert joined.seconds == pytest.approx(one.seconds) and joined.bounds == pytest.approx(one.bounds)
    assert joined.rows_per_second == pytest.approx(one.rows_per_second)
    assert joined.share_of_peak == pytest.approx(one.share_of_peak)
    texts = [str(each).partition("program")[0] for each in (one, joined)]
    assert texts[0] == texts[1] and "optimizer" in texts[0]
    assert "is compiled as 1" not in str(joined)


def test_steps_that_fit_may_join_are_compiled_one_by_one():
    found = replace(report(), steps_per_execution="auto")
    assert "steps_per_execution='auto' is compiled as 1: fit measures steps before it joins them" in str(found)
    assert found.as_dict()["steps_per_execution"] == "auto"


def test_a_report_of_too_large_a_program():
    found = report(fits=False, needed=24 << 30)
    assert not found.fits and found.status == 1 and found.rows_per_second == found.share_of_peak == 0
    assert found.warnings == ["train of 512 rows: it needs 24 GiB"]
    text = str(found)
    assert "does NOT fit: 24 GiB of 16 GiB per core (150%)" in text and "estimated" not in text
    assert "warning: train of 512 rows: it needs 24 GiB" in text


def test_a_report_is_saved_as_json_and_as_programs(tmp_path):
    found = report()
    found.save(tmp_path / "new" / "folder")
    kept = json.loads((tmp_path / "new" / "folder" / "report.json").read_text())
    assert kept == json.loads(json.dumps(found.as_dict()))
    assert kept["fits"] and kept["tpu"]["name"] == "v5e-8" and kept["estimates"]["seconds"] == found.seconds
    assert kept["programs"][0]["layers"][0] == ["forward", "0", 100_000] and "text" not in kept["programs"][0]
    assert (tmp_path / "new" / "folder" / "0-train.txt").read_text() == "HLO"


def test_a_picture_of_a_report(monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "agg")
    figure = report().plot()
    memory, layers = figure.axes
    assert [label.get_text() for label in memory.get_yticklabels()] == ["weights", "batch", "temporaries"]
    assert [label.get_text() for label in layers.get_yticklabels()] == ["0", "optimizer"]
    assert [bar.get_width() for bar in layers.patches[:2]] == pytest.approx([100 / 1500, 0])  # ms forward
    report(fits=False, needed=24 << 30).plot()


def test_a_comparison_names_the_cheapest_that_fits(tmp_path):
    several = Comparison([report("v5e-8", fits=False, needed=24 << 30), report("v3-8"), report("v6e-8")])
    assert several.fits and several.status == 0 and several.cheapest.tpu.name == "v3-8"
    lines = str(several).splitlines()
    assert [line.split()[0] for line in lines if "GiB" in line] == ["v5e-8", "v3-8", "v6e-8"]
    assert "no" in lines[1] and "?" in lines[1]
    assert [line for line in lines if "<- cheapest that fits" in line] == [line for line in lines if "v3-8" in line]
    several.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v3-8", "v5e-8", "v6e-8"]
    none = Comparison([report(fits=False)])
    assert none.cheapest is None and none.status == 1
    without_price = Comparison([report("v7x-8"), report("v3-8"), report("v6e-8")])
    assert without_price.cheapest.tpu.name == "v3-8" and str(without_price).splitlines()[1].count(" ? ") == 1
    assert Comparison([report("v7x-8")]).cheapest is None


def test_a_chip_newer_than_the_compiler_is_refused():
    model = tpufit.Model(nn.Linear(4, 2))
    model.compile("sgd", "mse")
    with pytest.raises(PreflightError, match=r"has no v7x, which is newer\. Run .* where TorchTPU is installed"):
        model.preflight(np.zeros((8, 4), "float32"), np.zeros((8, 2), "float32"), tpu=["v5e-8", "v7x-8"], verbose=0)


# The programs


class Lazy(optim.Optimizer):
    """Creates its state in its first step."""

    def __init__(self, parameters, lr=0.01):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["mean"] = torch.zeros_like(parameter)
                state["mean"].mul_(0.9).add_(parameter.grad)
                parameter.sub_(group["lr"] * state["mean"])


OVERWRITING = {"use_ema": True, "ema_overwrite_frequency": 4}
FITS = {
    "plain": {},
    "validation": {"validation_split": 0.2},
    "accumulated by 2": {"accumulate_steps": 2, "validation_split": 0.2},
    "accumulated by 4": {"accumulate_steps": 4},
    "three at a time": {"steps_per_execution": 3, "validation_split": 0.5},
    "three at a time, accumulated": {"steps_per_execution": 3, "accumulate_steps": 2},
    "two at a time, accumulated": {"steps_per_execution": 2, "accumulate_steps": 2},
    "state of the first step": {"optimizer": Lazy},
    "state of the first step, accumulated": {"optimizer": Lazy, "accumulate_steps": 2},
    "dampened": {"optimizer": partial(optim.SGD, lr=0.1, momentum=0.9, dampening=0.5)},
    "two optimizers": {"kind": Rivals, "loss": None, "metrics": []},
    "class weights": {"class_weight": {0: 2.0, 1: 0.5}},
    "averages": {"use_ema": True, "ema_momentum": 0.9},
    "averages that overwrite": OVERWRITING,
    "averages that overwrite, accumulated": OVERWRITING | {"accumulate_steps": 2},
    "clipped": {"clip_norm": 1.0},
    "bfloat16": {"precision": "bf16"},
    "limited": {"limit": 2, "accumulate_steps": 2},
    "an epoch in parts": {"steps_per_epoch": 3},
}
TELLING = (*("accumulated by 2", "state of the first step", "two optimizers", "averages that overwrite"),)
_OF_FIT = ("validation_split", "class_weight", "limit", "steps_per_epoch")


def traced(model, limit=None, validation_split=0.0, **training):
    """Return the programs of a preflight, traced in this process."""
    from tpufit.preflight.tracing import Tracer

    data = TrainingData(recognize(X, Y), batch_size=4, **training)
    plan = make_plan(engine_of(model), data, ValidationData(validation_split), 8, limit)
    state, _ = engine_of(model).state.tensors()
    tracer = Tracer(pickle.loads(pickle_training(plan, model, state.keys())))
    tracer.trace()
    return tracer.recorder.programs, list(tracer.describe_programs().values())


@pytest.mark.cores(8)
@pytest.mark.parametrize(
    "name", [name if name in TELLING else pytest.param(name, marks=pytest.mark.soak) for name in FITS]
)
@pytest.mark.usefixtures("compiles_anew")
def test_a_preflights_programs_equal_those_of_fit(cores, name):
    """Of 9 steps in an epoch, over four epochs, with all kinds of steps."""
    fitting = {key: value for key, value in FITS[name].items() if key in _OF_FIT}
    compiling = {key: value for key, value in FITS[name].items() if key not in _OF_FIT}
    model = made(**compiling)
    programs, described = traced(model, **fitting)
    before = tpufit.runtime.counts()
    model.fit(X, Y, 4, 4, verbose=0, cores=cores, **fitting)
    compiled = [one for one in (tpufit.runtime.counts() - before).compiled if one.role in ("train", "eval")]
    assert sorted((one.role, one.cause) for one in programs) == sorted((one.role, one.cause) for one in compiled)
    assert described[0]["rows"] in (32, 32 * 2, 32 * 3)
    weights = {argument["name"] for argument in described[0]["arguments"]} - {""}
    assert weights == set(model.module.state_dict())
    for one in programs:
        split = {(argument.source, argument.axis) for argument in one.arguments if argument.axis is not None}
        assert split in (
            {("input", 0)},
            {("input", 1)},
        )  # joined batches are stacked
        assert any(argument.axis is None for argument in one.arguments)


@pytest.mark.cores(1, 8)
@pytest.mark.soak_on(8)
def test_a_preflight_doesnt_change_the_model(cores):
    """Before, between and after fits, also while its weights are on the device, the model doesn't change."""
    flown, plain = (made(use_ema=True, optimizer=Lazy) for _ in range(2))

    def looked_at(model):
        plan = make_plan(engine_of(model), TrainingData(recognize(X, Y), batch_size=4), ValidationData(0.2), 8)
        state, _ = engine_of(model).state.tensors()
        twin = pickle.loads(pickle_training(plan, model, state.keys())).model
        assert all(tensor.is_meta for tensor in twin.module.parameters())

    for _ in range(2):
        generators = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
        looked_at(flown)
        assert torch.equal(torch.get_rng_state(), generators[0])
        assert (np.random.get_state()[1].tolist(), random.getstate()) == generators[1:]
        counts = []
        for model in (flown, plain):
            tpufit.set_random_seed(3)
            before = tpufit.runtime.counts()
            model.fit(X, Y, 32 // cores, 1, validation_split=0.2, verbose=0, cores=cores)
            counts.append(tpufit.runtime.counts() - before)
        assert counts[0].captures == counts[1].captures
    looked_at(flown)
    if cores == 8:  # and a real preflight, while its weights are on the device
        found = flown.preflight(X[:80], Y[:80], 4, validation_split=0.2, class_weight={0: 2.0}, verbose=0)
        assert [(program.role, program.rows) for program in found.programs] == [("train", 32), ("eval", 16)]
        assert found.fits and all(program.cost.cycles and program.text for program in found.programs)
        for model in (flown, plain):
            model.fit(X, Y, 32 // cores, 1, verbose=0, cores=cores)
    assert flown.history.history == plain.history.history and flown.steps_taken == plain.steps_taken
    for name, value in plain.state_dict().items():
        assert torch.equal(flown.state_dict()[name], value), name
    for one, other in zip(flown.optimizer.state.values(), plain.optimizer.state.values(), strict=True):
        assert torch.equal(one["mean"].cpu(), other["mean"].cpu())


# The command line


def command(run_python, *words, timeout=300, forks=True):
    code = f"from tpufit.__main__ import main; sys.exit(main({['preflight', *map(str, words)]}))"
    if not forks:  # which don't report the parts of a step: torch_xla was imported without the option
        code = f"import os; sys.executable = os.path.join(sys.prefix, 'bin', 'python'); {code}"
    code = f"import sys; {code}"
    return run_python(code, timeout=timeout, env={"MPLBACKEND": "agg"})


@pytest.mark.soak
def test_an_unchanged_example(run_python, tmp_path):
    script = Path(__file__).parents[1] / "examples" / "digits.py"
    words = "--tpu", "v5e-8", "--save", tmp_path / "saved", script, "--run-dir", tmp_path / "runs"
    ended = command(run_python, *words, forks=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (
        "v5e-8: 8 cores, 64 rows per step, fp32\nfits: " in ended.stdout and "held-out digits: loss nan" in ended.stdout
    ), ended.stdout
    kept = json.loads((tmp_path / "saved" / "report.json").read_text())
    assert kept["fits"] and [one["role"] for one in kept["programs"]] == ["train", "train", "eval", "eval"]
    program = (tmp_path / "saved" / "0-train.txt").read_text()
    assert program.startswith("HloModule") and all(f"~{phase}|" in program for phase in ("backward", "optimizer"))


LARGE = """
import sys
import torch
import tpufit
from torch import nn

class Wide(tpufit.Model):  # of this script, with a lambda
    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(8, 1 << 18), nn.Tanh(), nn.Linear(1 << 18, 3)))
        self.scaled = lambda x: x * 2

    def __call__(self, x):
        return super().__call__(self.scaled(x))

model = Wide()
model.compile("sgd", "mse")
if sys.argv[1:] == ["fit"]:
    history = model.fit(torch.zeros(200_000, 8), torch.zeros(200_000, 3), batch_size=6_000, epochs=3)
    assert len(history.history["val_anything"]) == 3
    print(1 / 0)
"""


@pytest.mark.slow
def test_a_training_that_is_too_large(run_python, tmp_path):
    (tmp_path / "large.py").write_text(LARGE)
    ended = command(run_python, "--tpu", "v2-8", "large.py", "fit")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert re.search(r"v2-8: 8 cores, 48000 rows per step, fp32\ndoes NOT fit: [\d.]+ GiB of 8 GiB", ended.stdout)
    assert re.search(r"warning: train of 48000 rows: it needs .* too much\. The largest: ", ended.stdout)
    assert "large.py:20 ended the script with ZeroDivisionError: division by zero. Nothing was trained" in ended.stdout


def test_a_script_without_a_fit(run_python, tmp_path):
    (tmp_path / "large.py").write_text(LARGE)
    ended = command(run_python, "large.py")
    assert ended.returncode == 2 and ended.stderr == (
        "error: large.py hasn't called fit, so there was nothing to compile\n"
    )
    (tmp_path / "wrong.py").write_text("import tpufit\nprint(1 / 0)\n")
    ended = command(run_python, "wrong.py")
    assert ended.returncode == 2 and "ZeroDivisionError: division by zero" in ended.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [(["none.py"], "no script none.py"), (["--batch-size", "x"], "must be a whole number or auto, got 'x'")],
)
def test_a_wrong_command_line(words, says, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["preflight", *words])
    assert ended.value.code == 2 and says in capsys.readouterr().err


def wide():
    model = tpufit.Model(nn.Sequential(nn.Linear(8, 1 << 18), nn.Tanh(), nn.Linear(1 << 18, 3)))
    model.compile("sgd", "mse")
    return model, torch.zeros(200_000, 8), torch.zeros(200_000, 3)


@pytest.mark.soak
def test_the_largest_batch_that_fits():
    """Within 5 %: a batch larger by this doesn't fit."""
    model, x, y = wide()
    found = model.preflight(x, y, "auto", tpu="v5e-8", verbose=0)
    assert found.fits and found.step.rows == 8 * found.batch_size
    assert not model.preflight(x, y, int(found.batch_size * 1.05) + 1, tpu="v5e-8", verbose=0).fits


@pytest.mark.soak
def test_the_largest_batch_with_all_rows():
    model, x, y = wide()
    few = model.preflight(x[:100], y[:100], "auto", tpu="v2-8", verbose=0)
    assert few.fits and few.step.rows == 100 and few.batch_size == 13  # on each core


@pytest.mark.soak
def test_the_cheapest_policy_that_fits():
    """Few rows need no policy; the scores of many don't fit."""
    with torch.device("meta"):
        blocks = nn.Sequential(*(Attending() for _ in range(4)))
        model = tpufit.Model(nn.Sequential(nn.Linear(8, 64), blocks, nn.Linear(64, 8)))
    model.compile("sgd", "mse", attention="plain")
    few, many = (
        model.preflight(x, x, len(x), remat="auto", tpu="v5e-1", verbose=0)
        for x in (torch.zeros(1, 4096, 8), torch.zeros(16, 4096, 8))
    )
    assert few.fits and few.remat is None
    assert many.fits and many.remat == "attention"
    assert "1 core, 16 rows per step, fp32, remat='attention'" in str(many)


class Attending(nn.Module):
    """Attention with four heads, and a residual connection."""

    def __init__(self):
        super().__init__()
        self.project, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x):
        q, k, v = self.project(x).unflatten(2, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        return x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Noted(nn.Linear):
    """Records the process that it runs in."""

    def forward(self, x):
        Path(os.environ["NOTED"], str(os.getpid())).touch()
        return super().forward(x)


@pytest.mark.soak
def test_comparing_tpus_traces_equal_steps_once(monkeypatch, tmp_path):
    monkeypatch.setenv("NOTED", str(tmp_path))
    model = made(module=nn.Sequential(Noted(6, 3)))
    found = model.preflight(X[:256], Y[:256], 4, tpu=["v2-8", "v3-8", "v5e-1", "v6e-8"], verbose=0)
    assert isinstance(found, Comparison) and found.fits
    assert [one.tpu.name for one in found.reports] == ["v2-8", "v3-8", "v5e-1", "v6e-8"]
    assert [one.step.rows for one in found.reports] == [32, 32, 4, 32]
    _, first, _, last = (one.step for one in found.reports)
    assert first.cost.cycles != last.cost.cycles and first.text != last.text  # each compiled for its own TPU
    assert {path.name for path in tmp_path.iterdir()} > {str(os.getpid())}  # this test only tries shapes
    # For one core, and for 8: of a v6e, which keeps attention in bfloat16, and of the others.
    assert len(list(tmp_path.iterdir())) == 1 + 3


@pytest.mark.soak
def test_more_hosts_send_the_same_bytes_per_core():
    """The same step is compiled for 1, 4 and 16 hosts, with as many collectives of as many bytes."""
    model = made()
    sent = {}
    for tpu in ("v5e-8", "v5e-16", "v5e-64"):
        found = model.preflight(X[:256], Y[:256], 4, tpu=tpu, verbose=0)
        assert found.fits and found.step.rows == 4 * int(tpu[4:])
        assert not any(one.gathers for one in found.step.collectives)
        sent[tpu] = sum(one.nbytes for one in found.step.collectives)
    assert sent["v5e-64"] <= sent["v5e-16"] <= sent["v5e-8"] and sent["v5e-64"] > 0


WRITING = """
import io, os, shutil, sqlite3, subprocess, sys
from pathlib import Path
import numpy as np
import safetensors.torch
import torch

here, out = Path(os.environ["HERE"]), Path(os.environ["OUT"])
assert Path("data/rows.csv").read_text() == (Path(__file__).parent / "data" / "rows.csv").read_text() == "1"
shutil.rmtree("runs")
os.makedirs("runs/a/b")
for folder in (Path(), Path(__file__).parent, here, out):
    (folder / "new" / "deep").mkdir(parents=True, exist_ok=True)
    (folder / "log.txt").write_text("gone")
    with open(folder / "log.txt", "a") as file:
        file.write(" and more")
    assert (folder / "log.txt").read_text() == "gone and more" and "log.txt" in os.listdir(folder)
    torch.save({"a": 1}, folder / "weights.pt")
    assert torch.load(folder / "weights.pt") == {"a": 1}
    torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), folder / "scripted.pt")
    safetensors.torch.save_file({"a": torch.ones(2)}, folder / "weights.safetensors")
    np.savetxt(folder / "rows.csv", np.ones(3))
    np.save(folder / "rows.npy", np.ones(3))
    base = sqlite3.connect(folder / "rows.db")
    base.execute("create table if not exists t (a)")
    base.close()
    os.replace(folder / "log.txt", folder / "moved.txt")
    shutil.copy(folder / "moved.txt", folder / "copied.txt")
    (folder / "keep.txt").unlink(missing_ok=True)
Path("large.bin").write_bytes(b"small")
subprocess.run([sys.executable, "-c", "open('sub.txt', 'w').write('x')"], check=True)
shutil.rmtree(out)
try:
    io.FileIO(out / "refused.txt", "w")
except PermissionError as error:
    print(error)
print("written")
"""


def test_a_script_writes_nowhere(run_python, tmp_path):
    here, out = tmp_path / "here", tmp_path / "out"
    for folder in (here / "data", here / "runs" / "old", out):
        folder.mkdir(parents=True)
    for folder in (here, out):
        for name in ("log.txt", "weights.pt", "weights.safetensors", "rows.csv", "keep.txt"):
            (folder / name).write_text(name)
    (here / "data" / "rows.csv").write_text("1")
    with (here / "large.bin").open("wb") as file:
        file.truncate((1 << 26) + 1)
    (here / "train.py").write_text(WRITING)

    def contents():
        files = {path: path.is_file() and path.stat().st_size for path in tmp_path.rglob("*")}
        return files | {path: path.read_text() for path in files if path.suffix in (".txt", ".pt", ".csv")}

    before = contents()
    code = (
        "import os, runpy, pathlib; from tpufit.preflight.copied_folder import copied_folder\n"
        f"os.chdir({str(here)!r})\n"
        "with copied_folder(pathlib.Path('train.py')) as copy: runpy.run_path(str(copy))\n"
        f"assert os.getcwd() == {str(here)!r} and not copy.exists()\n"
    )
    ended = run_python(code, env={"HERE": str(here), "OUT": str(out)})
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (
        "outside its copied folder, but the script opens" in ended.stdout
        and "use a relative path" in ended.stdout
        and "written" in ended.stdout
    )
    assert contents() == before
