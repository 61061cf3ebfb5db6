"""Single batches, for custom training loops: `train_on_batch`, `test_on_batch`, `predict_on_batch`."""

from collections.abc import Mapping
from typing import Any

import torch

from ..backend import HOST, Cores, CoresArgument
from ..data.per_host import Share
from ..data.to_tensors import as_tensors
from ..hosts import collective
from ..losses import make_class_weight
from ..runtime import gather_rows
from ..step import Engine, StepRunner, keeping_modes
from . import host_consistency
from .host_agreement import keep_in_lockstep


def run_on_batch(
    engine: Engine,
    role: str,
    parts: tuple[Any, Any, Any],
    cores: CoresArgument,
    method: str,
    class_weight: Mapping[int, float] | None = None,
) -> tuple[StepRunner, Any]:
    """Run one step on one global batch: `parts` are its inputs, targets and sample weights. Errors name `method`.

    Returns:
        The runner with the logs of this batch, and the outputs of the step.
    """
    used = max(i for i, part in enumerate(parts) if part is not None or i == 0) + 1
    batch = as_tensors(parts[:used])
    weights = make_class_weight(class_weight)
    if weights is not None:
        batch = weights.weigh(batch, HOST)
    runner = _prepare_runner(engine, role, engine.start(cores, f"{method}(cores={cores!r})"))
    engine.note_user_code(every_batch=True)
    with keeping_modes(*engine.state.modules):
        if role == "train":
            engine.note_modes()
            engine.train_mode()
        else:
            engine.eval_mode()
        try:
            with engine.translating_device_errors(), collective():
                placement = engine.state.placement
                if placement.hosts > 1:
                    batch = Share(placement.local_shards or (), placement.count).select(batch)
                groups = runner.send([batch])
                if placement.hosts > 1:
                    groups = next(keep_in_lockstep(iter([groups]), method, per_host=False))
                return runner, gather_rows(runner(groups[0]), placement)
        finally:
            engine.expose()


def reset(engine: Engine) -> None:
    """Reset the logs of all three methods."""
    for role in engine.roles.values():
        if isinstance(role.runner, StepRunner) and role.runner.one_batch:
            role.runner = None


def _prepare_runner(engine: Engine, role: str, cores: Cores) -> StepRunner:
    """Return the runner of single batches with its logs reset; a new runner after another pass or `reset`."""
    placement = engine.place_on(cores)
    runner = engine.roles[role].runner
    if not isinstance(runner, StepRunner) or not runner.one_batch or placement != engine.state.placement:
        host_consistency.share_seed()
        engine.state.numbers.seed = torch.initial_seed()
        if role == "train":
            engine.scale_rates(cores.count)
        host_consistency.move_model(engine, placement)
        runner = StepRunner(engine, role, one_batch=True)
        if role != "train":
            runner.tally.seed = engine.seed_of_pass()
    else:
        runner.reset_logs()
    return runner
