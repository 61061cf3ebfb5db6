"""The errors that tpufit raises. Each message says what was expected, what was passed, and what to do.

TpufitError
|-- ArgumentError (ValueError)          an argument of a call has a value that it can't have
|   `-- UnknownNameError                an unknown name; the nearest names are suggested
|-- NotPicklableError (TypeError)       a model can't be pickled or copied
|-- NotCompiledError (RuntimeError)     compile hasn't set what fit, evaluate or a step needs
|-- BusyError (RuntimeError)            another thread uses the device, and may be waiting for this thread
|-- ForkedError (RuntimeError)          a forked process uses the device of its parent process
|-- DataError (ValueError)              the data are empty, of unequal lengths or of an unusable form
|   |-- LabelError                      a class label lies outside the module's classes
|   |-- BatchError (RuntimeError)       the module or the loss fails on a batch; PyTorch's error is chained to it
|   `-- CacheError                      a cache of samples can't be made or read
|       |-- CacheMismatchError          its source, transform or version differ from the current ones
|       |-- CacheDamagedError           a file of the cache is damaged
|       |-- CacheDiskFullError          the disk has no room for the rest of the cache
|       `-- CacheBusyError              another warm-up is writing the cache
|-- WeightsError (ValueError)           weights don't fit the module, or a file has no weights
|-- CheckpointError (RuntimeError)      a checkpoint can't be written, read or resumed from
|   |-- CheckpointMissingError          there is no checkpoint at this path
|   |-- CheckpointDamagedError          a file of the checkpoint is damaged
|   |-- CheckpointMismatchError         the checkpoint is of another net, optimizer or data
|   |-- CheckpointNotWrittenError       no room, no permission, or weights that aren't finite
|   `-- CheckpointBusyError             another process or callback writes into the same folder
|-- StartError (RuntimeError)           the device runtime can't be started as asked
|   |-- CoresError                      a number of cores that this host or process can't provide
|   |-- DeviceBusyError                 another process uses the TPU
|   `-- VersionError                    incompatible versions of torch and its TPU runtime
|-- HostError (RuntimeError)            the hosts of a pod disagree, or a host is gone
|-- DeviceError (RuntimeError)          a step failed on the device; the runtime's error is chained to it
|   |-- OutOfMemoryError                the device has no room for the step
|   |-- DeviceLostError                 the device is gone, or in an error state
|   `-- PartitionError                  XLA could not split the step over the cores
|-- PlacementError (RuntimeError)       a tensor can't be moved to the device
|-- ReplayError (RuntimeError)          a step can't be replayed, as jit_compile=True or several TorchTPU cores require
|-- StrictError (RuntimeError)          fit(strict=True), but something slows down steps
|-- StateLostError (RuntimeError)       a step failed on the device, and the weights are lost with it
|-- CallbackError (RuntimeError)        a callback's hook raised an error, which is chained to it
|-- TrackerError (RuntimeError)         an experiment tracker can't be reached, or refuses the run
`-- PreflightError (RuntimeError)       a step can't be compiled by a preflight
"""

import difflib
import os
from collections.abc import Callable, Iterable, Sequence

import numpy as np


def join_few(items: Sequence[str]) -> str:
    """Join the first eight names, for a message.

    Example:
        >>> join_few(["a", "b"])
        'a, b'
    """
    return ", ".join(items[:8]) + " ..." * (len(items) > 8)


def say_count(count: int, noun: str) -> str:
    """Return a number with its noun, for a message.

    Example:
        >>> say_count(1, "batch"), say_count(0, "epoch"), say_count(1234, "batch")
        ('1 batch', '0 epochs', '1,234 batches')
    """
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith(('tch', 'ss')) else 's'}"


class TpufitError(Exception):
    """The base of all errors that tpufit raises."""


class ArgumentError(TpufitError, ValueError):
    """An argument of a call has a value that it can't have."""


class UnknownNameError(ArgumentError):
    """An unknown name, of a loss, an optimizer, ...

    Args:
        kind: What the name is for, e.g. `"optimizer"`.
        name: The unknown name.
        known: The known names.
        hint: A sentence for a name that another library has (default: none).

    Example:
        >>> print(UnknownNameError("optimizer", "adamv", ["adam", "adamw", "sgd"]))
        unknown optimizer 'adamv': did you mean 'adam' or 'adamw'? Known: adam, adamw, sgd
    """

    def __init__(self, kind: str, name: object, known: Iterable[str], hint: str = "") -> None:
        known = sorted(known)
        near = difflib.get_close_matches(str(name).lower(), known, n=2)
        question = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
        super().__init__(f"unknown {kind} {name!r}: {question}{hint + ' ' if hint else ''}Known: {', '.join(known)}")


