"""The arguments of `fit`, `evaluate` and `predict`: the classes that own and check them, and the streams made of them.

An argument is checked when its owner is made. All later functions get valid values.

| owner | arguments |
| --- | --- |
| `TrainingData` | data (x, y, sample_weight), batch_size, shuffle, steps_per_epoch, class_weight, device_transform, \
last_batch |
| `EvaluationData` | data (x, y, sample_weight), batch_size, steps |
| `ValidationData` | validation_split, validation_data, validation_steps, validation_batch_size, validation_freq, \
validation_step_freq, validation_limit |
| `Schedule` | epochs, initial_epoch, min_epochs, max_steps, limit, max_time, resume, strict, \
sanity_steps |
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from math import ceil
from typing import Any

import numpy as np

from ..backend import Cores, Placement
from ..data import Compose, Stream, Transform
from ..data.stream import GLOBAL, SHUFFLES, make_stream, require_batch_size, require_limit
from ..data.user_data import UserData
from ..errors import (
    ArgumentError,
    require_choice,
    require_count_or_share,
    require_flag,
    require_number,
    require_whole,
    short_repr,
)
from ..losses import ClassWeight, LossByOutput, make_class_weight
from ..step import Engine
from ..utils.strict import LENIENT, Strict
from ..utils.user_code import find_user_line
from .last_batch import CHOICES
from .validation import Validation, steps_between_validations

AUTO = "auto"  # the batch size that `fit` and `preflight` choose themselves


def _set(record: Any, name: str, value: object) -> None:
    """Set a field of a frozen dataclass in its `__post_init__`."""
    object.__setattr__(record, name, value)


def _is_positive_whole(value: object) -> bool:
    """True for a whole number of at least 1."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value >= 1)


@dataclass(frozen=True)
class TrainingData:
    """The training data of a `fit`. The attributes except `data` are arguments of `Model.fit` of the same names."""

    data: UserData  # x, y and sample_weight
    batch_size: Any = None
    shuffle: bool | str = True
    steps_per_epoch: int | None = None
    class_weight: Mapping[int, float] | str | None = None
    device_transform: Transform | None = None
    last_batch: str = "exact"

    def __post_init__(self) -> None:
        require_choice("last_batch", self.last_batch, *CHOICES)
        _set(self, "batch_size", require_batch_size("batch_size", self.batch_size, AUTO, GLOBAL))
        if self.steps_per_epoch is not None:
            _set(self, "steps_per_epoch", require_whole("steps_per_epoch", self.steps_per_epoch))
        require_choice("shuffle", self.shuffle, *SHUFFLES)
        if self.device_transform is not None and not callable(self.device_transform):
            raise ArgumentError(f"device_transform must be a function of a batch, got {self.device_transform!r}")
        if isinstance(self.device_transform, type):
            name = self.device_transform.__name__
            raise ArgumentError(
                f"device_transform must be a function of a batch, got the class {name}: pass an instance, {name}()"
            )

    def make_class_weight(self, engine: Engine) -> ClassWeight | None:
        """Check the class weights and return them.

        Raises:
            ArgumentError: The weights are invalid, or the loss has several outputs.
        """
        weights = make_class_weight(self.class_weight, self.data.y)
        if weights is not None and isinstance(engine.config.loss, LossByOutput):
            raise ArgumentError(
                "class_weight needs a loss of one output, and this loss has several: pass sample_weight in the form "
                "of y"
            )
        return weights

    def stream(self, placement: Placement, cores: Cores, seed: int) -> Stream:
        """Return the stream of the global batches to train on.

        Raises:
            ArgumentError: The batch size is `"auto"`, and the method can't choose it.
        """
        if self.batch_size == AUTO:
            raise ArgumentError(
                f"batch_size must be a whole number of at least 1 or {GLOBAL!r}, got {AUTO!r}, which only fit and "
                "preflight take"
            )
        data = make_stream(
            self.data,
            batch_size=self.batch_size,
            cores=cores.count,
            shuffle=self.shuffle,
            seed=seed,
            steps=self.steps_per_epoch,
            local_shards=placement.local_shards,
        )
        if self.device_transform is not None:
            first = data.device_transform
            data.device_transform = self.device_transform if first is None else Compose(first, self.device_transform)
        return data


@dataclass(frozen=True)
class EvaluationData:
    """The data of an `evaluate` or a `predict`. The attributes except `data` are arguments of the same names."""

    data: UserData  # x, y and sample_weight
    batch_size: int | str | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        _set(self, "batch_size", require_batch_size("batch_size", self.batch_size, GLOBAL))
        if self.steps is not None:
            _set(self, "steps", require_whole("steps", self.steps))

    def stream(self, placement: Placement, cores: int) -> Stream:
        """Return the stream of the global batches of a number of cores."""
        return _make_evaluation_stream(self.data, self.batch_size, self.steps, placement, cores)


