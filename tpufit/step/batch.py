"""`DeviceBatch`: a batch on the device, and `BatchSender`, which puts it there ahead of its step."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ..data.batches import count_rows, fields, is_plain, is_row_of_parts, listed, unpack
from ..data.parts import Part
from ..errors import BatchError
from ..losses import targets_of
from ..runtime import Placement, Sharding, Strict, send_rows, to_device
from .graph_key import GraphKeys


class DeviceBatch(NamedTuple):
    """A batch on the device, and the facts about it that the host keeps.

    Attributes:
        tensors: The tensors, on the device.
        leaves: All leaves in order, with a mark in place of each tensor.
        spec: The structure of the nest.
        rows: The number of rows, over all cores.
        nbytes: The size of the tensors, in bytes.
        labels: The smallest and largest class label, by output if there are several; None if nothing checks labels.
        signature: The number of the structure, shapes and dtypes, see `GraphKeys.signature`.
    """

    tensors: list[Tensor]
    leaves: list[Any]
    spec: TreeSpec
    rows: int
    nbytes: int
    labels: Any
    signature: int

    def unpack(self, tensors: Iterator[Tensor]) -> Any:
        """Return the nest of this batch, with an iterator's tensors in place of its own."""
        return tree_unflatten([next(tensors) if leaf is _TENSOR else leaf for leaf in self.leaves], self.spec)


_TENSOR = object()


class BatchSender:
    """Sends the batches of one pass to the device, in the prefetcher's thread.

    Args:
        placement: The cores that share a batch.
        keys: The registry that numbers the structures of batches.
        role: `"train"`, `"eval"` or `"predict"`.
        strict: The policy on a batch of a new shape.
        label_range: The function that finds the range of class labels in targets; None if nothing checks labels.
    """

    def __init__(
        self,
        placement: Placement,
        keys: GraphKeys,
        role: str,
        strict: Strict,
        label_range: Callable[[Any], Any] | None,
    ) -> None:
        self._placement, self._keys, self._role, self._strict = placement, keys, role, strict
        self._label_range = label_range

    def __call__(self, batch: Any, labels: Any = None) -> DeviceBatch:
        """Start the transfer of a batch.

        Args:
            batch: A nest of host tensors, with the rows of all cores; on a pod a `Part` with those of this host.
            labels: The range of its class labels, if it is known (default: it is looked for).

        Raises:
            BatchError: The batch has no rows.
            StrictError: The batch's shape is new, and the pass is strict.
        """
        part = batch if isinstance(batch, Part) else None
        batch = batch if part is None else part.batch
        leaves, spec = _flatten(batch)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        signature = self._keys.signature((spec, part and part.rows, [(t.shape, t.dtype) for t in tensors]))
        # Before the transfer, so that a refused batch never reaches the device.
        self._keys.note_shape(self._role, signature, batch, self._strict)
        rows = count_rows(tensors) if part is None else part.rows
        if not rows:
            raise BatchError(
                f"a batch must have rows, but the data gave {listed(fields(batch))}: an empty batch has no mean. "
                "Leave empty batches out"
            )
        return DeviceBatch(
            to_device(tensors, self._placement, Sharding.ROWS)
            if part is None
            else send_rows(tensors, rows, self._placement),
            [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves],
            spec,
            rows,
            sum(t.nbytes for t in tensors) * self._placement.hosts,
            labels or self._labels(batch),
            signature,
        )

    def _labels(self, batch: Any) -> Any:
        # Only the usual forms are sure to have the labels there; a custom step may take any other form.
        if self._label_range is None or (is_row_of_parts(batch) and not 1 <= len(batch) <= 3):
            return None
        x, y, _ = unpack(batch)
        return self._label_range(targets_of(x, y))


def _flatten(batch: Any) -> tuple[list[Any], TreeSpec]:
    """Return the leaves of a batch and the structure of its nest."""
    return (list(batch), _plain_spec(type(batch) is list, len(batch))) if is_plain(batch) else tree_flatten(batch)


@cache
def _plain_spec(as_list: bool, length: int) -> TreeSpec:
    """Return the structure of a tuple or list of tensors; one cached object, because identical ones compare faster."""
    return tree_flatten([0] * length if as_list else (0,) * length)[1]
