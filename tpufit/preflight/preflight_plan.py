"""`PreflightPlan`: the steps that a `fit` would run, for the processes that trace and compile them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from .. import optimizers
from ..data import Stream, unpack
from ..data.batches import count_rows
from ..data.stream import make_stream
from ..data.to_tensors import as_tensors
from ..data.user_data import UserData
from ..errors import ArgumentError, LabelError
from ..losses import ClassWeight, find_targets
from ..step import CompileConfig, Engine, find_fault
from ..trainer.fit_arguments import TrainingData, ValidationData
from ..trainer.last_batch import shape_last_batch
from ..trainer.preconditions import require_compiled
from ..utils.random import RNGState

# The files by which processes exchange a plan, its programs, or an error.
PLAN = "plan.pkl"
TRACED = "traced.json"
FAULT = "fault.json"
# The environment of the tracing process: virtual cores, the names of scopes, and SPMD mode also on one core, in which
# operations can be traced as for a TPU. The runtime reads it during its import.
ENVIRON = {"PJRT_DEVICE": "CPU", "XLA_IR_DEBUG": "1", "XLA_HLO_DEBUG": "1", "XLA_USE_SPMD": "1"}
# Otherwise torch_tpu would look for its device during the import of PyTorch.
ENVIRON["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
# It loads libtpu, but uses no chip, so other processes may use them.
ENVIRON["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"


@dataclass(frozen=True)
class Batch:
    """A batch without values."""

    nest: Any  # nested meta tensors, with the rows of all cores
    labels: Any  # the range of its class labels, see `Loss.label_range`
    rows: int


@dataclass(frozen=True)
class PlannedPass:
    """The steps of a role that have different programs."""

    role: str  # "train" or "eval"
    transform: Callable[[Any], Any] | None  # applied to each batch on the device
    groups: list[list[Batch]]  # the batches of joined steps, for each program


@dataclass(frozen=True)
class PreflightPlan:
    """The steps that a `fit` would run."""

    model: Any
    config: CompileConfig
    class_weight: ClassWeight | None
    passes: list[PlannedPass]  # training and validation
    cores: int  # the number of cores that share a batch
    kind: str = "TPU"  # see `TPU.kind`; by default any TPU


def make_plan(
    engine: Engine, train: TrainingData, validation: ValidationData, cores: int, limit: int | float | None = None
) -> PreflightPlan:
    """Plan the steps of a `fit` on a number of cores. Only one core's first batch is read from the data.

    Raises:
        ArgumentError: Steps run eagerly, or the data can be read only once.
        NotCompiledError, DataError, LabelError: As in `fit`.
    """
    require_compiled(engine, "preflight")
    optimizers.require_optimizer(engine.model.optimizer)
    if engine.config.run_eagerly:
        raise ArgumentError("compile(run_eagerly=True) has no programs: omit it for a preflight")
    train, validation = validation.split_off(train)
    class_weight = train.make_class_weight(engine)
    joined = engine.config.steps_per_execution if isinstance(engine.config.steps_per_execution, int) else 1
    arguments = {"batch_size": train.batch_size, "steps": train.steps_per_epoch}
    data = _Data(train.data, arguments, cores, limit)
    passes = [_plan_pass(engine, "train", data, joined, train.last_batch)]
    if validation.data is not None:
        arguments = {
            "batch_size": validation.choose_batch_size(train.batch_size),
            "steps": validation.steps,
            "restart": True,
        }
        held_out = _Data(validation.data, arguments, cores, limit if validation.limit is None else validation.limit)
        passes.append(_plan_pass(engine, "eval", held_out, joined, train.last_batch))
    return PreflightPlan(engine.model, engine.config, class_weight, passes, cores)


@dataclass(frozen=True)
class _Data:
    """The data of a pass, the arguments of `stream`, cores, and `limit` of `fit`."""

    data: UserData
    arguments: dict[str, Any]
    cores: int
    limit: int | float | None

    def stream(self, cores: int) -> Stream:
        return make_stream(self.data, cores=cores, **self.arguments)

    def read_first(self) -> Any:
        """Read the first batch of one core, independent of the user's epochs."""
        if isinstance(self.data.x, Iterator):
            raise ArgumentError(
                f"{self.data.name} is an iterator, and a preflight would consume its first batch: pass data that can "
                "be read again, such as a list of the batches or a DataLoader"
            )
        data = self.stream(1)
        batch = data.read_first()
        if batch is None:
            before = RNGState.now()
            try:
                batch = as_tensors(next(data.epoch(0)))
            finally:
                before.restore()
        return batch


def _plan_pass(engine: Engine, role: str, given: _Data, joined: int, last_batch: str) -> PlannedPass:
    first = given.read_first()
    data = given.stream(given.cores)
    if given.limit is not None:
        data.limit(given.limit)
    shape_last_batch(last_batch, engine, data, training=role == "train")
    fault = find_fault(engine, first, data.device_transform)
    if isinstance(fault, LabelError):  # other faults may come from the missing values; the trace decides
        raise fault
    labels = None
    if engine.config.loss is not None:
        x, y, _ = unpack(first)
        labels = engine.config.loss.label_range(find_targets(x, y))
    whole, last = data.sizes() or (count_rows(tree_leaves(first)) * (1 if data.is_global else given.cores), 0)
    batch = _resize(first, labels, whole)
    steps = data.steps
    anywhere = (
        "restart" not in given.arguments and given.arguments["steps"] is not None
    )  # an epoch may continue in the middle of the data
    if steps is not None and last and not anywhere:
        steps -= 1
    groups = [[batch] * joined] if steps is None or steps >= joined else []
    if joined > 1 and (steps is None or steps % joined or (last and anywhere)):
        groups.append([batch])
    if last:
        groups.append([_resize(first, labels, last)])
    return PlannedPass(role, data.device_transform, groups)


def _resize(first: Any, labels: Any, rows: int) -> Batch:
    def sized(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim():
            return leaf
        return torch.empty((rows, *leaf.shape[1:]), dtype=leaf.dtype, device="meta")

    return Batch(tree_map(sized, first), labels, rows)
