"""`CHECKS`: all checks in the order in which they run, the most important first."""

import signal

from . import device_start, equivalence, memory, numerics, resumption, speed
from .check import ALL, NONE, ONE, Check, Process

STARTS = {
    ONE: Check("starts on one core", (Process(device_start.train_tiny_net, ONE),), quick=True),
    ALL: Check("starts on all cores", (Process(device_start.train_tiny_net),), quick=True),
}

CHECKS = (
    Check("the doctor finds no error", (Process(device_start.run_doctor, NONE),), quick=True),
    STARTS[ALL],  # before the others, because it identifies the device
    STARTS[ONE],
    Check("a conv net with batch norm matches PyTorch", (Process(numerics.check_conv),), quick=True),
    Check("an LSTM matches PyTorch", (Process(numerics.check_lstm),)),
    Check("a GPT matches PyTorch", (Process(numerics.check_gpt),), quick=True),
    Check("matmul_precision takes effect", (Process(numerics.check_precisions),), only_tpu=True, quick=True),
    Check("a replayed step equals a traced step", (Process(equivalence.check_replay),), quick=True),
    Check(
        "one core equals all",
        (Process(equivalence.compute_alone, ONE), Process(equivalence.compare_cores)),
        several=True,
        quick=True,
    ),
    Check("uneven last batches are exact", (Process(equivalence.check_uneven_batch),)),
    Check(
        "a training resumes after kill -9",
        (Process(resumption.train_until_kill, ends=-signal.SIGKILL), Process(resumption.check_resume)),
        one_host=True,
        quick=True,
    ),
    Check(
        "steps take the predicted time",
        (Process(speed.predict_speed, NONE), Process(speed.measure_nets)),
        seconds=180.0,
        only_tpu=True,
    ),
    Check(
        "a training resumes after SIGTERM",
        (Process(resumption.train_until_sigterm, ends=128 + signal.SIGTERM), Process(resumption.check_resume)),
        one_host=True,
    ),
    Check("a training resumes after Ctrl-C", (Process(resumption.check_interrupt),), one_host=True),
    Check("memory is freed, one core", (Process(memory.check_release, ONE),), quick=True),
    Check("memory is freed, all cores", (Process(memory.check_release),), several=True),
    Check(
        "a step that is too large is an error, one core",
        (Process(memory.check_too_large, ONE),),
        only_tpu=True,
        runs_on_cpu=False,
    ),
    Check(
        "a step that is too large is an error, all cores",
        (Process(memory.check_too_large),),
        only_tpu=True,
        runs_on_cpu=False,
        several=True,
    ),
    Check("split weights equal whole weights", (Process(equivalence.check_sharding),), several=True),
    Check("recomputed activations equal stored ones", (Process(equivalence.check_recomputation),)),
    Check("attention over long rows matches PyTorch", (Process(numerics.check_attention),)),
    Check("a checkpoint takes little more than a copy", (Process(resumption.measure_checkpoint),), only_tpu=True),
    Check("data reaches the device and returns", (Process(speed.measure_transfers),), only_tpu=True, quick=True),
    Check("three steps are profiled", (Process(speed.check_profile),), one_host=True),
)
