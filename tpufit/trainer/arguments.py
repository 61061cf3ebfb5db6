"""The arguments of `fit`, `evaluate` and `predict`, each with its owner: checks, and the streams that they make.

| owner | arguments |
| --- | --- |
| `TrainingData` | x, y, sample_weight, batch_size, shuffle, steps_per_epoch, class_weight, device_transform |
| `ValidationData` | validation_split, validation_data, validation_steps, validation_batch_size, validation_freq, \
validation_step_freq, validation_limit |
| `Schedule` | epochs, initial_epoch, min_epochs, max_steps, limit, max_time, resume, strict |
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from math import ceil
from typing import Any

import numpy as np
import torch

from .. import losses
from ..backend import Cores, Placement
from ..callbacks import Callback, CallbackList
from ..data import Compose, Stream, Transform, stream, train_validation_split
from ..data.forms import brings_batches, is_arrays
from ..data.stream import GLOBAL
from ..errors import (
    ArgumentError,
    NotCompiledError,
    counted,
    few,
    require_choice,
    require_flag,
    require_number,
    require_whole,
    short_repr,
)
from ..losses import ClassWeight, LossByOutput
from ..step import Engine, StepMethods
from ..utils.strict import LENIENT, Strict
from ..utils.users_code import users_line


def _set(record: Any, name: str, value: object) -> None:
    """Set a field of a frozen dataclass that is being made."""
    object.__setattr__(record, name, value)


def _batch_size(name: str, value: Any, *names: str) -> Any:
    """Return a batch size, which may go by one of some names; None is none."""
    if value is None or (isinstance(value, str) and value in names):
        return value
    return require_whole(name, value, otherwise=" or ".join(map(repr, names)))


def is_whole(value: object) -> bool:
    """True for a whole number of at least 1."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value >= 1)


def is_count_or_share(value: float) -> bool:
    """True for a whole number of at least 1, or a fraction above 0 and up to 1."""
    return is_whole(value) or (not isinstance(value, (int, np.integer)) and 0 < value <= 1)


def _check_limit(record: Any, name: str) -> None:
    if record.limit is not None:
        wanted = "a number of batches from 1, or a share such as 0.1"
        _set(record, "limit", require_number(name, record.limit, wanted, is_count_or_share))


@dataclass(frozen=True)
class TrainingData:
    """The data of a `fit`. The attributes are arguments of `Model.fit`, under their names."""

    x: Any
    y: Any = None
    sample_weight: Any = None
    batch_size: Any = None
    shuffle: bool | str = True
    steps_per_epoch: int | None = None
    class_weight: Mapping[int, float] | str | None = None
    device_transform: Transform | None = None

    def __post_init__(self) -> None:
        _set(self, "batch_size", _batch_size("batch_size", self.batch_size, "auto", GLOBAL))
        if self.steps_per_epoch is not None:
            _set(self, "steps_per_epoch", require_whole("steps_per_epoch", self.steps_per_epoch))
        require_choice("shuffle", self.shuffle, True, False, "batch")
        if self.device_transform is not None and not callable(self.device_transform):
            raise ArgumentError(f"device_transform must be a function of a batch, got {self.device_transform!r}")
        if isinstance(self.device_transform, type):
            name = self.device_transform.__name__
            raise ArgumentError(
                f"device_transform must be a function of a batch, got the class {name}: make one, {name}()"
            )

    def weigher(self, engine: Engine) -> ClassWeight | None:
        """Return the class weights, checked.

        Raises:
            ArgumentError: The weights are used with several outputs, or are no weights.
        """
        if self.class_weight is None or (isinstance(self.class_weight, dict) and not self.class_weight):
            return None
        weigher = ClassWeight(self.class_weight, self.y)
        if isinstance(engine.config.loss, LossByOutput):
            raise ArgumentError(
                "class_weight goes with one output only, and the loss has several: pass sample_weight in the form of y"
            )
        return weigher

    def stream(self, placement: Placement, cores: Cores, seed: int) -> Stream:
        """Return the stream of the global batches to train on."""
        how = {"shuffle": self.shuffle, "seed": seed, "steps": self.steps_per_epoch}
        made = _stream((self.x, self.y, self.sample_weight), self.batch_size, placement, cores, **how)
        if self.device_transform is not None:
            own = made.device_transform
            made.device_transform = self.device_transform if own is None else Compose(own, self.device_transform)
        return made