def require_whole(name: str, value: object, at_least: int = 1, otherwise: str = "") -> int:
    """Return an argument as an `int`, or raise an `ArgumentError` if it isn't a whole number, or is too small.

    Args:
        name: The argument's name.
        value: The argument's value.
        at_least: The smallest number allowed (default 1).
        otherwise: Other allowed values, which the caller has checked, for the message (default: none).

    Example:
        >>> require_whole("steps", 5)
        5
        >>> require_whole("steps", True)
        Traceback (most recent call last):
        tpufit.errors.ArgumentError: steps must be a whole number of at least 1, got True
    """
    # The upper limit is because the number must fit in 64 bits.
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not at_least <= value < 2**63:
        choice = f" or {otherwise}" if otherwise else ""
        limit = " and below 2**63" if isinstance(value, (int, np.integer)) and value > at_least else ""
        wanted = f"a whole number of at least {at_least}{limit}{choice}"
        raise ArgumentError(f"{name} must be {wanted}, got {short_repr(value)}")
    return int(value)


def require_number(name: str, value: object, wanted: str, fits: Callable[[float], bool]) -> int | float:
    """Return an argument as a Python number, or raise an `ArgumentError` if it isn't a number or doesn't fit.

    Args:
        name: The argument's name.
        value: The argument's value.
        wanted: The expected value, for the message.
        fits: Returns True for allowed numbers.

    Example:
        >>> require_number("ema_momentum", 0.9, "a share from 0 to 1", lambda share: 0 <= share <= 1)
        0.9
    """
    number = value.item() if isinstance(value, (np.integer, np.floating)) else value
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not fits(number):
        raise ArgumentError(f"{name} must be {wanted}, got {short_repr(value)}")
    return number


def require_count_or_share(name: str, value: object, wanted: str) -> int | float:
    """Return an argument that is a whole number of at least 1, or a share above 0 and up to 1, as a Python number.

    Args:
        name: The argument's name.
        value: The argument's value.
        wanted: The expected value, for the message.

    Example:
        >>> require_count_or_share("limit", 1.5, "a number of batches, or a share such as 0.1")
        Traceback (most recent call last):
        tpufit.errors.ArgumentError: limit must be a number of batches, or a share such as 0.1, got 1.5
    """
    return require_number(name, value, wanted, lambda given: given >= 1 if isinstance(given, int) else 0 < given <= 1)


def require_flag(name: str, value: object) -> bool:
    """Return an argument as True or False, or raise an `ArgumentError` if it is neither. None is False."""
    number = isinstance(value, (int, np.integer)) and value in (0, 1)
    if value is None or isinstance(value, np.bool_) or number:
        return bool(value)
    raise ArgumentError(f"{name} must be True or False, got {short_repr(value)}")


def require_choice(name: str, value: object, *choices: object) -> None:
    """Raise an `ArgumentError` unless an argument is one of some choices: names, numbers, True, False or None."""
    if not isinstance(value, (str, bool, int, type(None))) or value not in choices:
        *first, last = map(repr, choices)
        raise ArgumentError(f"{name} must be {', '.join(first)} or {last}, got {short_repr(value)}")


def require_path(name: str, value: object) -> None:
    """Raise an `ArgumentError` unless an argument is a path."""
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value) or "\0" in str(value):
        raise ArgumentError(f"{name} must be a path, got {short_repr(value)}")


def short_repr(value: object) -> str:
    """Return an argument's value for a message, on one line of at most 80 characters.

    Example:
        >>> short_repr("x"), len(short_repr("x" * 1000))
        ("'x'", 80)
    """
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:76]} ..."


class NotPicklableError(TpufitError, TypeError):
    """A model can't be pickled or copied; save and load it instead."""


class NotCompiledError(TpufitError, RuntimeError):
    """A method needs something that `compile` hasn't set yet."""


class DataError(TpufitError, ValueError):
    """The data are empty, of unequal lengths or of a form that can't be batched."""


