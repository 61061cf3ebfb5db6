"""`CachedDataset`: samples made once and stored in a few large files, from which batches are read at memory speed.

A cache is a folder: the manifest `meta.json`, and `shard-00000-of-00016.safetensors`, ... A file exists only when it is
complete, so a killed warm-up resumes with the missing files. Nothing in a folder is ever unpickled.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset

from ...errors import ArgumentError, CacheDamagedError, CacheError, CacheMismatchError, UnknownNameError, say_count
from ...hosts import is_first
from ...utils.terminal import say
from ...utils.urls import Mirror
from .build import Workers, build, check_room, lock_cache
from .maker import Maker, check_arguments, isolated, plan_manifest
from .manifest import Manifest
from .readers import InMemory, Mapped
from .schema import unflatten
from .shards import Shard

Mode = Literal["mmap", "ram"]

_READERS: dict[str, type[Mapped]] = {"mmap": Mapped, "ram": InMemory}


@dataclass(frozen=True)
class CacheInfo:
    """The contents of a cache.

    Attributes:
        rows: The number of samples.
        copies: The number of variants of each sample.
        files: The number of files in the complete cache.
        missing: The number of missing files.
        bytes: The size of the samples in the complete cache.
        path: The cache's folder.
        fingerprint: A hash of the cache's origin and layout.
    """

    rows: int
    copies: int
    files: int
    missing: int
    bytes: int
    path: Path
    fingerprint: str


class CachedDataset(Dataset[Any]):
    """A map-style dataset that makes its samples once, in several processes, then reads them from a few large files.

    A sample is a tensor, an array, a number, or a nest of tuples, lists and dicts of them, with a fixed shape and dtype
    for each leaf. Dtypes don't change, so store images as uint8 and normalize them on the device.

    While a sample is made, the random numbers of `random`, NumPy and torch depend only on (seed, index, copy), so the
    sample doesn't depend on the process or the time. `copies=k` stores k random variants of each sample, and epoch e
    gets variant `e % k`.

    The cache records its origin: the source's length, the name, code and settings of the source's class and of the
    transform, and three samples. It can't see the code of installed packages or the values of globals; change `version`
    when they change. A cache of another origin is an error: it is neither remade nor read.

    A file's size and header are checked when it is opened, and all its rows when the first row is read. So no damaged
    sample is ever returned; this costs each process one pass over the files.

    Args:
        source: A map-style dataset: any object with `__len__` and `__getitem__`. None reads a finished cache, as `open`
            does.
        cache_dir: The cache's folder, created if necessary. Each cache needs its own.
        transform: A function from an item of the source to the stored sample (default: the item itself). For worker
            processes it must be defined in a module, or in a script whose work is under `if __name__ == "__main__":`.
            Otherwise this process makes the samples.
        device_transform: A function from a batch to the model's input, which runs on the device inside the step's
            graph: to cast, normalize, flip or crop (default: none). It doesn't affect the cache.
        version: The samples' version (default `"1"`). Change it when the samples change for a reason that the cache
            can't see.
        seed: The seed of the random numbers (default 0).
        copies: The number of stored variants of each sample (default 1).
        shard_mb: The largest size of a new cache's files, in MiB (default 256). Each worker has a file in memory.
        workers: The number of processes that make samples: `"auto"` (default) starts one per CPU, 0 uses this process.
        mode: `"mmap"` (default) reads memory-mapped files, which the system caches in free memory; `"ram"` copies them
            into the process's memory at the first read.
        ordered: True (default) keeps the order of a batch's rows. False sorts them, which is faster; each core then
            gets adjacent rows of the source.

    Attributes:
        source: The source; None for a cache opened without it.
        device_transform: As given.
        mode: As given.
        ordered: As given.

    Raises:
        ArgumentError: An argument is out of range.
        DataError: The source is empty, or a sample can't be made or stored.
        CacheMismatchError: The folder has a cache of another origin.

    Example:
        >>> import tempfile, torch
        >>> class Squares(torch.utils.data.Dataset):
        ...     def __len__(self):
        ...         return 5
        ...     def __getitem__(self, index):
        ...         return torch.tensor([index, index**2], dtype=torch.uint8), index % 2
        >>> folder = tempfile.TemporaryDirectory()
        >>> data = CachedDataset(Squares(), folder.name)
        >>> data.warm_up(progress=False)
        >>> data.get_batch([3, 1])
        (tensor([[3, 9],
                [1, 1]], dtype=torch.uint8), tensor([1, 1]))
        >>> CachedDataset.open(folder.name)[2]
        (tensor([2, 4], dtype=torch.uint8), tensor(0))
        >>> folder.cleanup()
    """

    def __init__(
        self,
        source: Any,
        cache_dir: str | os.PathLike[str],
        transform: Callable[[Any], Any] | None = None,
        *,
        device_transform: Callable[[Any], Any] | None = None,
        version: str = "1",
        seed: int = 0,
        copies: int = 1,
        shard_mb: float = 256,
        workers: Workers = "auto",
        mode: Mode = "mmap",
        ordered: bool = True,
    ) -> None:
        if mode not in _READERS:
            raise UnknownNameError("mode", mode, _READERS)
        self.source = source
        self.device_transform = device_transform
        self.mode = mode
        self.ordered = ordered
        self._place = cache_dir
        mirror = Mirror(cache_dir, kept=True)
        mirror.pull()
        self._path = mirror.path
        self._workers = workers
        self._maker: Maker | None = None
        self._reader: Mapped | None = None
        self._opening = threading.Lock()
        self._epoch = 0
        found = Manifest.read(self._path)
        if source is None:
            if found is None:
                raise CacheError(f"{self._path} has no cache: there is no meta.json. Open the folder that contains it")
            self._manifest = found
            self._open()
            return
        check_arguments(source, copies, workers, seed, shard_mb)
        self._maker = Maker(source, transform, seed)
        with isolated():
            self._manifest = plan_manifest(self._maker, copies, version, shard_mb, again=found is None)
        if found is not None:
            self._adopt(found)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        device_transform: Callable[[Any], Any] | None = None,
        mode: Mode = "mmap",
        ordered: bool = True,
    ) -> CachedDataset:
        """Open a finished cache for reading, without its source and transform; nothing is written.

        Args:
            path: The cache's folder, or its URL (`"gs://..."`): a local copy is kept in `~/.cache/tpufit`.
            device_transform: As in the constructor.
            mode: As in the constructor.
            ordered: As in the constructor.

        Raises:
            CacheError: There is no cache, or it is incomplete.
            CacheDamagedError: A file is truncated or was replaced.
        """
        return cls(None, path, device_transform=device_transform, mode=mode, ordered=ordered)

    def __len__(self) -> int:
        return self._manifest.rows

    def __getitem__(self, index: int) -> Any:
        """Return a sample, as tensors: the variant of the epoch last passed to `set_epoch`."""
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return several samples, for a `DataLoader`, which requests a batch at once."""
        batch = self._gather(np.asarray(indices), self._epoch, ordered=True)
        return [tree_map(lambda column, row=row: column[row], batch) for row in range(len(indices))]

    def set_epoch(self, epoch: int) -> None:
        """Choose the variant that indexing returns, with `copies` above 1. `fit` does so itself.

        Args:
            epoch: The epoch's number, from 0.

        Source: `torch.utils.data.distributed.DistributedSampler.set_epoch`.
        """
        self._epoch = epoch

    def get_batch(self, indices: Sequence[int] | NDArray[np.integer[Any]], epoch: int = 0) -> Any:
        """Return the samples of a batch, collated.

        Args:
            indices: The samples' indices, from 0, shape `(batch,)`.
            epoch: The epoch's number (default 0): variant `epoch % copies` is read.

        Returns:
            A sample's nest, with leaves of shape `(batch, *shape)` that share no memory. The rows are in the order of
            the indices, or with `ordered=False` of the source.

        Raises:
            IndexError: There is no such sample.
            CacheDamagedError: A file is damaged.
        """
        return self._gather(np.asarray(indices), epoch, self.ordered)

    def warm_up(self, progress: bool = True, *, repair: bool = False) -> None:
        """Make the missing files. No TPU is needed; finished files are kept, however the warm-up ends.

        Without this call the files are made when the first sample is read.

        Args:
            progress: True (default) to show a bar.
            repair: True checks all files first, and remakes damaged files (default False).

        Raises:
            DataError: A sample can't be made, or its form differs from the first sample's.
            CacheBusyError: Another warm-up of this cache is running.
            CacheDiskFullError: The disk is full.
            CacheError: The folder can't be written to, or a worker died.
            ArgumentError: Source or transform can't be sent to the requested workers.
        """
        if self._maker is None:
            raise CacheError("a cache opened without its source can't be warmed up: use CachedDataset(source, ...)")
        damaged = self.verify() if repair else []
        if not damaged and Manifest.read(self._path) and not self._manifest.list_missing(self._path):
            return
        with lock_cache(self._path):
            found = Manifest.read(self._path)
            if found is not None:  # perhaps written by another process since
                self._adopt(found)
            for name in damaged:
                (self._path / name).unlink(missing_ok=True)
            check_room(self._path, self._manifest)
            if found is None:
                self._manifest.write(self._path)
            build(self._maker, self._path, self._manifest, self._workers, progress)
        if is_first():
            Mirror(self._place, kept=True).push()
        self._reader = None

    def verify(self) -> list[str]:
        """Compare the existing files with their checksums.

        Returns:
            The names of the damaged files.

        Example:
            >>> import tempfile, torch
            >>> folder = tempfile.TemporaryDirectory()
            >>> data = CachedDataset([torch.zeros(3)] * 5, folder.name, workers=0)
            >>> data.warm_up(progress=False)
            >>> data.verify()
            []
            >>> folder.cleanup()
        """
        damaged = []
        for number in sorted(set(range(self._manifest.files)).difference(self._manifest.list_missing(self._path))):
            try:
                Shard(self._path, self._manifest, number).check()
            except CacheDamagedError:
                damaged.append(self._manifest.name(number))
        return damaged

    def info(self) -> CacheInfo:
        """Return facts about the cache's contents.

        Example:
            >>> import tempfile, torch
            >>> folder = tempfile.TemporaryDirectory()
            >>> info = CachedDataset([torch.zeros(3)] * 5, folder.name, workers=0, copies=2).info()
            >>> info.rows, info.copies, info.bytes
            (5, 2, 120)
            >>> folder.cleanup()
        """
        manifest = self._manifest
        size = manifest.rows * manifest.copies * manifest.row_bytes
        missing = len(manifest.list_missing(self._path))
        return CacheInfo(
            manifest.rows, manifest.copies, manifest.files, missing, size, self._path, manifest.fingerprint
        )

    def __repr__(self) -> str:
        return f"CachedDataset({say_count(len(self), 'sample')}, {str(self._path)!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_reader", "_opening")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _reader=None, _opening=threading.Lock())

    def _adopt(self, found: Manifest) -> None:
        """Use the manifest of an existing cache, which may be split into other files."""
        changed = found.differences(self._manifest)
        if changed:
            what = f"{self._path} has a cache of another origin. It differs in: {'; '.join(changed)}"
            cure = (
                "Use another cache_dir for the new samples, or delete the folder; CachedDataset.open reads it unchanged"
            )
            raise CacheMismatchError(f"{what}. {cure}")
        self._manifest = found

    def _gather(self, indices: NDArray[Any], epoch: int, ordered: bool) -> Any:
        if indices.ndim != 1 or (indices.size and indices.dtype.kind not in "iu"):
            raise ArgumentError(f"indices must be whole numbers in one dimension, got {indices.dtype} {indices.shape}")
        if indices.size and (indices.min() < 0 or indices.max() >= len(self)):
            wrong = indices[(indices < 0) | (indices >= len(self))][0]
            raise IndexError(f"there is no sample {wrong}: the cache has {len(self)}, from 0 to {len(self) - 1}")
        rows = indices.astype(np.int64) + epoch % self._manifest.copies * self._manifest.rows
        return unflatten(self._manifest.structure, (self._reader or self._open()).read(rows, ordered))

    def _open(self) -> Mapped:
        with self._opening:
            if self._reader is None:
                absent = self._manifest.list_missing(self._path)
                if absent and self._maker is None:
                    some = f"{len(absent)} of the {self._manifest.files} files in {self._path}"
                    cure = "finish the warm-up, or copying the cache, first"
                    raise CacheError(f"{some} are missing, such as {self._manifest.name(absent[0])}: {cure}")
                if absent:
                    what = f"{self._path}: making {len(absent)} of {self._manifest.files} files of samples"
                    say(f"{what} before the first can be read. warm_up() does it ahead of time")
                    self.warm_up(progress=False)
                shards = [Shard(self._path, self._manifest, number) for number in range(self._manifest.files)]
                self._reader = _READERS[self.mode](self._manifest, shards)
            return self._reader
