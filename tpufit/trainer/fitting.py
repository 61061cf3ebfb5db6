"""`run_fit`: from the arguments of `Model.fit` to the loop."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from .. import optimizers
from ..backend import Cores, CoresArgument
from ..callbacks import CallbackList, History
from ..callbacks.progbar_logger import resolve_verbose
from ..checkpoint import find_checkpoint, saved_state
from ..data import Stream
from ..errors import counted
from ..hosts import is_first
from ..step import Engine, FitOptions
from ..utils.text import size
from . import consistency, loop
from .arguments import (
    Schedule,
    TrainingData,
    Validation,
    ValidationData,
    callback_list,
    parts_of,
    require_compiled,
    require_gradients,
    require_learning,
    require_one_schedule,
)
from .batch_size import AUTO, ByCompiler, choose, require_rows
from .hosts import started_with
from .validation import check_first
from .vocabulary import require_vocabulary


def run_fit(
    engine: Engine,
    train: TrainingData,
    validation: ValidationData,
    schedule: Schedule,
    callbacks: Any,
    verbose: str | int,
    cores: CoresArgument,
    by_compiler: ByCompiler,
) -> History:
    """Train as `Model.fit` says. Whatever can be checked is checked before anything is compiled."""
    require_compiled(engine, "fit")
    require_gradients("fit")
    require_learning(engine)
    require_vocabulary(engine.model.module, train.x, *parts_of(validation.data)[:1])
    optimizers.require_rates(optimizers.required(engine.model.optimizer))
    verbosity = resolve_verbose(verbose)
    given = CallbackList(callbacks).callbacks
    require_one_schedule(given)
    if validation.limit is None and validation.given:
        validation = replace(validation, limit=schedule.limit)
    auto = isinstance(train.batch_size, str) and train.batch_size == AUTO
    if auto:
        require_rows(train.x)
        train = replace(train, batch_size=None)
    train, validation = validation.split_off(train)  # first: the balance of classes is that of the rows to train on
    options = FitOptions(schedule.policy(engine), train.weigher(engine), fitting=True)
    # Only now: a process can settle its cores once, so bad arguments must be found before.
    settled, resumed = started_with(cores, partial(find_checkpoint, schedule.resume, given))
    consistency.share_seed()
    # A resumed run keeps its seed, which the order of the data depends on.
    seed = torch.initial_seed() if resumed is None else resumed.state["model"]["seed"]
    placement = engine.place_on(settled)

    def streams() -> tuple[Stream, Validation | None]:
        data = train.stream(placement, settled, seed)
        steps = data.steps
        if schedule.limit is not None:  # first, as the validation may have it from here
            data.limit(schedule.limit)
        held_out = validation.build(placement, settled, train.batch_size, steps)
        return data, held_out

    data, held_out = streams()
    if held_out is not None:
        check_first(engine, held_out.stream, data)
    # Before the move, which can't write back values that a failed step has lost.
    if resumed is not None and engine.state.device.lost:
        engine.reset_to(saved_state(resumed))
    chosen = choose(engine, train, placement, settled, seed, by_compiler) if auto else None
    if chosen is not None:
        train = replace(train, batch_size=chosen.rows)
        data, held_out = streams()
    consistency.check(
        engine,
        **{f"fit({name})": value for name, value in vars(schedule).items() if name != "resume"},
        batches=None if data.per_host else (data.steps, data.sizes(), train.batch_size, train.shuffle),
        validation=None if held_out is None else (held_out.stream.steps, held_out.stream.sizes(), held_out.every),
        callbacks=[type(callback) for callback in given],
        rate=optimizers.rates(optimizers.required(engine.model.optimizer)),
    )
    consistency.move(engine, placement, compared=True)
    before = engine.scale_rates(1 if data.is_global else settled.count)
    if verbosity and is_first():
        if chosen is not None:
            print(f"batch_size='auto': {chosen.why}", flush=True)
        print(_headline(engine, settled, data, before), flush=True)
        if resumed is not None:
            print(f"going on from step {resumed.step}", flush=True)
    history = History()
    course = schedule.params(data.steps, engine.config.gradients.accumulate_steps)
    epochs = range(schedule.initial_epoch, course["epochs"] or 0)
    validates = held_out is not None and (held_out.every is not None or any(map(held_out.is_due, epochs)))
    params = {"steps": data.steps, "verbose": verbosity, **course, "validates": validates}
    all_callbacks = callback_list(engine, callbacks, params, history)
    # Last: an error above leaves the history and the report of the `fit` before.
    engine.begin_fit(history, options, seed)
    engine.log.data = {**data.facts, **({} if chosen is None else {"batch size": chosen.why})}
    limits = loop.Limits(schedule.min_epochs, schedule.max_steps, schedule.seconds)
    try:
        loop.fit(engine, data, held_out, all_callbacks, epochs, limits, resumed)
    finally:
        engine.options = FitOptions()
    return history


def _headline(engine: Engine, cores: Cores, data: Stream, before: list[float]) -> str:
    """Return the line that says how `fit` scales: cores, batch, learning rate and precision."""
    size = data.batch_size
    batch = (
        f"batch {size} x {cores.count} = {size * cores.count}" if size else f"{counted(cores.count, 'batch')} a step"
    )
    if data.is_global:
        batch = f"1 batch a step, split over {counted(cores.count, 'core')}"
    assert engine.model.optimizer is not None
    after = optimizers.rates(engine.model.optimizer)
    rate = f"lr {after[0]:g}"
    if before != after:
        rate = f"lr {before[0]:g} x {after[0] / before[0]:.4g} = {after[0]:g} ({engine.config.scale_lr})"
    elif data.is_global and cores.count > 1:
        rate = f"{rate}, not scaled"
    return " | ".join(filter(None, [str(cores), batch, rate, engine.config.precision, _split(engine)]))


def _split(engine: Engine) -> str:
    """Return what is split over the cores, and what each of them holds; nothing if nothing is."""
    state = engine.state.device
    if not state.shardings:
        return ""
    parameters = list(engine.model.module.parameters())
    split = sum(id(parameter) in state.shardings for parameter in parameters)
    held = engine.state.of_a_core(state.tensors)
    whole = sum(tensor.nbytes for tensor in state.tensors)
    return f"{split} of {counted(len(parameters), 'parameter')} split, {size(held)} of {size(whole)} state a core"