@dataclass(frozen=True)
class ValidationData:
    """The validation of a `fit`. The attributes are arguments of `Model.fit`, without their prefix `validation_`."""

    split: float = 0.0
    data: UserData | None = None
    steps: int | None = None
    batch_size: int | str | None = None
    freq: int | Container[int] = 1
    step_freq: int | float | None = None
    limit: int | float | None = None

    def __post_init__(self) -> None:
        given = 0.0 if self.split is None or self.split is False else self.split
        split = require_number("validation_split", given, "a share from 0 to below 1", lambda share: 0 <= share < 1)
        _set(self, "split", split)
        _set(self, "batch_size", require_batch_size("validation_batch_size", self.batch_size, GLOBAL))
        if self.steps is not None:
            _set(self, "steps", require_whole("validation_steps", self.steps))
        freq: Any = self.freq
        if isinstance(freq, Container) and not isinstance(freq, (str, bytes, Mapping)):
            if isinstance(freq, Iterable) and not all(_is_positive_whole(epoch) for epoch in freq):
                wanted = "a whole number of at least 1, or a collection of such numbers"
                raise ArgumentError(f"validation_freq must be {wanted}, got {short_repr(freq)}")
        else:
            _set(self, "freq", require_whole("validation_freq", freq, otherwise="a list of the epochs, from 1"))
        if self.step_freq is not None:
            wanted = "a whole number of at least 1 or a share of an epoch such as 0.25"
            _set(self, "step_freq", require_count_or_share("validation_step_freq", self.step_freq, wanted))
        if self.limit is not None:
            _set(self, "limit", require_limit("validation_limit", self.limit))

    @property
    def given(self) -> bool:
        """True if there are validation data."""
        return bool(self.split) or self.data is not None

    def with_limit_of(self, schedule: Schedule) -> ValidationData:
        """Return the same data with the limit of a schedule, unless they have a limit already.

        Raises:
            ArgumentError: The schedule has `sanity_steps`, but there are no validation data, or they can be read only
                once.
        """
        if schedule.sanity_steps and not self.given:
            raise ArgumentError("sanity_steps needs validation_data or validation_split to validate on")
        if schedule.sanity_steps and self.data is not None and isinstance(self.data.x, Iterator):
            raise ArgumentError(
                f"sanity_steps would consume batches of validation_data, a {type(self.data.x).__name__} that can be "
                "read only once: pass data that can be read again, such as a list of the batches or a DataLoader"
            )
        return replace(self, limit=schedule.limit) if self.limit is None and self.given else self

    def first_batches(self, steps: int) -> ValidationData:
        """Return the same data limited to their first `steps` batches, without validation inside epochs."""
        return replace(self, limit=steps, step_freq=None)

    def split_off(self, train: TrainingData) -> tuple[TrainingData, ValidationData]:
        """Split the last rows off the training data for validation, if `validation_split` is given."""
        if not self.split or self.data is not None:
            return train, self
        data, held_out = train.data.split(self.split)
        return replace(train, data=data), replace(self, data=held_out)

    def choose_batch_size(self, batch_size: int | str | None) -> int | str | None:
        """Return the validation's batch size, by default the batch size of training if the data take one."""
        if self.batch_size is not None:
            return self.batch_size
        if self.data is not None and self.data.has_batches:
            return GLOBAL if batch_size == GLOBAL else None
        return None if batch_size == GLOBAL else batch_size

    def build(
        self, placement: Placement, cores: Cores, batch_size: int | str | None, train_steps: int | None
    ) -> Validation | None:
        """Return the validation; None without validation data.

        `batch_size` is training's batch size, `train_steps` the number of steps in its epoch, if known.
        """
        if self.data is None:
            for name in ("step_freq", "limit"):
                if getattr(self, name) is not None:
                    raise ArgumentError(f"validation_{name} needs validation_data or validation_split to validate on")
            return None
        size = self.choose_batch_size(batch_size)
        held_out = _make_evaluation_stream(self.data, size, self.steps, placement, cores.count)
        if self.limit is not None:
            held_out.limit(self.limit, "validation_limit")
        every = None if self.step_freq is None else steps_between_validations(self.step_freq, train_steps)
        return Validation(held_out, self.freq, every)


@dataclass(frozen=True)
class Schedule:
    """The schedule of a `fit`. The attributes are arguments of `Model.fit` of the same names.

    Raises:
        ArgumentError: A number is out of range.
    """

    epochs: int | None = None
    initial_epoch: int = 0
    min_epochs: int = 0
    max_steps: int | None = None
    limit: int | float | None = None
    max_time: float | timedelta | None = None
    resume: bool | str | os.PathLike[str] = False
    strict: bool = False
    sanity_steps: int = 0

    def __post_init__(self) -> None:
        for name, least in (("epochs", 0), ("max_steps", 1)):
            value = getattr(self, name)
            if value is not None:
                _set(self, name, require_whole(name, value, least))
        for name in ("initial_epoch", "min_epochs", "sanity_steps"):
            _set(self, name, require_whole(name, getattr(self, name), 0))
        if self.limit is not None:
            _set(self, "limit", require_limit("limit", self.limit))
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

    def make_strict(self, engine: Engine) -> Strict:
        """Return the policy on what slows down steps. Its errors name the user's line.

        Raises:
            ArgumentError: `strict` is set, but steps run eagerly.
        """
        if self.strict and engine.config.run_eagerly:
            raise ArgumentError(
                "strict=True checks graphs, and compile(run_eagerly=True) makes none: use one of the two"
            )
        return Strict(find_user_line()) if self.strict else LENIENT

    def params(self, steps: int | None, accumulate_steps: int) -> dict[str, int | None]:
        """Return the schedule as callbacks get it, see `Callback.params`; `steps` is an epoch's number of batches."""
        updates = None if steps is None else ceil(steps / accumulate_steps)
        epochs = self.epochs
        if epochs is None:
            epochs = 1 if self.max_steps is None else self.initial_epoch + ceil(self.max_steps / (updates or 1))
        total = None if updates is None else updates * epochs
        if self.max_steps is not None:
            total = self.max_steps if total is None else min(total, self.max_steps)
        return {"epochs": epochs, "updates": updates, "max_steps": self.max_steps, "total_steps": total}


def _make_evaluation_stream(
    data: UserData, batch_size: int | str | None, steps: int | None, placement: Placement, cores: int
) -> Stream:
    shards = placement.local_shards
    return make_stream(data, batch_size=batch_size, cores=cores, steps=steps, restart=True, local_shards=shards)
