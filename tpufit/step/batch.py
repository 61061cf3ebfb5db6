"""`DeviceGroup`: the batches on the device of steps that run as one graph; `BatchSender` sends them there."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ..backend import Placement, Sharding
from ..data.batches import (
    count_rows,
    describe_value,
    has_parts,
    is_flat,
    list_tensors,
    name_parts,
    require_dense,
    unpack,
)
from ..data.per_host import LocalBatch
from ..errors import BatchError
from ..losses import find_targets
from ..runtime import send_rows, to_device
from .graph_key import GraphKeys

# Batches of at most this many bytes are sent stacked: sending a tensor costs as much as copying this many bytes.
_SMALL = 1 << 16

_TENSOR = object()


class BatchForm(NamedTuple):
    """The structure, shapes and sizes that equal batches share."""

    tensors: list[tuple[torch.Size, torch.dtype]]
    leaves: list[Any]  # in order, with `_TENSOR` in place of each tensor
    spec: TreeSpec
    rows: int  # over all cores
    nbytes: int
    tokens: int  # padding included; 0 if x isn't a text
    signature: int  # the number of the structure, shapes and dtypes, see `GraphKeys.signature`


class DeviceGroup(NamedTuple):
    """The batches on the device of the steps that run as one graph."""

    forms: list[BatchForm]  # of each batch; their signatures are the same
    tensors: list[Tensor]  # batch after batch; if stacked, one for each leaf, with the batches as first dimension
    stacked: bool
    # The range of each batch's classes (by output, if there are several), or one range if stacked. None: not checked.
    labels: list[Any]

    @property
    def rows(self) -> int:
        """The number of rows of all batches."""
        return self.forms[0].rows * len(self.forms)

    @property
    def tokens(self) -> int:
        """The number of tokens of all batches, padding included; 0 if x isn't a text."""
        return self.forms[0].tokens * len(self.forms)

    @property
    def nbytes(self) -> int:
        """The size of all batches, in bytes."""
        return self.forms[0].nbytes * len(self.forms)

    def unpack(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Any, BatchForm, Any]]:
        """Yield for each batch its nest with these tensors, its form and the range of its labels."""
        each = len(self.forms[0].tensors)
        for i, form in enumerate(self.forms):
            leaves = iter([tensor[i] for tensor in tensors] if self.stacked else tensors[i * each : (i + 1) * each])
            nest = tree_unflatten([next(leaves) if leaf is _TENSOR else leaf for leaf in form.leaves], form.spec)
            yield nest, form, self.labels[0 if self.stacked else i]


