"""Reports about slow training: each sentence from numbers, and each fault provoked in a training."""

import random
import re
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn

import tpufit
from tpufit import runtime
from tpufit.callbacks import Callback, Diagnostics
from tpufit.diagnostics import messages as advice
from tpufit.diagnostics.report import Pass, Report
from tpufit.runtime.driver import driver
from tpufit.utils.counters import Compiled, Counts, add_seconds, time_function, timed

GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(69, 12)).astype("float32")
Y = GENERATOR.integers(0, 4, 69)


def report(*passes, **facts):
    counts = {name: facts.pop(name) for name in list(facts) if name in Counts.__dataclass_fields__}
    return Report(passes or (Pass("train", 100, 3200, 10.0, 0.0),), Counts(**counts), **({"traced": {}} | facts))


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        (
            {"traced": {"train": "it reads a value from the device at a.py:3"}},
            "the train step is traced .* a.py:3. Return",
        ),
        ({"traced": {"eval": "its Python changes Net.calls (from 1 to 2)"}}, "eval step .*. Keep counters in a buffer"),
        ({"traced": {"train": "of jit_compile=False"}}, "Leave jit_compile at 'auto'"),
        (
            {"fallbacks": Counter({"aten::nonzero": 9}), "lines": Counter({("aten::nonzero", "a.py:3"): 1})},
            r"aten::nonzero ran on the host 9 times, called at a\.py:3.*torch\.where\(mask, x, 0\)",
        ),
        (
            {"host_reads": 64, "lines": Counter({("read", "a.py:3"): 1})},
            r"64 values were read from the device, at a\.py:3",
        ),
        ({"host_reads": 90}, "90 values were read from the device outside the steps, in 100 steps"),
        (
            {"compiled": tuple(Compiled("train", f"x had the shape ({i},), and now (3,)", 1.0) for i in range(9))},
            r"the train step was compiled 9 times, the last time because x had the shape \(8,\).*PadToBuckets",
        ),
        (
            {"compiled": tuple(Compiled("train", "betas in ... changed", 1.0) for i in range(9))},
            "compiled 9 times, the last time because betas in ... changed: change parts of the graph rarely",
        ),
        ({"waits": Counter({"batch logs": 50})}, "callbacks read the logs of 50 of 100 batches"),
        ({"waits": Counter({"changed weights": 100})}, "a callback changed the weights before 100 of 100 steps"),
        ({"seconds": {"callbacks": 5.0}}, "callbacks took 50% of the time"),
        ({"cores": 1, "available": 8}, "1 of this TPU's 8 cores is used"),
    ],
)
def test_each_problem_is_one_sentence_with_its_cure(facts, says):
    found = report(**facts).problems
    assert len(found) == 1
    assert re.search(says, found[0])
    assert "- " + found[0][:40] in str(report(**facts))


def test_passes_that_wait_compile_or_validate_too_long():
    (waits,) = report(Pass("train", 10, 100, 10.0, 9.0)).problems
    assert "waited for data 90% of the epoch" in waits
    (compiles,) = report(Pass("train", 10, 100, 200.0, 0.0), seconds={"compile": 150.0}).problems
    assert "compiling 0 graphs took 150 s of 200 s" in compiles
    train, validation = Pass("train", 10, 100, 4.0, 0.0), Pass("eval", 9, 90, 6.0, 0.0)
    assert report(train, validation, train).problems == []  # the first pass compiles
    (validates,) = report(train, validation, train, validation).problems
    assert "validating took 60% of the time: validate less often (validation_freq=5)" in validates


def test_times_between_passes_are_at_most_the_total():
    (said,) = report(seconds={"callbacks": 30.0, "steps": 10.0, "prepare": 90.0}).problems
    assert "callbacks took 75% of the time" in said


def test_usual_values_give_no_message():
    usual = report(
        waits=Counter({"logs": 3, "batch logs": 7, "throttle": 40}),
        compiled=[Compiled("train", "x had the shape (8,), and now (3,)", 5.0)] * 2,
        seconds={"compile": 10.0, "callbacks": 0.5, "steps": 9.0},
        fallbacks=Counter({"aten::bincount": 1}),  # not in a step: once in an epoch, in a metric
        host_reads=3,
        traced={"train": "", "eval": ""},
    )
    assert usual.problems == [] and "What is wrong" not in str(usual)


def test_a_hint_about_short_steps():
    (hinted,) = report(seconds={"steps": 8.0}).hints
    assert "starting the steps took 80% of the time" in hinted and "steps_per_execution" in hinted
    assert report(seconds={"steps": 4.0}).hints == []
    assert "steps_per_execution" not in advice.report_starting(8.0, 10.0, joined=True)


