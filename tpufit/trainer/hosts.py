"""What the hosts of a pod do together before each group of steps."""

import zlib
from collections.abc import Callable, Iterator

import torch

from ..backend import Cores, CoresArgument
from ..checkpoint import Checkpoint
from ..errors import CheckpointMissingError, HostError
from ..hosts import all_gather, all_reduce_max, broadcast, note_place
from ..runtime import platform, settled, start
from ..step import DeviceGroup


def started_with(cores: CoresArgument, find: Callable[[], Checkpoint | None]) -> tuple[Cores, Checkpoint | None]:
    """Start the cores for `fit`, and find the checkpoint to resume from, which process 0 gives to all hosts.

    Raises:
        CheckpointError: Process 0 has none, or a damaged one.
    """
    before = settled()
    found = None
    fault = None
    try:
        found = find()
    except CheckpointMissingError as error:
        if platform() == "CPU" if before is None else before.hosts == 1:
            raise
        fault = error  # another host's folder may have it
    now = start(cores, f"fit(cores={cores!r})")
    if now.hosts > 1:
        found, fault = broadcast((found, fault))
    if fault is not None:
        raise fault
    return now, found


def in_lockstep(
    groups: Iterator[list[DeviceGroup]], place: str, per_host: bool, compared: bool = False
) -> Iterator[list[DeviceGroup]]:
    """Yield groups of batches as long as every host has one, and make sure that they have the same shapes.

    Args:
        per_host: True if the hosts may have different numbers of batches; the rest is left out.
        compared: True if all batches' shapes were compared before, see `consistency.check` (default False): to
            compare each takes half a millisecond.

    Raises:
        HostError: The hosts have different numbers of batches, or batches of different shapes.
    """
    done = 0
    while True:
        note_place(f"{place}, batch {done + 1}")
        group = next(groups, [])
        most = fewest = len(group)
        if not compared:
            most, fewest = _batches_of_hosts(group, place, done, per_host)
        if group := group[:fewest]:
            yield group
        if most != fewest or not group:
            return
        done += len(group)


def _batches_of_hosts(group: list[DeviceGroup], place: str, done: int, per_host: bool) -> tuple[int, int]:
    """Return the most and the fewest batches that a host has in its next group, all of the same shapes."""
    rows = sum(batch.rows for batch in group)
    # Of a row: in a short batch a host may have fewer of them.
    shapes = [[(tuple(shape[1:]), dtype) for shape, dtype in batch.forms[0].tensors] for batch in group]
    form = zlib.crc32(repr(shapes).encode())
    # The largest of negatives is the smallest: one reduction finds both ends of everything.
    most, fewest, largest, smallest, *forms = all_reduce_max([len(group), -len(group), rows, -rows, form, -form])
    most = int(most)
    fewest = int(-fewest)
    smallest = int(-smallest)
    if most != fewest and not per_host:
        raise HostError(
            f"after {done} batches of this pass ({place}) this host has {len(group)} more, and others have from "
            f"{fewest} to {most}: give all hosts the same data, or each its own by tpufit.data.PerHost"
        )
    if most == fewest and largest != smallest:
        raise HostError(
            f"batch {done + 1} ({place}) has {rows} rows on this host, and from {smallest} to {largest:g} on "
            "others. Make all batches of one size, e.g. by drop_last=True"
        )
    if most == fewest and sum(forms):
        raise HostError(
            f"batch {done + 1} ({place}) has rows of other shapes on other hosts: "
            + ", ".join(f"process {index}: {own}" for index, own in enumerate(all_gather(_described(shapes))))
            + ". Pad all rows to one length, as no host sees how long the others' are"
        )
    return most, fewest


def _described(groups: list[list[tuple[tuple[int, ...], torch.dtype]]]) -> str:
    return " and ".join(f"{str(dtype).removeprefix('torch.')} {shape}" for own in groups[:1] for shape, dtype in own)
