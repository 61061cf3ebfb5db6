"""`CHECKS`: all that is verified, in the order in which it runs: what comes first says most."""

import signal

from . import endings, memory, numerics, sameness, speed, starting
from .check import ALL, NONE, ONE, Check, Process

STARTS = {
    ONE: Check("starts on one core", (Process(starting.trains, ONE),), quick=True),
    ALL: Check("starts on all cores", (Process(starting.trains),), quick=True),
}

CHECKS = (
    Check("the doctor finds no error", (Process(starting.doctor, NONE),), quick=True),
    STARTS[ALL],  # first: it tells what the device is
    STARTS[ONE],
    Check("a conv net with batch norm is PyTorch's", (Process(numerics.conv),), quick=True),
    Check("an LSTM is PyTorch's", (Process(numerics.lstm),)),
    Check("a GPT is PyTorch's", (Process(numerics.gpt),), quick=True),
    Check("matmul_precision is in force", (Process(numerics.precisions),), only_tpu=True, quick=True),
    Check("a replayed step is a traced one", (Process(sameness.replayed),), quick=True),
    Check("one core is all", (Process(sameness.alone, ONE), Process(sameness.together)), several=True, quick=True),
    Check("uneven last batches are exact", (Process(sameness.uneven),)),
    Check(
        "a training goes on after kill -9",
        (Process(endings.killed, ends=-signal.SIGKILL), Process(endings.resumed)),
        one_host=True,
        quick=True,
    ),
    Check(
        "steps take what was predicted",
        (Process(speed.predicted, NONE), Process(speed.measured)),
        seconds=180.0,
        only_tpu=True,
    ),
    Check(
        "a training goes on after SIGTERM",
        (Process(endings.terminated, ends=128 + signal.SIGTERM), Process(endings.resumed)),
        one_host=True,
    ),
    Check("a training goes on after Ctrl-C", (Process(endings.interrupted),), one_host=True),
    Check("memory is given back, one core", (Process(memory.given_back, ONE),), quick=True),
    Check("memory is given back, all cores", (Process(memory.given_back),), several=True),
    Check(
        "a step that is too large is an error, one core",
        (Process(memory.too_large, ONE),),
        only_tpu=True,
        runs_on_cpu=False,
    ),
    Check(
        "a step that is too large is an error, all cores",
        (Process(memory.too_large),),
        only_tpu=True,
        runs_on_cpu=False,
        several=True,
    ),
    Check("split weights are whole ones", (Process(sameness.sharded),), several=True),
    Check("recomputed activations are kept ones", (Process(sameness.recomputed),)),
    Check("attention over long rows is PyTorch's", (Process(numerics.attention),)),
    Check("a checkpoint takes little more than a copy", (Process(endings.checkpoint),), only_tpu=True),
    Check("batches travel", (Process(speed.sending),), only_tpu=True, quick=True),
    Check("three steps are profiled", (Process(speed.profile),), one_host=True),
)
