"""What the hosts of a pod do together before each group of steps."""

from collections.abc import Iterator

from ..errors import HostError
from ..runtime import agree, at
from ..step import DeviceBatch


def in_step(groups: Iterator[list[DeviceBatch]], place: str, per_host: bool) -> Iterator[list[DeviceBatch]]:
    """Yield groups of batches as long as every host has one, and make sure that they are alike.

    Args:
        groups: This host's groups.
        place: The pass, for sentences.
        per_host: True if the hosts may have different numbers of batches; the rest is left out.

    Raises:
        HostError: The hosts have different numbers of batches, or of rows in one.
    """
    done = 0
    while True:
        at(f"{place}, batch {done + 1}")
        group = next(groups, [])
        rows = sum(batch.rows for batch in group)
        most, fewest, largest, smallest = agree([len(group), -len(group), rows, -rows])
        fewest, smallest = -fewest, -smallest
        if most != fewest and not per_host:
            raise HostError(
                f"after {done} batches of this pass ({place}) this host has {len(group)} more, and others have from "
                f"{fewest:g} to {most:g}: give all hosts the same data, or each its own by tpufit.data.PerHost"
            )
        if most == fewest and largest != smallest:
            raise HostError(
                f"batch {done + 1} ({place}) has {rows} rows on this host, and from {smallest:g} to {largest:g} on "
                "others. Make all batches of one size, e.g. by drop_last=True"
            )
        if group := group[: int(fewest)]:
            yield group
        if most != fewest or not group:
            return
        done += len(group)
