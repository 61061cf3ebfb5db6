"""A model without training, with the members that callbacks may use, for tests that pass numbers to callbacks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from tpufit.callbacks.base import TrainedModel
from tpufit.checkpoint import AsyncCheckpointWriter, Score, write_weights
from tpufit.diagnostics.report import Report
from tpufit.utils.counters import Counts


class FakeModel:
    """A single weight, whose value a test sets to distinguish the weights of epochs."""

    def __init__(self, directions: Mapping[str, bool] | None = None, lr: float = 0.1) -> None:
        self.module: nn.Module = nn.Linear(1, 1, bias=False)
        self.optimizer: torch.optim.Optimizer | None = torch.optim.SGD(self.module.parameters(), lr=lr)
        self.input_bound: float | None = None
        self.stop_training = self.out_of_time = False
        self.rows_seen = self.steps_taken = 0
        self.memory_used: int | None = None
        self.first_bad_step: int | None = None
        self.saved: list[str] = []
        self.wanted: list[tuple[AsyncCheckpointWriter, Score | None]] = []
        self._directions = directions or {}

    def speed(self, steps_per_second: float) -> dict[str, float]:
        return {}

    @property
    def learning_rate(self) -> float:
        assert self.optimizer is not None
        return float(self.optimizer.param_groups[0]["lr"])

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        assert self.optimizer is not None
        self.optimizer.param_groups[0]["lr"] = rate

    @property
    def weight(self) -> float:
        return float(self.module.state_dict()["weight"])

    @weight.setter
    def weight(self, value: float) -> None:
        self.module.load_state_dict({"weight": torch.full((1, 1), float(value))})

    def state_dict(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.module.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.module.load_state_dict(dict(state))

    def summary(self, print_fn: Callable[[str], object] | None = None) -> None:
        (print_fn or print)("layer   type\nmodule  Linear")

    def save_weights(self, filepath: str | os.PathLike[str], *, finite_only: bool = False) -> None:
        write_weights(filepath, self.state_dict())
        self.saved.append(os.fspath(filepath))

    def save_checkpoint(self, writer: AsyncCheckpointWriter, metric: Score | None = None) -> None:
        self.wanted.append((writer, metric))

    def swap_ema_weights(self, to: bool | None = None) -> None:
        raise NotImplementedError

    def higher_is_better(self, name: str) -> bool | None:
        return self._directions.get(name.removeprefix("val_"))

    @property
    def metrics_names(self) -> list[str]:
        return ["loss", *self._directions]

    def report(self, verbose: bool = False) -> Report:
        return Report((), Counts(), {})


_: type[TrainedModel] = FakeModel  # mypy proves that the fake has the members that callbacks may use
