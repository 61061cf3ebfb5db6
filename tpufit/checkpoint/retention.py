"""Which checkpoints are deleted after a save: all but the newest, and the best by metric."""

from collections.abc import Mapping
from typing import Any

from .format import Score


def list_superseded(manifests: Mapping[str, Mapping[str, Any]], keep_last: int, keep_best: int) -> list[str]:
    """Return the names of the checkpoints to delete.

    Args:
        manifests: The manifests of all checkpoints by name, in order of writing.
        keep_last: The number of newest checkpoints to keep.
        keep_best: The number of best checkpoints to keep in addition. The newest may be among them.

    Example:
        >>> manifests = {"step-1": {"metric": None}, "step-2": {"metric": None}}
        >>> list_superseded(manifests, keep_last=1, keep_best=1)
        ['step-1']
    """
    names = list(manifests)
    kept = {*names[-keep_last:], *sort_by_metric(manifests)[:keep_best]}
    return [name for name in names if name not in kept]


def sort_by_metric(manifests: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the names of the checkpoints with a metric, the best first; among equal ones the earliest first."""
    metrics = {name: manifest["metric"] for name, manifest in manifests.items() if manifest["metric"]}
    return sorted(metrics, key=lambda name: Score(**metrics[name]).order)
