"""`run_fit`: checks the arguments of `Model.fit`, makes the streams, moves the state, and runs the loop."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from .. import optimizers
from ..backend import Cores, CoresArgument, Placement
from ..callbacks import CallbackList, History
from ..callbacks.progbar_logger import resolve_verbose
from ..checkpoint import extract_saved_state, find_checkpoint
from ..data import Stream
from ..errors import say_count
from ..hosts import is_first
from ..step import Engine, FitOptions
from ..utils.text import format_bytes
from . import host_consistency, loop
from .auto_batch_size import ByCompiler, choose, require_rows
from .fit_arguments import AUTO, Schedule, TrainingData, ValidationData
from .host_agreement import start_and_find
from .interruption import shorten_interrupt
from .last_batch import shape_last_batches
from .make_callback_list import make_callback_list
from .preconditions import require_compiled, require_gradients, require_learning, require_one_schedule
from .validation import Validation, check_first, rehearse
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
    """Train, see `Model.fit`. All that can be checked is checked before anything is compiled."""
    require_compiled(engine, "fit")
    require_gradients("fit")
    require_learning(engine)
    require_vocabulary(engine.model.module, train.data.x, *([] if validation.data is None else [validation.data.x]))
    optimizers.require_rates(optimizers.require_optimizer(engine.model.optimizer))
    verbosity = resolve_verbose(verbose)
    given = CallbackList(callbacks).callbacks
    require_one_schedule(given)
    validation = validation.with_limit_of(schedule)
    auto = train.batch_size == AUTO
    if auto:
        require_rows(train.data)
        train = replace(train, batch_size=None)
    train, validation = validation.split_off(train)  # first: class weights balance the rows to train on
    options = FitOptions(schedule.make_strict(engine), train.make_class_weight(engine), fitting=True)
    # Arguments are checked before this line, because a process can settle its cores only once.
    settled, resumed = start_and_find(engine, cores, partial(find_checkpoint, schedule.resume, given))
    host_consistency.share_seed()
    # A resumed run keeps its seed, which the order of the data depends on.
    seed = torch.initial_seed() if resumed is None else resumed.state["model"]["seed"]
    placement = engine.place_on(settled)

    streams = partial(_make_streams, engine, validation, schedule, placement, settled, seed)
    data, held_out = streams(train)
    if held_out is not None:
        check_first(engine, held_out.stream, data)
    # Reset before the move, which can't write back values that a failed step has lost.
    if resumed is not None and engine.state.device.lost:
        engine.reset_to(extract_saved_state(resumed))
    chosen = choose(engine, train, placement, settled, seed, by_compiler) if auto else None
    if chosen is not None:
        train = replace(train, batch_size=chosen.rows)
        data, held_out = streams(train)
    host_consistency.compare_hosts(
        engine,
        **{f"fit({name})": value for name, value in vars(schedule).items() if name != "resume"},
        batches=None if data.per_host else (data.steps, data.sizes(), train.batch_size, train.shuffle),
        validation=None if held_out is None else (held_out.stream.steps, held_out.stream.sizes(), held_out.every),
        callbacks=[type(callback) for callback in given],
        rate=optimizers.list_rates(optimizers.require_optimizer(engine.model.optimizer)),
    )
    host_consistency.move_model(engine, placement, compared=True)
    before = engine.scale_rates(1 if data.is_global else settled.count)
    prints = bool(verbosity) and is_first()
    if prints:
        resumed_line = "" if resumed is None else f"\nresuming from step {resumed.step}"
        auto_size = "" if chosen is None else f"batch_size='auto': {chosen.why}\n"
        print(f"{auto_size}{_headline(engine, settled, data, before)}{resumed_line}", flush=True)
    history = History()
    hook_params = schedule.params(data.steps, engine.config.gradients.accumulate_steps)
    epochs = range(schedule.initial_epoch, hook_params["epochs"] or 0)
    validates = held_out is not None and (held_out.every is not None or any(map(held_out.is_due, epochs)))
    params = {"steps": data.steps, "verbose": verbosity, **hook_params, "validates": validates}
    all_callbacks = make_callback_list(engine, callbacks, params, history)
    if schedule.sanity_steps and epochs:
        first = validation.first_batches(schedule.sanity_steps)
        rehearse(engine, first.build(placement, settled, train.batch_size, data.steps), prints)
    # Only now, because an error above must not change the history and the report of the previous `fit`.
    engine.begin_fit(history, options, seed)
    engine.log.data = {**data.facts, **({} if chosen is None else {"batch size": chosen.why})}
    limits = loop.Limits(schedule.min_epochs, schedule.max_steps, schedule.seconds)
    try:
        shorten_interrupt(loop.fit, engine, data, held_out, all_callbacks, epochs, limits, resumed)
    finally:
        engine.options = FitOptions()
    return history


def _make_streams(
    engine: Engine,
    validation: ValidationData,
    schedule: Schedule,
    placement: Placement,
    cores: Cores,
    seed: int,
    train: TrainingData,
) -> tuple[Stream, Validation | None]:
    """Make the streams of batches for training and validation."""
    data = train.stream(placement, cores, seed)
    steps = data.steps
    if schedule.limit is not None:  # first, so that errors name it: the validation may use it, too
        data.limit(schedule.limit)
    held_out = validation.build(placement, cores, train.batch_size, steps)
    shape_last_batches(train.last_batch, engine, data, None if held_out is None else held_out.stream)
    return data, held_out


def _headline(engine: Engine, cores: Cores, data: Stream, before: list[float]) -> str:
    """Return the line that says how `fit` runs: cores, batch, learning rate and precision."""
    rows = data.batch_size
    batch = f"{say_count(cores.count, 'batch')} per step"
    if rows:
        batch = f"batch {rows} x {cores.count} = {rows * cores.count}"
    if data.is_global:
        batch = f"1 batch per step, split over {say_count(cores.count, 'core')}"
    assert engine.model.optimizer is not None
    after = optimizers.list_rates(engine.model.optimizer)
    rate = f"lr {after[0]:g}"
    if before != after:
        rate = f"lr {before[0]:g} x {after[0] / before[0]:.4g} = {after[0]:g} ({engine.config.scale_lr})"
    elif data.is_global and cores.count > 1:
        rate = f"{rate}, not scaled"
    return " | ".join(filter(None, [str(cores), batch, rate, engine.config.precision, _describe_split(engine)]))


def _describe_split(engine: Engine) -> str:
    """Say how many parameters are split over the cores, and the bytes of a core; "" if none is split."""
    state = engine.state.device
    if not state.shardings:
        return ""
    parameters = list(engine.model.module.parameters())
    split = sum(id(parameter) in state.shardings for parameter in parameters)
    per_core = format_bytes(engine.state.bytes_per_core(state.tensors))
    whole = format_bytes(sum(tensor.nbytes for tensor in state.tensors))
    return f"{split} of {say_count(len(parameters), 'parameter')} split, {per_core} of {whole} state per core"