@dataclass(frozen=True)
class Validation:
    """The data to validate on, and the schedule."""

    stream: Stream
    due: int | Container[int]  # the epochs, from 1, that end with a validation; or n, for every n-th one
    every: int | None = None  # steps between two validations inside an epoch; None: none inside

    def is_due(self, epoch: int) -> bool:
        """True if an epoch (from 0) ends with a validation."""
        return (epoch + 1) % self.due == 0 if isinstance(self.due, int) else epoch + 1 in self.due


@dataclass(frozen=True)
class ValidationData:
    """The validation of a `fit`. The attributes are arguments of `Model.fit`, under their names without the prefix."""

    split: float = 0.0
    data: Any = None
    steps: int | None = None
    batch_size: int | str | None = None
    freq: int | Container[int] = 1
    step_freq: int | float | None = None
    limit: int | float | None = None

    def __post_init__(self) -> None:
        given = 0.0 if self.split is None or self.split is False else self.split
        split = require_number("validation_split", given, "a share from 0 to below 1", lambda share: 0 <= share < 1)
        _set(self, "split", split)
        _set(self, "batch_size", _batch_size("validation_batch_size", self.batch_size, GLOBAL))
        if self.steps is not None:
            _set(self, "steps", require_whole("validation_steps", self.steps))
        freq: Any = self.freq
        if isinstance(freq, Container) and not isinstance(freq, (str, bytes, Mapping)):
            if isinstance(freq, Iterable) and not all(is_whole(epoch) for epoch in freq):
                wanted = "a whole number of at least 1, or hold such numbers"
                raise ArgumentError(f"validation_freq must be {wanted}, got {short_repr(freq)}")
        else:
            _set(self, "freq", require_whole("validation_freq", freq, otherwise="a list of the epochs, from 1"))
        if self.step_freq is not None:
            wanted = "a whole number of at least 1 or a share of an epoch such as 0.25"
            _set(self, "step_freq", require_number("validation_step_freq", self.step_freq, wanted, is_count_or_share))
        _check_limit(self, "validation_limit")

    @property
    def given(self) -> bool:
        """True if there is something to validate on."""
        return bool(self.split) or self.data is not None

    def split_off(self, train: TrainingData) -> tuple[TrainingData, ValidationData]:
        """Take the last rows of the training data to validate on, if `validation_split` asks for it.

        Raises:
            ArgumentError: `validation_data` are arrays in a list, which would be several inputs without targets.
        """
        data = self.data
        meant = isinstance(data, list) and 2 <= len(data) <= 3 and not isinstance(train.x, list)
        if meant and all(is_arrays(part) for part in data) and not isinstance(data[-1], (tuple, Mapping)):
            parts = "(x, y)" if len(data) == 2 else "(x, y, sample_weight)"
            raise ArgumentError(
                f"validation_data is a list of {counted(len(data), 'array')}, which would be as many inputs: pass a "
                f"tuple, {parts}"
            )
        if not self.split or self.data is not None:
            return train, self
        x, y, weight, held = train_validation_split(train.x, train.y, train.sample_weight, self.split)
        return replace(train, x=x, y=y, sample_weight=weight), replace(self, data=held)

    def rows_per_core(self, batch_size: int | str | None) -> int | str | None:
        """Return the batch size, by default that of training, as far as the data go with it."""
        if self.batch_size is not None:
            return self.batch_size
        if brings_batches(self.data):
            return GLOBAL if batch_size == GLOBAL else None
        return None if batch_size == GLOBAL else batch_size

    def build(
        self, placement: Placement, cores: Cores, batch_size: int | str | None, train_steps: int | None
    ) -> Validation | None:
        """Return the data to validate on and the schedule; None if there is nothing to validate on.

        `batch_size` is that of training, `train_steps` the number of steps in its epoch, if known.
        """
        if self.data is None:
            for name in ("step_freq", "limit"):
                if getattr(self, name) is not None:
                    raise ArgumentError(f"validation_{name} needs validation_data or validation_split to validate on")
            return None
        held_out = evaluation_stream(self.data, self.rows_per_core(batch_size), placement, cores, self.steps)
        if self.limit is not None:
            held_out.limit(self.limit, "validation_limit")
        every = None if self.step_freq is None else steps_between(self.step_freq, train_steps)
        return Validation(held_out, self.freq, every)


