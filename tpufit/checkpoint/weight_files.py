"""Weights in a file: safetensors files are written atomically, by a rename; other formats are only read."""

import json
import os
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import safetensors
from torch import Tensor

from ..errors import ArgumentError, WeightsError
from ..hosts import is_first
from ..runtime import fetch_each
from ..utils.files import replacing, write_one_by_one, write_tensors
from ..utils.urls import Mirror
from .torch_files import SUFFIXES, read_torch_file

OTHERS = f"model.load_weights also reads files of torch.save, if they end in {' or '.join(SUFFIXES)}"
_SUFFIX = ".safetensors"


def write_weights(path: str | os.PathLike[str], weights: Mapping[str, Tensor], finite: Collection[str] = ()) -> None:
    """Write tensors to a file or URL, `*.safetensors`, atomically, even if the process is killed.

    Creates missing folders, and replaces an existing file. Tensors on the device are copied one by one. A tied tensor
    is stored once, with its other names under `tied` in the metadata.

    Raises:
        ArgumentError: The path has another suffix.
        NotFiniteError: A weight that `finite` lists has NaN or infinities.
        OSError: The write failed.
    """
    where = check_weights_path(path)
    stored, metadata = untie(weights)
    with fetch_checked(stored, finite) as values:
        if not is_first():  # on a pod only process 0 writes
            return
        mirror = Mirror(where, file=True)
        mirror.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(mirror.path) as draft:
            write(draft, stored, metadata, values)
        mirror.push()


class NotFiniteError(ValueError):
    """A weight has NaN or infinities; the message says which."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} has NaN or infinities")


@contextmanager
def fetch_checked(
    weights: Mapping[str, Tensor], finite: Collection[str] = (), others: Iterable[Tensor] = ()
) -> Iterator[Iterator[Tensor]]:
    """Return a context with an iterator over the values of tensors, in order, copied from the device one by one.

    On a pod all hosts take part in the copying, so leaving the context fetches the remaining values. The iterator
    raises `NotFiniteError` for a weight that `finite` lists. The `others` follow the weights.
    """
    fetching = fetch_each([*weights.values(), *others], "checkpoint")

    def check_parts() -> Iterator[Tensor]:
        for name in weights:
            value = next(fetching)
            if name in finite and not bool(value.isfinite().all()):
                raise NotFiniteError(name)
            yield value
            del value  # before the next value is fetched
        yield from fetching

    try:
        yield check_parts()
    finally:
        deque(fetching, maxlen=0)  # unlike a loop, this keeps no value while it fetches the next


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], values: Iterator[Tensor]) -> None:
    """Write a file of tensors from `untie`, see `write_tensors`; tensors on the device one by one.

    The values come from `fetch_checked`; the metadata is stored in the file.
    """
    if are_on_host(tensors.values()):
        write_tensors(path, dict(zip(tensors, values, strict=False)), metadata)
    else:
        write_one_by_one(path, tensors, values, metadata)


def are_on_host(tensors: Iterable[Tensor]) -> bool:
    """True if all tensors are on the host."""
    return all(tensor.device.type == "cpu" for tensor in tensors)


def read_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read the tensors of any safetensors file by name; tied tensors under each of their names.

    A file of `torch.save` is recognized by its suffix, see `read_torch_file`.

    Raises:
        ArgumentError: The path has another suffix, or is a folder.
        FileNotFoundError, PermissionError: There is no such file, or it isn't readable.
        WeightsError: The file isn't a safetensors file; or it is a file of `torch.save` without weights.
    """
    pickled = Path(path).suffix in SUFFIXES
    if Path(path).is_dir():
        raise ArgumentError(
            f"weights are stored as safetensors: expected a path ending in '{_SUFFIX}', got the folder {str(path)!r}. "
            f"If model.save or ModelCheckpoint wrote it, call tpufit.load({str(path)!r}, net)"
        )
    mirror = Mirror(os.fspath(path) if pickled else check_weights_path(path), file=True)
    mirror.pull()
    source = mirror.path
    if not source.is_file():
        raise FileNotFoundError(f"no weights at {path}")
    source.open("rb").close()  # safetensors reports an unreadable file as missing
    if pickled:
        return read_torch_file(source, path)
    try:
        with safetensors.safe_open(source, framework="pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            tied = json.loads((file.metadata() or {}).get("tied", "{}"))
        return weights | {name: weights[owner] for name, owner in tied.items() if owner in weights}
    except (safetensors.SafetensorError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(f"{source} is not a safetensors file, or it is damaged ({error}). {OTHERS}") from error


def untie(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the content of a weights file: each tensor once, and metadata with the other names of tied tensors.

    The widest dtypes come first.
    """
    stored: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    names: dict[int, str] = {}
    for name, tensor in weights.items():
        owner = names.setdefault(id(tensor), name)
        if owner == name:
            stored[name] = tensor.contiguous()
        else:
            tied[name] = owner
    return sort_by_width(stored), {"format": "pt", "tied": json.dumps(tied)}


def sort_by_width(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sort tensors into a file's order, the widest dtypes first."""
    return dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))


def check_weights_path(path: str | os.PathLike[str]) -> str:
    """Check that a path has the suffix of a weights file.

    Example:
        >>> check_weights_path("runs/best.safetensors")
        'runs/best.safetensors'
    """
    if Path(path).suffix != _SUFFIX:
        raise ArgumentError(f"weights are stored as safetensors: pass a path ending in '{_SUFFIX}', got {str(path)!r}")
    return os.fspath(path)
