"""Sentences about measured problems, with their cures; None if there is no problem."""

from collections.abc import Iterable, Sequence

from ..errors import say_count
from ..utils.hardware import count_cpus

# The least share of the time, and the least seconds, of a problem worth reporting.
_SHARE = 0.2
_SECONDS = 1.0
_COMPILE_SECONDS = 60.0
_OFTEN = 8  # compilations of a step; full batches, a shorter last batch and some buckets are no problem


def report_fallback(operation: str, times: int, line: str, cure: str) -> str:
    """Report an operation that ran on the host, and its cure; `line`, such as `net.py:8`, called it."""
    often = "once" if times == 1 else f"{times} times"
    return f"{operation} ran on the host {often}, called at {line}: XLA lacks it, and the device waits. {cure}"


def report_reads(lines: Iterable[str], times: int) -> str:
    """Report values that lines in steps, such as `net.py:8`, read."""
    return (
        f"{say_count(times, 'value')} {'was' if times == 1 else 'were'} read from the device, at "
        f"{' and '.join(sorted(lines))}, each a wait: "
        "return them from train_step as logs, which wait only when they are read"
    )


def report_reads_elsewhere(times: int, steps: int) -> str | None:
    """Report values that were read outside the training steps, e.g. by `.item()` in a callback.

    Example:
        >>> report_reads_elsewhere(3, 1000) is None
        True
    """
    if times < max(steps / 2, _OFTEN):
        return None
    cure = "read in on_epoch_end, or every hundredth batch, instead of every batch"
    return f"{times} values were read from the device outside the steps, in {steps} steps, each a wait: {cure}"


def report_compilations(role: str, causes: Sequence[str]) -> str | None:
    """Report a step that was compiled many times, given the cause of each."""
    if len(causes) < _OFTEN:
        return None
    shapes = sum(" had the " in cause for cause in causes)
    if shapes * 2 >= len(causes):
        padding = "DataLoader(..., collate_fn=tpufit.data.PadToBuckets([32, 64, 128]))"
        cure = f"give all batches but the last the same number of rows, and pad varying lengths: {padding}"
    else:
        cure = "change parts of the graph rarely; the learning rate isn't one, and costs nothing"
    return f"the {role} step was compiled {len(causes)} times, the last time because {causes[-1]}: {cure}"


def report_compile_time(seconds: float, elapsed: float, graphs: int) -> str | None:
    """Report the time of compiling, out of all the time.

    Example:
        >>> report_compile_time(20.0, 40.0, 3) is None  # a normal start
        True
    """
    if seconds < _COMPILE_SECONDS or seconds < _SHARE * elapsed:
        return None
    return (
        f"compiling {say_count(graphs, 'graph')} took {seconds:.0f} s of {elapsed:.0f} s: use fewer batch "
        "shapes for fewer graphs, or a smaller steps_per_execution for smaller ones. A longer training compiles no more"
    )


def report_waiting(waited: float, elapsed: float) -> str | None:
    """Report the seconds that an epoch waited for its data.

    Example:
        >>> report_waiting(waited=0.1, elapsed=10.0) is None
        True
        >>> report_waiting(waited=9.0, elapsed=10.0)[:50]
        'the device waited for data 90% of the epoch: decod'
    """
    if waited < _SECONDS or waited < _SHARE * elapsed:
        return None
    return (
        f"the device waited for data {waited / elapsed:.0%} of the epoch: decoding and augmenting take longer than the "
        f"steps. Let workers do it (DataLoader(..., num_workers={count_cpus()}) on this machine), or do it once: "
        "tpufit.data.CachedDataset stores finished samples (with copies=k, k augmented variants of each), and its "
        "device_transform augments them on the device. A larger batch_size helps where the steps are small"
    )


def report_read_logs(times: int, steps: int) -> str | None:
    """Report batch logs that a callback reads.

    Example:
        >>> print(report_read_logs(90, 100))
        callbacks read the logs of 90 of 100 batches, and waited for the device each time: read them every \
hundredth batch, or in on_epoch_end
    """
    if times < _OFTEN or times < _SHARE * steps:
        return None
    cure = "read them every hundredth batch, or in on_epoch_end"
    return f"callbacks read the logs of {times} of {steps} batches, and waited for the device each time: {cure}"


def report_changed_weights(times: int, steps: int) -> str | None:
    """Report weights that a callback changed before `times` of the steps."""
    if times < _OFTEN or times < _SHARE * steps:
        return None
    problem = (
        f"a callback changed the weights before {times} of {steps} steps, and the host waited for the device each time"
    )
    return f"{problem}: do it inside train_step, where it is part of the graph"


def report_slow_callbacks(seconds: float, elapsed: float) -> str | None:
    """Report slow callbacks, excluding their waits, out of all the time."""
    if seconds < _SECONDS or seconds < _SHARE * elapsed:
        return None
    return f"callbacks took {seconds / elapsed:.0%} of the time: do less after a batch, or do it every hundredth batch"


def report_validation_time(seconds: float, elapsed: float) -> str | None:
    """Report validations that take longer than the training, out of all the time."""
    if seconds < _SECONDS or seconds < elapsed / 2:
        return None
    cure = (
        "validate less often (validation_freq=5), in larger batches (validation_batch_size), or on fewer batches "
        "(validation_steps)"
    )
    return f"validating took {seconds / elapsed:.0%} of the time: {cure}"


def report_idle_cores(used: int, available: int) -> str | None:
    """Report idle cores.

    Example:
        >>> print(report_idle_cores(1, 8))
        1 of this TPU's 8 cores is used: fit(cores='auto') uses them all
    """
    if used >= available:
        return None
    are = "is" if used == 1 else "are"
    return f"{used} of this TPU's {available} cores {are} used: fit(cores='auto') uses them all"


def report_starting(seconds: float, elapsed: float, joined: bool) -> str | None:
    """Hint at steps so short that starting them takes most of the time other than compiling and tracing.

    With `joined`, several steps are one graph already.
    """
    if seconds < _SECONDS or not 0 < elapsed <= 2 * seconds:
        return None
    cure = "a larger batch_size" if joined else "a larger batch_size, or compile(steps_per_execution='auto')"
    return f"starting the steps took {seconds / elapsed:.0%} of the time, because they are so short: {cure}"
