"""What to say when the device waits for data more than it works."""

from __future__ import annotations

from ..utils.hardware import cpus

# From this share of an epoch on it is said, once in a fit; in an epoch that waited less than a second it is nothing.
WORTH_SAYING = 0.2
_SECONDS = 1.0


def advice(waited: float, elapsed: float) -> str | None:
    """What to do about an epoch that waited for its data, or None if it hardly did.

    Args:
        waited: For how long the loop had no batch, in seconds.
        elapsed: How long the epoch took, in seconds.

    Example:
        >>> advice(waited=0.1, elapsed=10.0) is None
        True
        >>> advice(waited=9.0, elapsed=10.0)[:50]
        'the device waited for data 90% of the epoch: decod'
    """
    if waited < _SECONDS or waited / elapsed < WORTH_SAYING:
        return None
    return (
        f"the device waited for data {waited / elapsed:.0%} of the epoch: decoding and augmenting take longer than the "
        f"steps. Let workers do it (DataLoader(..., num_workers={cpus()}) on this machine), or do it once: "
        "tpufit.data.CachedDataset keeps ready samples, with copies=k in k augmented variants, and its "
        "device_transform augments on the device. A larger batch_size helps where the steps are small"
    )