def steps_between(freq: int | float, steps: int | None) -> int:
    """Return the number of steps between two validations inside an epoch; as a float, `freq` is a share of it.

    Raises:
        ArgumentError: The number is never reached, or the share can't be computed.
    """
    if isinstance(freq, float) and 0 < freq <= 1:
        if steps is None:
            raise ArgumentError(
                f"validation_step_freq={freq}: the data don't say how many batches they have; give a number of steps"
            )
        return max(1, round(freq * steps))
    freq = require_whole("validation_step_freq", freq, otherwise="a share of an epoch such as 0.25")
    if steps is not None and freq > steps:
        raise ArgumentError(
            f"validation_step_freq={freq} is never reached: an epoch has {counted(steps, 'step')}. Use validation_freq "
            "to validate at the end of every so many epochs"
        )
    return freq


@dataclass(frozen=True)
class Schedule:
    """The course of a `fit`. The attributes are arguments of `Model.fit`, under their names.

    Raises:
        ArgumentError: A number out of range.
    """

    epochs: int | None = None
    initial_epoch: int = 0
    min_epochs: int = 0
    max_steps: int | None = None
    limit: int | float | None = None
    max_time: float | timedelta | None = None
    resume: bool | str | os.PathLike[str] = False
    strict: bool = False

    def __post_init__(self) -> None:
        for name, least in (("epochs", 0), ("initial_epoch", 0), ("min_epochs", 0), ("max_steps", 1)):
            value = getattr(self, name)
            if value is not None or name in ("initial_epoch", "min_epochs"):
                _set(self, name, require_whole(name, value, least))
        _check_limit(self, "limit")
        if self.max_time is not None:
            wanted = "a number of seconds above 0 or a timedelta"
            require_number("max_time", self.seconds, wanted, lambda seconds: seconds > 0)
        if not isinstance(self.resume, (bool, str, os.PathLike, type(None))) or self.resume == "":
            forms = "True, False, 'best', 'next_epoch' or a path"
            raise ArgumentError(f"resume must be {forms}, got {short_repr(self.resume)}")
        _set(self, "strict", require_flag("strict", self.strict))

    @property
    def seconds(self) -> float | None:
        """`max_time` in seconds, or None."""
        return self.max_time.total_seconds() if isinstance(self.max_time, timedelta) else self.max_time

    def policy(self, engine: Engine) -> Strict:
        """Return the policy on whatever makes steps slow. Its errors name the user's line.

        Raises:
            ArgumentError: `strict` is set, but steps run eagerly.
        """
        if self.strict and engine.config.run_eagerly:
            raise ArgumentError(
                "strict=True looks at graphs, and compile(run_eagerly=True) makes none: use one of them"
            )
        return Strict(users_line()) if self.strict else LENIENT

    def params(self, steps: int | None, accumulate_steps: int) -> dict[str, int | None]:
        """Return the course of training as callbacks get it, see `Callback.params`; `steps` are an epoch's batches."""
        updates = None if steps is None else ceil(steps / accumulate_steps)
        epochs = self.epochs
        if epochs is None:
            epochs = 1 if self.max_steps is None else self.initial_epoch + ceil(self.max_steps / (updates or 1))
        total = None if updates is None else updates * epochs
        if self.max_steps is not None:
            total = self.max_steps if total is None else min(total, self.max_steps)
        return {"epochs": epochs, "updates": updates, "max_steps": self.max_steps, "total_steps": total}