class BatchSender:
    """Sends the batches of one pass to the device, in the prefetcher's thread if there is one."""

    def __init__(self, placement: Placement, keys: GraphKeys, label_range: Callable[[Any], Any] | None) -> None:
        self._placement = placement
        self._keys = keys
        self._label_range = label_range  # of classes in targets; None if nothing checks labels
        self._known: dict[type, BatchForm] = {}  # the form of the last flat batch, by its type

    def __call__(self, batches: Sequence[Any], join: bool = False, labels: Any = None) -> list[DeviceGroup]:
        """Start the transfer of batches to the device.

        A batch has the rows of all cores; on a pod it is a `LocalBatch` with the rows of this host. With `join`, small
        batches of one form are sent as one group. The range of their `labels` is computed unless given.

        Raises:
            BatchError: A batch has no rows, or no tensors that can be sent.
            StrictError: A batch's shape is new, and the pass is strict.
        """
        examined = [self._examine(batch) for batch in batches]
        try:
            return self._send_all(batches, examined, join, labels)
        except RuntimeError:
            for tensors, _ in examined:
                require_dense(tensors)
            raise

    def _send_all(
        self, batches: Sequence[Any], examined: list[tuple[list[Tensor], BatchForm]], join: bool, labels: Any
    ) -> list[DeviceGroup]:
        # Stack where possible: a transfer takes as long as a short step, however small the batch.
        first = examined[0][1].signature
        small = examined[0][1].nbytes <= _SMALL
        if join and small and len(examined) > 1 and all(form.signature == first for _, form in examined):
            columns = [tensors for tensors, _ in examined]
            if all(t.is_cpu or t.is_meta for tensors in columns for t in tensors):
                local = isinstance(batches[0], LocalBatch)
                return [self._send_stacked(columns, [form for _, form in examined], labels, local)]
        return [self._send(batch, *facts, labels) for batch, facts in zip(batches, examined, strict=True)]

    def _send(self, batch: Any, tensors: list[Tensor], form: BatchForm, labels: Any) -> DeviceGroup:
        if isinstance(batch, LocalBatch):
            batch = batch.batch
            sent = send_rows(tensors, form.rows, self._placement)
        else:
            sent = to_device(tensors, self._placement, Sharding.ROWS)
        return DeviceGroup([form], sent, False, [labels or self._labels(batch)])

    def _send_stacked(
        self, tensors: list[list[Tensor]], forms: list[BatchForm], labels: Any, local: bool
    ) -> DeviceGroup:
        columns = [torch.stack(column) for column in zip(*tensors, strict=True)]
        if labels is None and self._label_range is not None:
            rows = iter([column.flatten(0, 1) for column in columns])
            leaves = [next(rows) if leaf is _TENSOR else leaf for leaf in forms[0].leaves]
            labels = self._labels(tree_unflatten(leaves, forms[0].spec))
        if local:
            sent = send_rows(columns, forms[0].rows, self._placement, 1)
        else:
            sent = to_device(columns, self._placement, Sharding(1))
        return DeviceGroup(forms, sent, True, [labels])

    def _examine(self, batch: Any) -> tuple[list[Tensor], BatchForm]:
        """Return the tensors of a batch and its form."""
        # Nearly every batch has the form of the last one, and comparing is much faster than flattening.
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
                f"a batch must have a tensor or an array, but the data gave {describe_value(batch)}: give text and "
                "other objects as numbers"
            )
        require_dense(tensor for tensor in tensors if not tensor.is_meta)  # a preflight's tensors have no values
        facts = [(t.shape, t.dtype) for t in tensors]
        signature = self._keys.signature((spec, local and local.rows, facts))
        # Noted before the transfer, so that a refused batch never reaches the device.
        self._keys.note_shape(signature, batch)
        rows = count_rows(tensors) if local is None else local.rows
        if not rows:
            raise BatchError(
                f"a batch must have rows, but the data gave {list_tensors(name_parts(batch))}: an empty batch has no "
                "mean. Leave empty batches out"
            )
        marked = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        nbytes = sum(t.nbytes if local is None else _count_global_bytes(t, rows) for t in tensors)
        form = BatchForm(facts, marked, spec, rows, nbytes, _count_tokens(tensors, rows), signature)
        if local is None and is_flat(batch):
            self._known[type(batch)] = form
        return tensors, form

    def _labels(self, batch: Any) -> Any:
        # Only a tuple or list of x, y and sample_weight is sure to have labels; a custom step may take any other form.
        if self._label_range is None:
            return None
        if type(batch) is tuple and 2 <= len(batch) <= 3 and type(batch[1]) is Tensor:  # a shortcut for most batches
            return self._label_range(batch[1])
        if has_parts(batch) and not 1 <= len(batch) <= 3:
            return None
        x, y, _ = unpack(batch)
        return self._label_range(find_targets(x, y))


def join_groups(groups: list[DeviceGroup], size: int) -> list[DeviceGroup]:
    """Join groups of one form into one if there are `size` of them; else return them unchanged.

    Fewer batches run one by one, because each smaller size would need another graph. On the host no steps are joined.
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


def _count_global_bytes(tensor: Tensor, rows: int) -> int:
    """Count the bytes of a tensor in the global batch, which are equal on all hosts; each host has only some rows."""
    return math.prod(tensor.shape[1:]) * tensor.itemsize * (rows if tensor.dim() else 1)


def _count_tokens(tensors: Sequence[Tensor], rows: int) -> int:
    """Count the tokens in a batch: texts are rows of whole numbers in the first tensor."""
    first = tensors[0]
    whole = not first.is_floating_point() and first.dtype not in (torch.bool, torch.uint8)  # not masks or images
    return rows * first.shape[1] if whole and first.dim() == 2 else 0


def _flatten(batch: Any) -> tuple[list[Any], TreeSpec]:
    """Return the leaves of a batch and the structure of its nest."""
    return (list(batch), _flat_spec(type(batch) is list, len(batch))) if is_flat(batch) else tree_flatten(batch)


@cache
def _flat_spec(as_list: bool, length: int) -> TreeSpec:
    """Return the structure of a tuple or list of tensors; cached, because identical objects compare faster."""
    return tree_flatten([0] * length if as_list else (0,) * length)[1]
