"""`DeviceGroup`: the batches of steps that run as one, on the device, and `BatchSender`, which puts them there."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ..backend import Placement, Sharding
from ..data.batches import count_rows, fields, is_flat, is_row_of_parts, kind_of, listed, require_dense, unpack
from ..data.per_host import LocalBatch
from ..errors import BatchError
from ..losses import targets_of
from ..runtime import send_rows, to_device
from .graph_key import GraphKeys

# Batches of so few bytes go to the device as one: each tensor that is sent costs as much as to copy such a one.
_SMALL = 1 << 16

_TENSOR = object()


class BatchForm(NamedTuple):
    """The facts that batches of one structure share."""

    tensors: list[tuple[torch.Size, torch.dtype]]
    leaves: list[Any]  # in order, with a mark in place of each tensor
    spec: TreeSpec
    rows: int  # over all cores
    nbytes: int
    tokens: int  # padding included; 0 if x is no text
    signature: int  # the number of the structure, shapes and dtypes, see `GraphKeys.signature`


class DeviceGroup(NamedTuple):
    """The batches of some steps that run as one graph, on the device."""

    forms: list[BatchForm]  # of each batch; their signatures are the same
    tensors: list[Tensor]  # batch after batch; if stacked, each holds those of all batches in a new first dimension
    stacked: bool
    # Smallest and largest class of each batch, or once if stacked; a dict by output, or None: unchecked.
    labels: list[Any]

    @property
    def rows(self) -> int:
        """The number of rows of all batches."""
        return self.forms[0].rows * len(self.forms)

    @property
    def tokens(self) -> int:
        """The number of tokens of all batches, padding included; 0 if x is no text."""
        return self.forms[0].tokens * len(self.forms)

    @property
    def nbytes(self) -> int:
        """The size of all batches, in bytes."""
        return self.forms[0].nbytes * len(self.forms)

    def unpack(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Any, BatchForm, Any]]:
        """Give the nest of each batch, its form and the range of its labels, with these tensors in place of its own."""
        each = len(self.forms[0].tensors)
        for i, form in enumerate(self.forms):
            own = iter([tensor[i] for tensor in tensors] if self.stacked else tensors[i * each : (i + 1) * each])
            nest = tree_unflatten([next(own) if leaf is _TENSOR else leaf for leaf in form.leaves], form.spec)
            yield nest, form, self.labels[0 if self.stacked else i]


class BatchSender:
    """Sends the batches of one pass to the device, in the prefetcher's thread if there is one."""

    def __init__(self, placement: Placement, keys: GraphKeys, label_range: Callable[[Any], Any] | None) -> None:
        self._placement = placement
        self._keys = keys
        self._label_range = label_range  # of classes in targets; None if nothing checks labels
        self._known: dict[type, BatchForm] = {}  # of the last plain batch

    def __call__(self, batches: Sequence[Any], join: bool = False, labels: Any = None) -> list[DeviceGroup]:
        """Start the transfer of batches to the device.

        Each has the rows of all cores; on a pod each is a `LocalBatch` with those of this host. With `join` they are
        sent as one group if they are small and of one form. Their `labels` are looked for unless given.

        Raises:
            BatchError: A batch has no rows, or no tensors that can be sent.
            StrictError: A batch's shape is new, and the pass is strict.
        """
        found = [self._examined(batch) for batch in batches]
        try:
            return self._groups(batches, found, join, labels)
        except RuntimeError:
            for tensors, _ in found:
                require_dense(tensors)
            raise

    def _groups(
        self, batches: Sequence[Any], found: list[tuple[list[Tensor], BatchForm]], join: bool, labels: Any
    ) -> list[DeviceGroup]:
        # A transfer takes as long as a short step, however small the batch. A pod's hosts send their rows otherwise.
        first = found[0][1].signature
        small = found[0][1].nbytes <= _SMALL
        if join and small and len(found) > 1 and all(form.signature == first for _, form in found):
            own = [tensors for tensors, _ in found]
            if all(t.is_cpu or t.is_meta for tensors in own for t in tensors) and self._placement.hosts == 1:
                return [self._stacked(own, [form for _, form in found], labels)]
        return [self._send(batch, *one, labels) for batch, one in zip(batches, found, strict=True)]

    def _send(self, batch: Any, tensors: list[Tensor], form: BatchForm, labels: Any) -> DeviceGroup:
        if isinstance(batch, LocalBatch):
            batch = batch.batch
            sent = send_rows(tensors, form.rows, self._placement)
        else:
            sent = to_device(tensors, self._placement, Sharding.ROWS)
        return DeviceGroup([form], sent, False, [labels or self._labels(batch)])

    def _stacked(self, tensors: list[list[Tensor]], forms: list[BatchForm], labels: Any) -> DeviceGroup:
        columns = [torch.stack(column) for column in zip(*tensors, strict=True)]
        if labels is None and self._label_range is not None:
            rows = iter([column.flatten(0, 1) for column in columns])
            leaves = [next(rows) if leaf is _TENSOR else leaf for leaf in forms[0].leaves]
            labels = self._labels(tree_unflatten(leaves, forms[0].spec))
        return DeviceGroup(forms, to_device(columns, self._placement, Sharding(1)), True, [labels])

    def _examined(self, batch: Any) -> tuple[list[Tensor], BatchForm]:
        """Return the tensors of a batch and its form."""
        # Nearly each batch has the form of the last one: to compare takes a fraction of what flattening does.
        known = self._known.get(type(batch))
        if known is not None and len(batch) == len(known.tensors):
            for leaf, (shape, dtype) in zip(batch, known.tensors, strict=True):
                if type(leaf) is not Tensor or leaf.dtype is not dtype or leaf.shape != shape:
                    break
            else:
                return list(batch), known
        local = batch if isinstance(batch, LocalBatch) else None
        batch = batch if local is None else local.batch
        leaves, spec = _flatten(batch)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not tensors:
            raise BatchError(
                f"a batch must have a tensor or an array, but the data gave {kind_of(batch)}: give text and other "
                "objects as numbers"
            )
        require_dense(tensor for tensor in tensors if not tensor.is_meta)  # a preflight's have no values
        facts = [(t.shape, t.dtype) for t in tensors]
        signature = self._keys.signature((spec, local and local.rows, facts))
        # Before the transfer, so that a refused batch never reaches the device.
        self._keys.note_shape(signature, batch)
        rows = count_rows(tensors) if local is None else local.rows
        if not rows:
            raise BatchError(
                f"a batch must have rows, but the data gave {listed(fields(batch))}: an empty batch has no mean. "
                "Leave empty batches out"
            )
        marked = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        nbytes = sum(t.nbytes for t in tensors) * self._placement.hosts
        form = BatchForm(facts, marked, spec, rows, nbytes, _tokens(tensors, rows), signature)
        if local is None and is_flat(batch):
            self._known[type(batch)] = form
        return tensors, form

    def _labels(self, batch: Any) -> Any:
        # Only the usual forms are sure to have the labels there; a custom step may take any other form.
        if self._label_range is None:
            return None
        if type(batch) is tuple and 2 <= len(batch) <= 3 and type(batch[1]) is Tensor:  # as most are
            return self._label_range(batch[1])
        if is_row_of_parts(batch) and not 1 <= len(batch) <= 3:
            return None
        x, y, _ = unpack(batch)
        return self._label_range(targets_of(x, y))