def test_nested_times_are_not_counted_twice(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("tpufit.utils.counters.perf_counter", lambda: now[0])

    def take(seconds):
        now[0] += seconds

    inner, before = time_function("test inner", take), runtime.counts()
    with timed("test outer"):
        take(1.0)
        inner(2.0)
        add_seconds("test known", 100.0, parallel=True)
    seconds = (runtime.counts() - before).seconds
    assert (seconds["test outer"], seconds["test inner"], seconds["test known"]) == (1.0, 2.0, 100.0)


class Clock:
    """Time that hardly passes, except when a test adds to it."""

    now = 0.0

    def __call__(self):
        self.now += 1e-6
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    for name, module in list(sys.modules.items()):
        if name.startswith("tpufit.") and hasattr(module, "perf_counter"):
            monkeypatch.setattr(module, "perf_counter", made)
    return made


class Net(nn.Module):
    double = False

    def __init__(self, extra=None):
        super().__init__()
        self.body, self.head, self.extra = nn.Linear(12, 16), nn.Linear(16, 4), extra

    def forward(self, x):
        h = self.body(x).relu()
        return self.head(h if self.extra is None else self.extra(self, h))


def trained(cores, extra=None, x=X, y=Y, **arguments):
    model = tpufit.Model(Net(extra))
    compiling = {name: arguments.pop(name) for name in ("jit_compile", "steps_per_execution") if name in arguments}
    model.compile("adamw", "cross_entropy", metrics=["accuracy"], **compiling)
    model.fit(
        x,
        y,
        **({"batch_size": 32, "epochs": 3, "verbose": 0, "cores": cores, "callbacks": [Diagnostics()]} | arguments),
    )
    return model


def causes(model):
    return [(one.role, one.cause) for one in model.report().counts.compiled if one.role in ("train", "eval")]


@pytest.mark.cores(1)
@pytest.mark.usefixtures("compiles_anew")
def test_a_good_training_has_no_messages_and_all_numbers(cores, capsys, clock):
    model = trained(cores, validation_data=(X, Y))
    assert capsys.readouterr().out == ""
    seen = model.report(verbose=True)
    short = "x had the shape (32, 12), and now (5, 12)"
    first = "it is the first step"
    assert causes(model) == [("train", first), ("train", short), ("eval", first), ("eval", short)]
    assert (seen.steps, seen.problems, seen.traced) == (9, [], {"train": "", "eval": ""})
    assert [(one.role, one.steps, one.rows) for one in seen.passes] == [("train", 3, 69), ("eval", 3, 69)] * 3
    assert {"compile", "trace", "steps", "callbacks", "data", "prepare", "wait: logs"} <= set(seen.counts.seconds)
    assert sum(t for phase, t in seen.counts.seconds.items() if phase not in ("read", "prepare")) <= seen.seconds + 0.1
    if driver().name == "torch_xla":  # torch_tpu has no such table
        assert "Metric: CompileTime" in seen.metrics_report and "Metric: CompileTime" in str(seen)
    for part in ("steps of training  9", "start of graphs", "waiting for the device: logs", "it is the first step"):
        assert part in str(seen)


@pytest.mark.cores(1)
def test_measuring_adds_no_waits_or_graphs(cores, clock):
    class Reader(Callback):
        reads_weights = False

        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                float(logs["loss"])

    def waits(callbacks):
        model = trained(cores, callbacks=[Reader(), *callbacks], epochs=2)
        counts = model.report().counts
        return {reason: n for reason, n in counts.waits.items() if n}, [
            one.role for one in counts.compiled if one.cause
        ]

    waits([])  # compiles the graphs that all models of this test share
    assert waits([]) == waits([Diagnostics()])


@pytest.mark.cores(1)
@pytest.mark.usefixtures("compiles_anew")
def test_why_another_graph_was_compiled(cores):
    class Change(Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                self.model.optimizer.param_groups[0]["betas"] = (0.5, 0.999)
            if epoch == 2:
                self.model.module.double = True

    def doubled(net, h):
        return h * h if net.double else h

    model = trained(cores, doubled, callbacks=Change(), batch_size=69)
    assert [cause for _, cause in causes(model)] == [
        "it is the first step",
        "betas in the optimizer's param_groups changed (from (0.9, 0.999) to (0.5, 0.999))",
        "Net.double changed (from False to True)",
    ]
    model.fit(X, Y.astype("int32"), batch_size=69, verbose=0)
    assert causes(model) == [("train", "y had the dtype torch.int64, and now torch.int32")]
    # Another layer, because equal graphs might come from another test.
    joined = trained(cores, lambda net, h: h.sin(), batch_size=8, epochs=1, steps_per_execution=4)
    assert [cause for _, cause in causes(joined)] == [
        "it is the first step",
        "x had the shape (8, 12), and now (5, 12)",
    ]
    joined.steps_per_execution = 1
    joined.fit(X[:64], Y[:64], batch_size=8, verbose=0)
    assert causes(joined) == [("train", "1 step runs as one graph")]


@pytest.mark.cores(1)
@pytest.mark.runtime("torch_xla")  # on TorchTPU such steps run operation by operation
@pytest.mark.filterwarnings("ignore:the train step is traced again")
def test_reads_fallbacks_and_random_branches_name_their_lines(cores, capsys, clock):
    def reads(net, h):
        return h * (h.mean().item() > 0)

    def falls(net, h):
        return h * torch.unique(h.detach()).numel()

    def branches(net, h):
        return h * 2 if random.random() < 0.5 else h

    def line(function):
        return f"test_diagnosis.py:{function.__code__.co_firstlineno + 1}"

    said = []
    for extra in (reads, falls, branches):
        model = trained(cores, extra)
        said.append(model.report().problems)
        printed = capsys.readouterr().out.splitlines()
        assert printed == ["What made this slow:", *(f"- {sentence}" for sentence in said[-1])]
        assert "traced: " in str(model.report())
    assert len(said[0]) == 1 and f"because it reads a value from the device at {line(reads)}" in said[0][0]
    assert any(f"aten::_unique2 ran on the host 9 times, called at {line(falls)}" in sentence for sentence in said[1])
    assert len(said[2]) == 1 and f"draws random numbers at {line(branches)}" in said[2][0]


@pytest.mark.cores(1)
@pytest.mark.filterwarnings("ignore:the train step has met batches of 8 shapes")
@pytest.mark.usefixtures("compiles_anew")
def test_changing_shapes_logs_and_callbacks_are_reported(cores, capsys):
    class Busy(Callback):
        def on_train_batch_end(self, batch, logs=None):
            float(logs["loss"])

    def own(net, h):  # otherwise its graphs might come from another test
        return h.tanh().sin()

    batches = [(X[: n + 1], Y[: n + 1]) for n in range(9)]
    trained(cores, own, x=batches, y=None, batch_size=None, epochs=1, callbacks=[Busy(), Diagnostics()])
    said = capsys.readouterr().out
    assert "the train step was compiled 9 times, the last time because x had the shape (8, 12), and now (9, 12)" in said
    assert "callbacks read the logs of 9 of 9 batches" in said


@pytest.mark.cores(1)
@pytest.mark.runtime("torch_xla")  # torch_tpu doesn't count reads
def test_reads_of_a_callback_are_reported(cores):
    class Item(Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.module.head.bias.sum().item()

    model = trained(cores, callbacks=Item(), batch_size=8)
    (said,) = model.report().problems
    assert "27 values were read from the device outside the steps, in 27 steps" in said


@pytest.mark.cores(1)
def test_a_callback_that_changes_weights_is_reported(cores, capsys):
    class Shrink(Callback):
        def on_train_batch_end(self, batch, logs=None):
            with torch.no_grad():
                self.model.module.head.weight.mul_(0.99)

    trained(cores, callbacks=[Shrink(), Diagnostics()], batch_size=8)
    # Not before the first steps of each shape, which are traced.
    assert re.search(r"- a callback changed the weights before 2\d of 27 steps", capsys.readouterr().out)


@pytest.mark.cores(1)
def test_slow_callbacks_and_validations_are_reported(cores, capsys, clock):
    class Slow(Callback):
        reads_weights = False

        def on_train_batch_end(self, batch, logs=None):
            clock.now += 1.0

    model = trained(cores, epochs=2, batch_size=8)
    arguments = {"batch_size": 8, "verbose": 0}
    model.fit(X, Y, callbacks=[Slow(), Diagnostics()], **arguments)
    assert "- callbacks took 100% of the time: do less after a batch" in capsys.readouterr().out

    class Files(torch.utils.data.Dataset):
        def __len__(self):
            return len(X)

        def __getitem__(self, i):
            clock.now += 0.02
            return X[i], Y[i]

    model.fit(X, Y, epochs=2, validation_data=Files(), callbacks=Diagnostics(), **arguments)
    assert "- validating took 100% of the time: validate less often (validation_freq=5)" in capsys.readouterr().out


@pytest.mark.cores(1)
@pytest.mark.usefixtures("compiles_anew")
def test_long_compilations_are_reported(cores, capsys, monkeypatch):
    monkeypatch.setattr(advice, "_COMPILE_SECONDS", 0.01)  # otherwise the test would compile for a minute

    def own(net, h):  # otherwise its graphs might come from another test
        return h.cos().tanh()

    trained(cores, own, epochs=1, batch_size=69)
    assert re.search(r"- compiling \d+ graphs? took \d+ s of \d+ s: use fewer batch shapes", capsys.readouterr().out)


@pytest.mark.cores(1)
def test_all_passes_are_reported(cores):
    model = trained(cores, epochs=1)
    model.evaluate(X, Y, batch_size=32, verbose=0)
    model.predict(X, batch_size=32, verbose=0)
    passes = [(one.role, one.steps, one.rows) for one in model.report().passes]
    assert passes == [("train", 3, 69), ("eval", 3, 69), ("predict", 3, 69)]
    (joined,) = trained(cores, epochs=1, batch_size=23, steps_per_execution=3).report().passes
    assert (joined.steps, joined.rows) == (3, 69)


@pytest.mark.cores(1)
def test_a_second_fit_starts_a_new_report(cores):
    model = trained(cores)
    model.fit(X, Y, batch_size=32, verbose=0)
    assert causes(model) == [] and model.report().steps == 3
