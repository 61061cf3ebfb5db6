"""Makes the samples of a cache, each from its own random numbers, so that it is the same in any process."""

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import ArgumentError, DataError, require_whole
from ...utils.random import RNGState, step_seed
from ...utils.user_code import warn
from .fingerprint import fingerprint
from .manifest import Manifest, plan_files
from .schema import Field, check_same_structure, flatten
from .shards import write_shard

_INTERVAL = 0.1  # seconds between two progress reports: a report per row would keep the parent of many workers busy


@dataclass(frozen=True)
class Maker:
    """Makes samples from a source and a transform. Sent to the worker processes."""

    source: Any  # the user's map-style dataset
    transform: Callable[[Any], Any] | None  # from an item to a sample
    seed: int  # the random numbers' seed

    def sample(self, index: int, copy: int) -> tuple[Any, dict[str, Tensor]]:
        """Make a sample from random numbers that depend on (seed, index, copy), and flatten it: see `flatten`.

        Raises:
            DataError: The source or the transform raised an error, or returned a value that a cache can't store.
        """
        seed = step_seed(step_seed(self.seed, copy), index)
        random.seed(seed)
        np.random.seed(seed % (1 << 32))
        torch.default_generator.manual_seed(seed)
        try:
            made = self.source[index]
            if self.transform is not None:
                made = self.transform(made)
        except Exception as error:
            raise DataError(f"sample {index} could not be made: {type(error).__name__}: {error}") from error
        return flatten(made, index)

    def build(self, folder: Path, manifest: Manifest, number: int, report: Callable[[int], None]) -> None:
        """Make a file of a cache, and periodically `report` the number of rows made since the last report.

        Raises:
            DataError: A sample can't be made, or its form differs from the first sample's.
            OSError: The file can't be written.
        """
        span = manifest.span(number)
        columns = {field.name: torch.empty((len(span), *field.shape), dtype=field.dtype) for field in manifest.fields}
        reported = 0
        last_report = monotonic()
        for position, row in enumerate(span):
            copy, index = divmod(row, manifest.rows)
            structure, leaves = self.sample(index, copy)
            check_same_structure(manifest.structure, manifest.fields, structure, leaves, index)
            for name, column in columns.items():
                column[position] = leaves[name]
            if monotonic() - last_report > _INTERVAL:
                report(position + 1 - reported)
                reported = position + 1
                last_report = monotonic()
        write_shard(folder, manifest, number, columns)
        report(len(span) - reported)


def check_arguments(source: Any, copies: int, workers: int | str, seed: int, shard_mb: float) -> None:
    """Check `CachedDataset`'s arguments, before any sample is made."""
    for name in ("__len__", "__getitem__"):
        if not hasattr(source, name):
            raise ArgumentError(f"source must be a map-style dataset, but {type(source)} has no {name}")
    require_whole("copies", copies)
    require_whole("seed", seed, 0)
    if workers != "auto":
        require_whole("workers", workers, 0)
    if not shard_mb > 0:
        raise ArgumentError(f"shard_mb must be a positive number of MiB, got {shard_mb!r}")
    if not len(source):
        raise DataError("source is empty: it has no samples")


def plan_manifest(maker: Maker, copies: int, version: str, shard_mb: float, again: bool) -> Manifest:
    """Plan a cache of the samples, in files of at most `shard_mb` MiB.

    With `again`, some samples are made twice and compared; used if there is no cache yet.
    """
    rows = len(maker.source)
    structure, leaves = maker.sample(0, copy=0)
    fields = tuple(Field(name, leaf.dtype, tuple(leaf.shape)) for name, leaf in leaves.items())
    digest: str | None = _probe(maker, rows)
    if again and _probe(maker, rows) != digest:
        digest = None
        why = "it uses random numbers other than `random`'s, numpy.random's and torch's, which are seeded"
        what = "a sample differs when it is made twice"
        warn(f"{what}: {why}. Remade files will differ")
    source = fingerprint(maker.source)
    transform = fingerprint(maker.transform)
    sizes = plan_files(rows * copies, sum(field.row_bytes for field in fields), shard_mb)
    return Manifest(rows, copies, maker.seed, version, source, transform, digest, structure, fields, *sizes)


def _probe(maker: Maker, rows: int) -> str:
    """Hash the first, the middle and the last sample."""
    digest = hashlib.sha256()
    for index in (0, rows // 2, rows - 1):
        for name, leaf in maker.sample(index, copy=0)[1].items():
            digest.update(f"{name} {leaf.dtype} {tuple(leaf.shape)}".encode())
            digest.update(leaf.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


@contextmanager
def isolated() -> Iterator[None]:
    """Return a context to make samples in as a worker would: with one thread, and the random state restored."""
    threads = torch.get_num_threads()
    draws = RNGState.now()
    torch.set_num_threads(1)  # splitting a sum among threads changes its last digits
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        draws.restore()
