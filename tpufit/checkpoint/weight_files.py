"""Weights in one file: safetensors, written beside their target and committed by rename. Nothing is ever unpickled."""

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

NO_PICKLES = "Only safetensors are read; a pickle made by torch.save is not, because it could run any code"
_SUFFIX = ".safetensors"
_PICKLES = (".pt", ".pth", ".ckpt", ".bin", ".pkl")  # of torch.save


def write_weights(path: str | os.PathLike[str], weights: Mapping[str, Tensor], finite: Collection[str] = ()) -> None:
    """Write tensors to a file or URL, `*.safetensors`. It is whole or not there, whenever the process may die.

    Missing folders are made; a file there is replaced. Tensors on the device come one by one. A tied tensor is stored
    once, with its other names under `tied` in the metadata.

    Raises:
        ArgumentError: The path has another suffix.
        NotFiniteError: A weight that `finite` names has NaN or infinities.
        OSError: The file system refused.
    """
    where = weights_path(path)
    stored, metadata = untied(weights)
    with arriving(stored, finite) as values:
        if not is_first():  # of a pod only process 0 writes
            return
        mirror = Mirror(where, file=True)
        mirror.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(mirror.path) as draft:
            write(draft, stored, metadata, values)
        mirror.push()


class NotFiniteError(ValueError):
    """A weight has NaN or infinities; the message is its name."""


@contextmanager
def arriving(
    weights: Mapping[str, Tensor], finite: Collection[str] = (), others: Iterable[Tensor] = ()
) -> Iterator[Iterator[Tensor]]:
    """Give an iterator over the values of tensors, in their order, which come from the device one by one.

    On a pod all hosts take part in that, so that on leaving the rest comes too. The iterator raises `NotFiniteError`
    for a weight that `finite` names. The `others` come after the weights.
    """
    fetching = fetch_each([*weights.values(), *others], "checkpoint")

    def checked() -> Iterator[Tensor]:
        for name in weights:
            value = next(fetching)
            if name in finite and not bool(value.isfinite().all()):
                raise NotFiniteError(name)
            yield value
            del value  # before the next one comes
        yield from fetching

    try:
        yield checked()
    finally:
        deque(fetching, maxlen=0)  # unlike a loop it keeps none while the next one comes


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], values: Iterator[Tensor]) -> None:
    """Write a file of tensors, as `untied` gives them, see `write_tensors`; of those on the device one by one.

    The values are what `arriving` gives, the metadata the file's own words about itself.
    """
    if are_here(tensors.values()):
        write_tensors(path, dict(zip(tensors, values, strict=False)), metadata)
    else:
        write_one_by_one(path, tensors, values, metadata)


def are_here(tensors: Iterable[Tensor]) -> bool:
    """True if all tensors are on the host."""
    return all(tensor.device.type == "cpu" for tensor in tensors)


def read_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file, by tpufit or by others, by name; tied ones under each of their names.

    Raises:
        ArgumentError: The path has another suffix, or is a folder.
        FileNotFoundError, PermissionError: There is no such file, or it may not be read.
        WeightsError: The file is not a safetensors file.
    """
    suffix = Path(path).suffix
    if suffix in _PICKLES:
        part = "['state_dict']" if suffix == ".ckpt" else ""
        raise ArgumentError(
            f"weights are kept as safetensors: pass a path ending in '{_SUFFIX}', got {str(path)!r}. "
            "If torch.save made it: "
            f"model.load_state_dict(torch.load({str(path)!r}, map_location='cpu', weights_only=True){part})"
        )
    if Path(path).is_dir():
        raise ArgumentError(
            f"weights are kept as safetensors: pass a path ending in '{_SUFFIX}', and {str(path)!r} is a folder. "
            f"tpufit.load({str(path)!r}, net) loads what model.save or ModelCheckpoint keeps there"
        )
    mirror = Mirror(weights_path(path), file=True)
    mirror.pull()
    source = mirror.path
    if not source.is_file():
        raise FileNotFoundError(f"no weights at {path}")
    source.open("rb").close()  # safetensors says of a file that may not be read that there is none
    try:
        with safetensors.safe_open(source, framework="pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
            tied = json.loads((file.metadata() or {}).get("tied", "{}"))
        return weights | {name: weights[owner] for name, owner in tied.items() if owner in weights}
    except (safetensors.SafetensorError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(f"{source} is not a safetensors file, or it is damaged ({error}). {NO_PICKLES}") from error


def untied(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the content of a file of weights: each tensor once, and the metadata with other names of tied ones.

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
    return widest_first(stored), {"format": "pt", "tied": json.dumps(tied)}


def widest_first(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the same tensors in the order in which a file can hold them."""
    return dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))


def weights_path(path: str | os.PathLike[str]) -> str:
    """Check that a path is one of a weights file; the error names the one format there is.

    Example:
        >>> weights_path("runs/best.safetensors")
        'runs/best.safetensors'
    """
    if Path(path).suffix != _SUFFIX:
        raise ArgumentError(f"weights are kept as safetensors: pass a path ending in '{_SUFFIX}', got {str(path)!r}")
    return os.fspath(path)
