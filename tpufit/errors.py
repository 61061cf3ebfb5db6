"""The errors that tpufit raises. Each message says what was expected, what came, and what to do.

TpufitError
|-- ArgumentError (ValueError)          an argument of a call has a value that it can't have
|   `-- UnknownNameError                a name that nothing goes by; the nearest ones are suggested
|-- NotPicklableError (TypeError)       a model is given to pickle, torch.save or copy, and can't be
|-- NotCompiledError (RuntimeError)     fit, evaluate or a step before compile gave what it needs
|-- BusyError (RuntimeError)            another thread uses the device, and may be waiting for this one
|-- ForkedError (RuntimeError)          a forked process asks for the device of the one that it comes from
|-- DataError (ValueError)              the data are empty, of unequal lengths or of an unusable form
|   |-- LabelError                      a class label lies outside the module's classes
|   |-- BatchError (RuntimeError)       the module or the loss fails on a batch; PyTorch's own error is chained to it
|   `-- CacheError                      a cache of samples can't be made or read
|       |-- CacheMismatchError          its source, transform or version are others than now
|       |-- CacheDamagedError           a file of it is not what was written
|       |-- CacheDiskFullError          there is no room for the rest of it
|       `-- CacheBusyError              another warm-up is at work on it
|-- WeightsError (ValueError)           weights that don't fit the module, or a file that holds none
|-- CheckpointError (RuntimeError)      a checkpoint can't be written, read or resumed from
|   |-- CheckpointMissingError          there is none where one was named
|   |-- CheckpointDamagedError          a file of it is not what was written
|   |-- CheckpointMismatchError         it is of another net, optimizer or data
|   |-- CheckpointNotWrittenError       no room, no permission, or weights that aren't finite
|   `-- CheckpointBusyError             another process or callback writes into the same folder
|-- StartError (RuntimeError)           the device runtime can't be started as asked
|   |-- CoresError                      a number of cores that this host or process can't give
|   |-- DeviceBusyError                 another process holds the TPU
|   `-- VersionError                    torch and torch_xla versions that don't belong together
|-- HostError (RuntimeError)            the hosts of a pod are not at one, or one of them is gone
|-- DeviceError (RuntimeError)          a step failed on the device; torch_xla's own words are below
|   |-- OutOfMemoryError                the device has no room for it
|   |-- DeviceLostError                 the device is gone, or in a state of error
|   `-- PartitionError                  XLA could not divide it among the cores
|-- PlacementError (RuntimeError)       a tensor that can't be moved to the device as it is
|-- ReplayError (RuntimeError)          jit_compile=True, and a step that can't be replayed
|-- StrictError (RuntimeError)          fit(strict=True), and something that makes steps slow
|-- StateLostError (RuntimeError)       a step failed on the device, and the weights are lost with it
|-- CallbackError (RuntimeError)        a callback's hook raised; the cause is chained to it
|-- TrackerError (RuntimeError)         an experiment tracker can't be reached, or refuses
`-- PreflightError (RuntimeError)       a step can't be compiled for a TPU that isn't there
"""

import difflib
import os
from collections.abc import Callable, Iterable, Sequence

import numpy as np


def few(items: Sequence[str]) -> str:
    """Join the first of many names, for a message.

    Example:
        >>> few(["a", "b"])
        'a, b'
    """
    return ", ".join(items[:8]) + " ..." * (len(items) > 8)


def counted(count: int, noun: str) -> str:
    """Count things, for a message.

    Example:
        >>> counted(1, "batch"), counted(0, "epoch"), counted(1234, "batch")
        ('1 batch', '0 epochs', '1,234 batches')
    """
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith(('tch', 'ss')) else 's'}"


class TpufitError(Exception):
    """The root of everything that tpufit raises on purpose."""


class ArgumentError(TpufitError, ValueError):
    """An argument of a call has a value that it can't have."""


class UnknownNameError(ArgumentError):
    """A name (of a loss, an optimizer, ...) that nothing goes by.

    Args:
        kind: The kind of thing named, e.g. `"optimizer"`.
        name: The unknown name.
        known: The known names.
        hint: One more sentence, for a name that has a known meaning elsewhere (default: none).

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
        otherwise: The other values allowed, for the message; the caller has ruled them out (default: none).

    Example:
        >>> require_whole("steps", 5)
        5
        >>> require_whole("steps", True)
        Traceback (most recent call last):
        tpufit.errors.ArgumentError: steps must be a whole number of at least 1, got True
    """
    # NumPy's whole numbers are some, too. What takes them counts in 64 bits.
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not at_least <= value < 2**63:
        choice = f" or {otherwise}" if otherwise else ""
        limit = " and below 2**63" if isinstance(value, (int, np.integer)) and value > at_least else ""
        wanted = f"a whole number of at least {at_least}{limit}{choice}"
        raise ArgumentError(f"{name} must be {wanted}, got {short_repr(value)}")
    return int(value)


def require_number(name: str, value: object, wanted: str, fits: Callable[[float], bool]) -> int | float:
    """Return an argument as a number of Python's, or raise an `ArgumentError` if it is none, or doesn't fit.

    Args:
        name: The argument's name.
        value: The argument's value.
        wanted: What it must be, for the message.
        fits: True of the numbers that it may be.

    Example:
        >>> require_number("ema_momentum", 0.9, "a share from 0 to 1", lambda share: 0 <= share <= 1)
        0.9
    """
    number = value.item() if isinstance(value, (np.integer, np.floating)) else value
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not fits(number):
        raise ArgumentError(f"{name} must be {wanted}, got {short_repr(value)}")
    return number


