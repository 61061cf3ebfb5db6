"""`Profiler`: a trace of the steps that were asked for, and where the host's time went."""

import numpy as np
import pytest
from torch import nn

import tpufit
from tpufit.callbacks import Profiler
from tpufit.errors import ArgumentError


@pytest.mark.cores(1)
def test_a_trace_and_a_table_are_written(cores, tmp_path):
    x, y = np.zeros((64, 4), "float32"), np.zeros(64, "int64")
    for name, steps in (("some", (3, 5)), ("to the end", (6, 100)), ("none", None)):
        model = tpufit.Model(nn.Linear(4, 2))
        model.compile("sgd", "cross_entropy")
        model.fit(x, y, batch_size=8, epochs=2, verbose=0, cores=cores, callbacks=Profiler(tmp_path / name, steps))
        traces = list((tmp_path / name).glob("plugins/profile/*/*.xplane.pb"))
        assert [trace.stat().st_size > 0 for trace in traces] == ([] if steps is None else [True])
        table = (tmp_path / name / "host_time.txt").read_text()
        for phase in ("waiting for data", "tracing", "start of graphs", "callbacks", "device: logs"):
            assert phase in table
    assert "compiling" in (tmp_path / "some" / "host_time.txt").read_text()  # the others find its graph


@pytest.mark.parametrize("steps", [(5, 3), (-1, 4), (1,)])
def test_steps_are_two_numbers(steps):
    with pytest.raises(ArgumentError, match="steps must be the first and the last step"):
        Profiler(steps=steps)