def joined(groups: list[DeviceGroup], size: int) -> list[DeviceGroup]:
    """The batches that run as one graph: all of them, if they are `size` and alike, else each by itself.

    Batches that don't fill a group run one by one: each smaller size would need a graph of its own. So do all on the
    host, where steps aren't joined.
    """
    signature = groups[0].forms[0].signature
    if size == 1 or len(groups) < size or any(group.forms[0].signature != signature for group in groups):
        return groups
    return [
        DeviceGroup(
            [form for group in groups for form in group.forms],
            [tensor for group in groups for tensor in group.tensors],
            False,
            [labels for group in groups for labels in group.labels],
        )
    ]


def _tokens(tensors: Sequence[Tensor], rows: int) -> int:
    """The number of tokens in a batch: texts are whole numbers, a row each, and come first."""
    first = tensors[0]
    whole = not first.is_floating_point() and first.dtype not in (torch.bool, torch.uint8)  # which are masks and images
    return rows * first.shape[1] if whole and first.dim() == 2 else 0


def _flatten(batch: Any) -> tuple[list[Any], TreeSpec]:
    """Return the leaves of a batch and the structure of its nest."""
    return (list(batch), _flat_spec(type(batch) is list, len(batch))) if is_flat(batch) else tree_flatten(batch)


@cache
def _flat_spec(as_list: bool, length: int) -> TreeSpec:
    """Return the structure of a tuple or list of tensors; one cached object, because identical ones compare faster."""
    return tree_flatten([0] * length if as_list else (0,) * length)[1]