def require_flag(name: str, value: object) -> bool:
    """Return an argument as True or False, or raise an `ArgumentError` if it is neither. None is False."""
    number = isinstance(value, (int, np.integer)) and value in (0, 1)
    if value is None or isinstance(value, np.bool_) or number:
        return bool(value)
    raise ArgumentError(f"{name} must be True or False, got {short_repr(value)}")


def require_choice(name: str, value: object, *choices: object) -> None:
    """Raise an `ArgumentError` for an argument that is none of some names, numbers, True, False or None."""
    if not isinstance(value, (str, bool, int, type(None))) or value not in choices:
        *first, last = map(repr, choices)
        raise ArgumentError(f"{name} must be {', '.join(first)} or {last}, got {short_repr(value)}")


def require_path(name: str, value: object) -> None:
    """Raise an `ArgumentError` for an argument that is no path of a file or a folder."""
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value) or "\0" in str(value):
        raise ArgumentError(f"{name} must be a path, got {short_repr(value)}")


def short_repr(value: object) -> str:
    """Return an argument's value for a message, on one line and not too long.

    Example:
        >>> short_repr("x"), len(short_repr("x" * 1000))
        ("'x'", 80)
    """
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:76]} ..."


class NotPicklableError(TpufitError, TypeError):
    """A model can't be pickled or copied: save and load it instead."""


class NotCompiledError(TpufitError, RuntimeError):
    """A method needs something that `compile` has not been given yet."""


class DataError(TpufitError, ValueError):
    """The data are empty, of unequal lengths or of a form that can't be batched."""


class LabelError(DataError):
    """A class label lies outside the classes that the module tells apart."""


class BatchError(DataError, RuntimeError):
    """The module or the loss can't take a batch as it is. PyTorch's own error, if there is one, is its `__cause__`."""


class CacheError(DataError):
    """A cache of samples can't be made or read."""


class CacheMismatchError(CacheError):
    """A cache was made of another source, with another transform, or as another version."""


class CacheDamagedError(CacheError):
    """A file of a cache is not what was written: cut short, altered, or another one."""


class CacheDiskFullError(CacheError):
    """There is no room for the rest of a cache. Finished files are kept.

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
    """Another warm-up is at work on the same cache."""


class WeightsError(TpufitError, ValueError):
    """Weights don't fit the module, or the file is not one of weights."""


class CheckpointError(TpufitError, RuntimeError):
    """A checkpoint can't be written, read or resumed from."""


class CheckpointMissingError(CheckpointError):
    """There is no checkpoint where one was named."""


class CheckpointDamagedError(CheckpointError):
    """A file of a checkpoint is not what was written: cut short, altered or missing."""


class CheckpointMismatchError(CheckpointError):
    """A checkpoint is of another net, optimizer or data than those to be trained."""


class CheckpointNotWrittenError(CheckpointError):
    """A checkpoint can't be written: there is no room, no permission, or its weights aren't finite."""


class CheckpointBusyError(CheckpointError):
    """Another process, or another callback of this one, writes into the same folder."""


class StartError(TpufitError, RuntimeError):
    """The device runtime can't be started as asked."""


class CoresError(StartError):
    """A number of cores that this host doesn't have, or that this process can't change to."""


class VersionError(StartError):
    """The installed versions of torch and torch_xla don't belong together."""


class DeviceBusyError(StartError):
    """Another process holds the TPU."""


class HostError(TpufitError, RuntimeError):
    """The hosts of a pod are not at one, or one of them is gone."""


class DeviceError(TpufitError, RuntimeError):
    """A step failed on the device, while it was compiled or run; torch_xla's error is its `__cause__`."""


class OutOfMemoryError(DeviceError):
    """The device has no room for a step: its weights, optimizer state, batch and activations."""


class DeviceLostError(DeviceError):
    """The device is gone, or in a state of error that only a restart ends."""


class PartitionError(DeviceError):
    """XLA's partitioner could not divide a step among the cores."""


class PlacementError(TpufitError, RuntimeError):
    """A tensor of the module or the optimizer can't be moved to the device as it is."""


class ReplayError(TpufitError, RuntimeError):
    """`jit_compile=True` was asked for, but the step can't be replayed."""


class StrictError(TpufitError, RuntimeError):
    """`fit(strict=True)` met a host read, an operation that runs on the host, or a new graph after the first epoch."""


class StateLostError(TpufitError, RuntimeError):
    """A step failed on the device, and the weights are lost with it: it was to compute them, or had consumed them."""


class BusyError(TpufitError, RuntimeError):
    """Another thread of this process uses the device, and can't let this one in."""


class ForkedError(TpufitError, RuntimeError):
    """A forked process asked for the device of the process that it comes from, whose threads it doesn't have."""


class CallbackError(TpufitError, RuntimeError):
    """A callback's hook raised; the original error is its `__cause__`."""


class TrackerError(TpufitError, RuntimeError):
    """An experiment tracker can't be reached, or refuses to begin a run."""


class PreflightError(TpufitError, RuntimeError):
    """A step can't be compiled for a TPU that isn't there: it can't be traced, or the compiler is missing or failed."""