class LabelError(DataError):
    """A class label lies outside the module's classes."""


class BatchError(DataError, RuntimeError):
    """The module or the loss fails on a batch. PyTorch's error, if any, is the `__cause__`."""


class CacheError(DataError):
    """A cache of samples can't be made or read."""


class CacheMismatchError(CacheError):
    """A cache was made from another source, with another transform, or in another version."""


class CacheDamagedError(CacheError):
    """A file of a cache is damaged: cut short, changed or replaced."""


class CacheDiskFullError(CacheError):
    """The disk has no room for the rest of a cache. Finished files are kept.

    Args:
        folder: The cache.
        need: The number of bytes still to be written.
        free: The number of free bytes.
        done: The number of finished files.
        files: The number of all files.

    Attributes:
        need: The number of bytes still to be written.
        free: The number of free bytes.
        done: The number of finished files.
        files: The number of all files.

    Example:
        >>> error = CacheDiskFullError("cache", need=2_000, free=500, done=3, files=5)
        >>> error.need - error.free
        1500
    """

    def __init__(self, folder: object, need: int, free: int, done: int, files: int) -> None:
        self.need = need
        self.free = free
        self.done = done
        self.files = files
        super().__init__(
            f"no room in {folder} for the rest: {need:,} bytes are needed and {free:,} are free. {done} of {files} "
            "files are finished and kept. Make room and call warm_up() again, or choose another cache_dir"
        )


class CacheBusyError(CacheError):
    """Another warm-up is writing the same cache."""


class WeightsError(TpufitError, ValueError):
    """Weights don't fit the module, or a file has no weights."""


class CheckpointError(TpufitError, RuntimeError):
    """A checkpoint can't be written, read or resumed from."""


class CheckpointMissingError(CheckpointError):
    """There is no checkpoint at a given path."""


class CheckpointDamagedError(CheckpointError):
    """A file of a checkpoint is damaged: cut short, changed or missing."""


class CheckpointMismatchError(CheckpointError):
    """A checkpoint is of another net, optimizer or data."""


class CheckpointNotWrittenError(CheckpointError):
    """A checkpoint can't be written: there is no room or no permission, or the weights aren't finite."""


class CheckpointBusyError(CheckpointError):
    """Another process or another callback writes into the same folder."""


class StartError(TpufitError, RuntimeError):
    """The device runtime can't be started as asked."""


class CoresError(StartError):
    """A number of cores that this host doesn't have, or that this process can't change to."""


class VersionError(StartError):
    """The installed versions of torch and its TPU runtime (torch_xla or torch_tpu) are incompatible."""


class DeviceBusyError(StartError):
    """Another process uses the TPU."""


class HostError(TpufitError, RuntimeError):
    """The hosts of a pod disagree, or a host is gone."""


class DeviceError(TpufitError, RuntimeError):
    """A step failed while it was compiled or run on the device; the runtime's error is the `__cause__`."""


class OutOfMemoryError(DeviceError):
    """The device has no room for a step: its weights, optimizer state, batch and activations."""


class DeviceLostError(DeviceError):
    """The device is gone, or in an error state until a restart."""


class PartitionError(DeviceError):
    """XLA's partitioner could not split a step over the cores."""


class PlacementError(TpufitError, RuntimeError):
    """A tensor of the module or the optimizer can't be moved to the device."""


class ReplayError(TpufitError, RuntimeError):
    """The step can't be replayed, which `jit_compile=True` and TorchTPU on several cores require."""


class StrictError(TpufitError, RuntimeError):
    """`fit(strict=True)` met a host read, an operation that runs on the host, or a new graph after the first epoch."""


class StateLostError(TpufitError, RuntimeError):
    """A step failed on the device, and the weights that it would have computed, or has already consumed, are lost."""


class BusyError(TpufitError, RuntimeError):
    """Another thread of this process uses the device and can't be waited for."""


class ForkedError(TpufitError, RuntimeError):
    """A forked process used the device of its parent, whose threads it doesn't have."""


class CallbackError(TpufitError, RuntimeError):
    """A callback's hook raised an error, the `__cause__`."""


class TrackerError(TpufitError, RuntimeError):
    """An experiment tracker can't be reached, or refuses a run."""


class PreflightError(TpufitError, RuntimeError):
    """A preflight can't compile a step: it can't be traced, or the compiler is missing or failed."""
