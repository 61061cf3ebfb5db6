"""`PreflightPlan`: the steps that a `fit` would run, as the processes need it that trace and compile them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from .. import optimizers
from ..data import Stream, stream, unpack
from ..data.batches import as_tensors, count_rows
from ..errors import ArgumentError, LabelError
from ..losses import ClassWeight, targets_of
from ..step import CompileConfig, Engine, fault_of
from ..trainer.arguments import TrainingData, ValidationData, parts_of, require_compiled
from ..utils.random import RNGState

# The files of the folder by which processes tell each other of a plan: it, its programs, or an error.
PLAN = "plan.pkl"
TRACED = "traced.json"
FAULT = "fault.json"
# Of the process that traces: virtual cores, the names of scopes, and the mode of many cores on one too, in which
# operations can be traced as for a TPU. The runtime reads them when it is imported.
ENVIRON = {"PJRT_DEVICE": "CPU", "XLA_IR_DEBUG": "1", "XLA_HLO_DEBUG": "1", "XLA_USE_SPMD": "1"}


@dataclass(frozen=True)
class Batch:
    """A batch without values."""

    nest: Any  # of meta tensors, with the rows of all cores
    labels: Any  # the range of its class labels, see `Loss.label_range`
    rows: int


@dataclass(frozen=True)
class PlannedPass:
    """The steps of a role that differ in their programs."""

    role: str  # "train" or "eval"
    transform: Callable[[Any], Any] | None  # of each batch on the device
    groups: list[list[Batch]]  # the batches of the steps that run as one, for each program


@dataclass(frozen=True)
class PreflightPlan:
    """The steps that a `fit` would run."""

    model: Any
    config: CompileConfig
    class_weight: ClassWeight | None
    passes: list[PlannedPass]  # training and validation
    cores: int  # that share a batch
    kind: str = "TPU"  # see `TPU.kind`; by default any TPU


def plan_of(
    engine: Engine, train: TrainingData, validation: ValidationData, cores: int, limit: int | float | None = None
) -> PreflightPlan:
    """Plan the steps of a `fit` on so many cores. Of the data only one core's first batch is read.

    Raises:
        ArgumentError: Steps run eagerly, or the data can be read only once.
        NotCompiledError, DataError, LabelError: As in `fit`.
    """
    require_compiled(engine, "preflight")
    optimizers.required(engine.model.optimizer)
    if engine.config.run_eagerly:
        raise ArgumentError("compile(run_eagerly=True) makes no programs: leave it out for a preflight")
    train, validation = validation.split_off(train)
    weigher = train.weigher(engine)
    joined = engine.config.steps_per_execution if isinstance(engine.config.steps_per_execution, int) else 1
    how = {"batch_size": train.batch_size, "steps": train.steps_per_epoch}
    data = _Data((train.x, train.y, train.sample_weight), "x", how, cores, limit)
    passes = [_pass(engine, "train", data, joined)]
    if validation.data is not None:
        how = {"batch_size": validation.rows_per_core(train.batch_size), "steps": validation.steps, "restart": True}
        held_out = _Data(
            parts_of(validation.data),
            "validation_data",
            how,
            cores,
            limit if validation.limit is None else validation.limit,
        )
        passes.append(_pass(engine, "eval", held_out, joined))
    return PreflightPlan(engine.model, engine.config, weigher, passes, cores)


@dataclass(frozen=True)
class _Data:
    """The data of a pass: their parts, name, arguments of `stream`, cores, and `limit` of `fit`."""

    parts: Any
    name: str
    how: dict[str, Any]
    cores: int
    limit: int | float | None

    def stream(self, cores: int) -> Stream:
        return stream(*self.parts, cores=cores, name=self.name, **self.how)

    def first(self) -> Any:
        """Read the first batch of one core, aside from any epoch of the user's."""
        if isinstance(self.parts[0], Iterator):
            raise ArgumentError(
                f"{self.name} is an iterator, of which a preflight would use up a batch: pass data to be read again"
            )
        data = self.stream(1)
        batch = data.first()
        if batch is None:
            before = RNGState.now()
            try:
                batch = as_tensors(next(data.epoch(0)))
            finally:
                before.restore()
        return batch


def _pass(engine: Engine, role: str, given: _Data, joined: int) -> PlannedPass:
    first = given.first()
    data = given.stream(given.cores)
    if given.limit is not None:
        data.limit(given.limit)
    fault = fault_of(engine, first, data.device_transform)
    if isinstance(fault, LabelError):  # the others may be of a trial without values, and the trace will tell
        raise fault
    labels = None
    if engine.config.loss is not None:
        x, y, _ = unpack(first)
        labels = engine.config.loss.label_range(targets_of(x, y))
    whole, last = data.sizes() or (count_rows(tree_leaves(first)) * (1 if data.is_global else given.cores), 0)
    batch = _of_size(first, labels, whole)
    steps = data.steps
    anywhere = "restart" not in given.how and given.how["steps"] is not None  # of an epoch that goes on in the data
    if steps is not None and last and not anywhere:
        steps -= 1
    groups = [[batch] * joined] if steps is None or steps >= joined else []
    if joined > 1 and (steps is None or steps % joined or (last and anywhere)):
        groups.append([batch])
    if last:
        groups.append([_of_size(first, labels, last)])
    return PlannedPass(role, data.device_transform, groups)


def _of_size(first: Any, labels: Any, rows: int) -> Batch:
    def sized(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim():
            return leaf
        return torch.empty((rows, *leaf.shape[1:]), dtype=leaf.dtype, device="meta")

    return Batch(tree_map(sized, first), labels, rows)
