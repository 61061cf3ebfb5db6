"""Sentences about numbers that show a fault, each with its cure; nothing where there is none."""

from collections.abc import Iterable, Sequence

from ..errors import counted
from ..runtime import cure_for
from ..utils.hardware import cpus

# The share of the time, and the seconds, from which on a thing is worth a sentence.
_SHARE = 0.2
_SECONDS = 1.0
_COMPILE_SECONDS = 60.0
_OFTEN = 8  # compilations of one step; whole batches, a shorter last one and some buckets are no fault


def traced(role: str, cause: str) -> str:
    """A sentence about a step that is traced on every call.

    Example:
        >>> print(traced("train", "its Python draws random numbers at net.py:8"))
        the train step is traced anew on every call, because its Python draws random numbers at net.py:8. Draw on the \
device (torch.rand(..., device=x.device)) or in the data set
    """
    return f"the {role} step is traced anew on every call, because {cause}. {cure_for(cause)}"


def fell_back(operation: str, times: int, line: str, cure: str) -> str:
    """A sentence about an operation that runs on the host, and its cure; a line such as `net.py:8` called it."""
    often = "once" if times == 1 else f"{times} times"
    return f"{operation} ran on the host {often}, called at {line}: XLA has none, and the device waits. {cure}"


def read(lines: Iterable[str], times: int) -> str:
    """A sentence about values that lines such as `net.py:8` in steps read, so many times."""
    return (
        f"{counted(times, 'value')} {'was' if times == 1 else 'were'} read from the device, at "
        f"{' and '.join(sorted(lines))}, each a wait: "
        "return them from train_step as logs, which wait only where one is read"
    )


def read_elsewhere(times: int, steps: int) -> str | None:
    """A sentence about values that were read outside of so many steps of training, as `.item()` in a callback does.

    Example:
        >>> read_elsewhere(3, 1000) is None
        True
    """
    if times < max(steps / 2, _OFTEN):
        return None
    cure = "read in on_epoch_end, or every hundredth batch, instead of in every one"
    return f"{times} values were read from the device outside of the steps, in {steps} steps, each a wait: {cure}"


def compiled(role: str, causes: Sequence[str]) -> str | None:
    """A sentence about a step that was compiled time and again, and the reason of each time."""
    if len(causes) < _OFTEN:
        return None
    shapes = sum(" had the " in cause for cause in causes)
    if shapes * 2 >= len(causes):
        padding = "DataLoader(..., collate_fn=tpufit.data.PadToBuckets([32, 64, 128]))"
        cure = f"let all batches but the last have equally many rows, and pad what varies: {padding}"
    else:
        cure = "change what is part of the graph seldom; the learning rate is none, and costs nothing"
    return f"the {role} step was compiled {len(causes)} times, the last time because {causes[-1]}: {cure}"


def compiling(seconds: float, elapsed: float, graphs: int) -> str | None:
    """A sentence about the time that compiling took, of the time for everything.

    Example:
        >>> compiling(20.0, 40.0, 3) is None  # a usual start
        True
    """
    if seconds < _COMPILE_SECONDS or seconds < _SHARE * elapsed:
        return None
    return (
        f"compiling {counted(graphs, 'graph')} took {seconds:.0f} s of {elapsed:.0f} s: fewer shapes of batches are "
        "fewer graphs, a smaller steps_per_execution makes smaller ones, and a longer training pays for them only once"
    )


def waiting(waited: float, elapsed: float) -> str | None:
    """A sentence about an epoch that waited for its data, for so many of its seconds.

    Example:
        >>> waiting(waited=0.1, elapsed=10.0) is None
        True
        >>> waiting(waited=9.0, elapsed=10.0)[:50]
        'the device waited for data 90% of the epoch: decod'
    """
    if waited < _SECONDS or waited < _SHARE * elapsed:
        return None
    return (
        f"the device waited for data {waited / elapsed:.0%} of the epoch: decoding and augmenting take longer than the "
        f"steps. Let workers do it (DataLoader(..., num_workers={cpus()}) on this machine), or do it once: "
        "tpufit.data.CachedDataset keeps ready samples, with copies=k in k augmented variants, and its "
        "device_transform augments on the device. A larger batch_size helps where the steps are small"
    )


def logs_read(times: int, steps: int) -> str | None:
    """A sentence about batch logs that a callback reads.

    Example:
        >>> print(logs_read(90, 100))
        callbacks read the logs of 90 of 100 batches, and each time the device was waited for: read them every \
hundredth batch, or in on_epoch_end
    """
    if times < _OFTEN or times < _SHARE * steps:
        return None
    cure = "read them every hundredth batch, or in on_epoch_end"
    return f"callbacks read the logs of {times} of {steps} batches, and each time the device was waited for: {cure}"


def weights_changed(times: int, steps: int) -> str | None:
    """A sentence about weights that a callback changes between steps: so many found them changed."""
    if times < _OFTEN or times < _SHARE * steps:
        return None
    found = f"a callback changed the weights before {times} of {steps} steps, and each time the device was waited for"
    return f"{found}: do it inside train_step, where it is part of the graph"


def in_callbacks(seconds: float, elapsed: float) -> str | None:
    """A sentence about callbacks that take long, their waits not counted, of the time for everything."""
    if seconds < _SECONDS or seconds < _SHARE * elapsed:
        return None
    return f"callbacks took {seconds / elapsed:.0%} of the time: do less after a batch, or do it every hundredth batch"


def validating(seconds: float, elapsed: float) -> str | None:
    """A sentence about validations that take longer than the training, of the time for everything."""
    if seconds < _SECONDS or seconds < elapsed / 2:
        return None
    cure = "fit(validation_freq=5) does it less often, a larger validation_batch_size faster, validation_steps on less"
    return f"validating took {seconds / elapsed:.0%} of the time: {cure}"


def unused(used: int, available: int) -> str | None:
    """A sentence about idle cores.

    Example:
        >>> print(unused(1, 8))
        1 of this TPU's 8 cores is used: fit(cores='auto') uses them all
    """
    if used >= available:
        return None
    are = "is" if used == 1 else "are"
    return f"{used} of this TPU's {available} cores {are} used: fit(cores='auto') uses them all"


def starting(seconds: float, elapsed: float, joined: bool) -> str | None:
    """A hint about steps so short that starting them takes most of the time for everything but compiling and tracing.

    If `joined`, several steps are one graph already.
    """
    if seconds < _SECONDS or not 0 < elapsed <= 2 * seconds:
        return None
    cure = "a larger batch_size" if joined else "a larger batch_size, or compile(steps_per_execution='auto')"
    return f"starting the steps took {seconds / elapsed:.0%} of the time, because they are so short: {cure}"