def evaluation_stream(
    data: Any,
    batch_size: int | str | None,
    placement: Placement,
    cores: Cores,
    steps: int | None,
    name: str = "validation_data",
) -> Stream:
    """Return the stream of the global batches to evaluate on: of `steps`, if given, which errors call by `name`."""
    return _stream(parts_of(data), batch_size, placement, cores, steps=steps, restart=True, name=name)


def parts_of(data: Any) -> tuple[Any, ...]:
    """Return the inputs of data to evaluate on, and their targets and weights if these are apart."""
    return data if isinstance(data, tuple) and 2 <= len(data) <= 3 else (data,)


def _stream(data: Any, batch_size: int | str | None, placement: Placement, cores: Cores, **how: Any) -> Stream:
    return stream(*data, batch_size=batch_size, cores=cores.count, local_shards=placement.local_shards, **how)


def require_compiled(engine: Engine, method: str) -> None:
    """Check that the model has the optimizer and the loss that a method, which the error names, needs.

    Raises:
        NotCompiledError: `compile` has not been called, or was given no loss and nothing computes one.
    """
    if not engine.compiled:
        raise NotCompiledError(
            f"{method} needs a compiled model: call model.compile(optimizer='adamw', loss='cross_entropy') first"
        )
    kind: Any = type(engine.model)
    if kind.train_step is StepMethods.train_step and kind.compute_loss is StepMethods.compute_loss:
        losses.required(engine.config.loss, method)


def require_gradients(method: str) -> None:
    """Check that PyTorch computes gradients, which a method, named in the error, needs.

    Raises:
        ArgumentError: It is told not to, so that nothing could be learnt.
    """
    if not torch.is_grad_enabled():
        raise ArgumentError(f"{method} is called under torch.no_grad() or torch.inference_mode(): call it outside")


def require_learning(engine: Engine) -> None:
    """Check that an optimizer has what was added to the module, and that a model of peft has adapters that learn.

    Any other module may have no weights that do, as in Keras.

    Raises:
        ArgumentError: A layer has come after `compile`, and no optimizer has its parameters; or all of peft's weights
            are frozen.
    """
    module = engine.model.module
    added = engine.state.untrained()
    if added:
        layer = added[0].rpartition(".")[0] or "..."
        raise ArgumentError(
            f"{few(added)} came into the module after compile, and no optimizer has them: they would not learn. "
            "Call compile again, or model.optimizer.add_param_group({'params': "
            f"model.module.get_submodule({layer!r}).parameters()}}); or freeze them by requires_grad_(False)"
        )
    if any(p.requires_grad for p in module.parameters()) or not any(
        hasattr(m, "peft_config") for m in module.modules()
    ):
        return
    raise ArgumentError(
        "this model of peft has no weight that learns: load adapters with PeftModel.from_pretrained(..., "
        "is_trainable=True), or add some with get_peft_model(...), and freeze nothing afterwards"
    )


def require_one_schedule(callbacks: Sequence[object]) -> None:
    """Check that no two callbacks give each step its rate.

    Raises:
        ArgumentError: There are two, of which the later one would win.
    """
    names = [type(callback).__name__ for callback in callbacks if getattr(callback, "sets_each_step", False)]
    if len(names) > 1:
        raise ArgumentError(
            f"{' and '.join(names)} each give every step its rate, and the last would win: pass one of them"
        )


def callback_list(engine: Engine, callbacks: Any, params: dict[str, Any], *own: Callback) -> CallbackList:
    """Return the callbacks, then `own`, and a progress bar if one is wanted and missing: a silent one would cost time.

    A `CallbackList` of the user's gets no bar, as in Keras.
    """
    add_progbar = bool(params["verbose"]) and not isinstance(callbacks, CallbackList)
    # The engine's model is the user's own, with all that callbacks may touch.
    model: Any = engine.model
    all_callbacks = CallbackList([*CallbackList(callbacks), *own], False, add_progbar, model, **params)
    all_callbacks.expose = engine.expose
    all_callbacks.note_users_code = engine.note_users_code
    engine.note_users_code(seldom=True)  # the user's program, which has called this
    return all_callbacks
