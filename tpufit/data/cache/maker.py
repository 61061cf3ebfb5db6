"""Making the samples of a cache: each from its own random numbers, so that it is the same whoever makes it."""

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

from ...errors import DataError
from ...utils.random import RNGState, step_seed
from .manifest import Manifest
from .schema import check_alike, flatten
from .shards import write_shard

_INTERVAL = 0.1  # seconds between two reports of the progress: one a row would keep the parent of many workers busy


@dataclass(frozen=True)
class Maker:
    """Makes samples from a source and a transform. It is sent to the worker processes.

    Attributes:
        source: The user's map-style dataset.
        transform: The function from an item to a sample, or None.
        seed: The seed of the random numbers.
    """

    source: Any
    transform: Callable[[Any], Any] | None
    seed: int

    def sample(self, index: int, copy: int) -> tuple[Any, dict[str, Tensor]]:
        """Make one sample, from random numbers that are a function of (seed, index, copy).

        Args:
            index: The number of the source's item.
            copy: The number of the variant.

        Returns:
            Its structure and its leaves, as `flatten` gives them.

        Raises:
            DataError: The source or the transform raised, or gave something that a cache can't keep.
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

    def build(self, folder: Path, manifest: Manifest, number: int, tell: Callable[[int], None]) -> None:
        """Make one file of a cache.

        Args:
            folder: The cache.
            manifest: The cache's manifest.
            number: The number of the file.
            tell: Called now and then with the number of rows made since the last call.

        Raises:
            DataError: A sample can't be made, or is unlike the first one.
            OSError: The file system refused.
        """
        span = manifest.span(number)
        columns = {field.name: torch.empty((len(span), *field.shape), dtype=field.dtype) for field in manifest.fields}
        told, spoken = 0, monotonic()
        for position, row in enumerate(span):
            copy, index = divmod(row, manifest.rows)
            structure, leaves = self.sample(index, copy)
            check_alike(manifest.structure, manifest.fields, structure, leaves, index)
            for name, column in columns.items():
                column[position] = leaves[name]
            if monotonic() - spoken > _INTERVAL:
                tell(position + 1 - told)
                told, spoken = position + 1, monotonic()
        write_shard(folder, manifest, number, columns)
        tell(len(span) - told)


def probe(maker: Maker, rows: int) -> str:
    """A hash of the first, the middle and the last sample.

    Args:
        maker: Makes them.
        rows: The number of samples.
    """
    digest = hashlib.sha256()
    for index in (0, rows // 2, rows - 1):
        for name, leaf in maker.sample(index, copy=0)[1].items():
            digest.update(f"{name} {leaf.dtype} {tuple(leaf.shape)}".encode())
            digest.update(leaf.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


@contextmanager
def alone() -> Iterator[None]:
    """Make samples in this process as a worker would: with one thread, and leaving its random numbers as they were."""
    threads, draws = torch.get_num_threads(), RNGState.now()
    torch.set_num_threads(1)  # how a sum is split among threads shows in its last digits
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        draws.restore()
