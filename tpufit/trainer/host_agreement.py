"""What the hosts of a pod agree on before `fit` starts and before each group of steps."""

import zlib
from collections.abc import Callable, Iterator

import torch

from ..backend import Cores, CoresArgument
from ..checkpoint import Checkpoint
from ..errors import CheckpointMissingError, HostError
from ..hosts import all_gather, all_reduce_max, broadcast, note_place
from ..runtime import may_have_hosts
from ..step import DeviceGroup, Engine


def start_and_find(
    engine: Engine, cores: CoresArgument, find: Callable[[], Checkpoint | None]
) -> tuple[Cores, Checkpoint | None]:
    """Start the cores for `fit`, and find the checkpoint to resume from, which process 0 sends to all hosts.

    Raises:
        CheckpointError: Process 0 has no checkpoint, or a damaged checkpoint.
    """
    checkpoint = None
    fault = None
    try:
        checkpoint = find()
    except CheckpointMissingError as error:
        if not may_have_hosts():
            raise
        fault = error  # process 0's folder may have the checkpoint
    now = engine.start(cores, f"fit(cores={cores!r})")
    if now.hosts > 1:
        checkpoint, fault = broadcast((checkpoint, fault))
    if fault is not None:
        raise fault
    return now, checkpoint


def keep_in_lockstep(
    groups: Iterator[list[DeviceGroup]], place: str, per_host: bool, compared: bool = False
) -> Iterator[list[DeviceGroup]]:
    """Yield groups of batches as long as every host has a group, and check that their shapes are equal.

    Args:
        per_host: True if the hosts may have different numbers of batches; surplus batches are left out.
        compared: True if `host_consistency.compare_hosts` has compared the shapes of all batches (default False);
            comparing each group takes half a millisecond.

    Raises:
        HostError: The hosts have different numbers of batches, or batches of different shapes.
    """
    done = 0
    while True:
        note_place(f"{place}, batch {done + 1}")
        group = next(groups, [])
        most = fewest = len(group)
        if not compared:
            most, fewest = _compare_batches(group, place, done, per_host)
        if group := group[:fewest]:
            yield group
        if most != fewest or not group:
            return
        done += len(group)


def _compare_batches(group: list[DeviceGroup], place: str, done: int, per_host: bool) -> tuple[int, int]:
    """Return the largest and the smallest number of batches that a host has in its next group; check their shapes."""
    rows = sum(batch.rows for batch in group)
    # Shapes of rows, not of batches: a host may have fewer rows of a short batch.
    shapes = [[(tuple(shape[1:]), dtype) for shape, dtype in batch.forms[0].tensors] for batch in group]
    form = zlib.crc32(repr(shapes).encode())
    # The maximum of negated values is the minimum, so one reduction finds both.
    most, fewest, largest, smallest, *forms = all_reduce_max([len(group), -len(group), rows, -rows, form, -form])
    most = int(most)
    fewest = int(-fewest)
    smallest = int(-smallest)
    if most != fewest and not per_host:
        raise HostError(
            f"after {done} batches of this pass ({place}) this host has {len(group)} more, but there are {fewest} to "
            f"{most} across the hosts: give all hosts the same data, or use tpufit.data.PerHost for different data"
        )
    if most == fewest and largest != smallest:
        raise HostError(
            f"batch {done + 1} ({place}) has {rows} rows on this host, but {smallest} to {largest:g} across "
            "the hosts. Make all batches of one size, e.g. with drop_last=True"
        )
    if most == fewest and sum(forms):
        raise HostError(
            f"batch {done + 1} ({place}) has rows of other shapes on other hosts: "
            + ", ".join(f"process {index}: {rows}" for index, rows in enumerate(all_gather(_describe(shapes))))
            + ". Pad all rows to one fixed length, because no host sees the lengths on other hosts"
        )
    return most, fewest


def _describe(batches: list[list[tuple[tuple[int, ...], torch.dtype]]]) -> str:
    first = batches[0] if batches else []
    return " and ".join(f"{str(dtype).removeprefix('torch.')} {shape}" for shape, dtype in first)
