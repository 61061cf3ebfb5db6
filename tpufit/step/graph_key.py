"""What a step's graph depends on that user code may change between steps: then another graph is needed."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..runtime import count_capture

# What a group keeps of its rate, which is an input of a graph, and of where that came from.
_OF_RATES = ("lr", "initial_lr", "lr_ratio", "lr_factor", "scaled_lr")

# So often a role's graph may be made anew for one reason until it is said: by then it is a habit.
_OFTEN = 4


@dataclass(frozen=True)
class Guard:
    """A snapshot of it; equal snapshots have one graph for each shape of a batch.

    Attributes:
        modes: Of each module whether it is training.
        learning: Of each parameter whether it requires a gradient.
        parameters: Which objects the parameters are.
        options: See `options`.
        python: The numbers, words and flags that the user's classes keep.
    """

    modes: tuple[bool, ...]
    learning: tuple[bool, ...]
    parameters: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]
    python: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, module: nn.Module, optimizers: Iterable[Optimizer], python: dict[str, Any]) -> Guard:
        """The snapshot of now.

        Args:
            module: The user's module.
            optimizers: The optimizers that its steps use.
            python: Names and values that a step's Python may look at.
        """
        return cls(
            tuple(part.training for part in module.modules()),
            tuple(parameter.requires_grad for parameter in module.parameters()),
            tuple(map(id, module.parameters())),
            options(optimizers),
            tuple(python.items()),
        )

    def change(self, later: Guard, module: nn.Module) -> str:
        """What is another in a later snapshot, for people.

        Args:
            later: The other snapshot.
            module: The user's module, whose names are told.
        """
        if self.parameters != later.parameters or len(self.modes) != len(later.modes):
            return "the module's parameters"
        for kind, ours, theirs, names in (
            ("the training mode of", self.modes, later.modes, module.named_modules()),
            ("requires_grad of", self.learning, later.learning, module.named_parameters()),
        ):
            for one, other, (name, part) in zip(ours, theirs, names, strict=True):
                if one != other:
                    return f"{kind} {name or type(part).__name__}"
        for pairs, others, where in (
            (self.options, later.options, " in the optimizer's param_groups"),
            (self.python, later.python, ""),
        ):
            changed = sorted({name for name, _ in set(pairs) ^ set(others)})
            if changed:
                return f"{changed[0]}{where}"
        return "nothing that has a name"

    def values(self, later: Guard) -> str:
        """From what to what the number or word has changed that `change` tells of, e.g. `" (from 0.9 to 0.5)"`."""
        for pairs, others in ((self.options, later.options), (self.python, later.python)):
            before, after = (sorted(set(a) - set(b), key=str) for a, b in ((pairs, others), (others, pairs)))
            if before and after and before[0][0] == after[0][0]:
                return f" (from {before[0][1]!r} to {after[0][1]!r})"
        return ""


def options(optimizers: Iterable[Optimizer]) -> tuple[tuple[str, Any], ...]:
    """The options in the optimizers' groups, but for the rates, which are inputs of a graph."""
    return tuple(
        (key, value if isinstance(value, (int, float, str, bool, tuple)) else id(value))
        for optimizer in optimizers
        for group in optimizer.param_groups
        for key, value in group.items()
        if key not in _OF_RATES
    )


class Guards:
    """The snapshots met by the steps of a model, each with a number that stands for it: comparing them takes long.

    Attributes:
        causes: What was new about each snapshot, by its number, e.g. `"momentum in ... changed (from 0.9 to 0.5)"`.
    """

    def __init__(self) -> None:
        self.causes: dict[int, str] = {}
        self._met: dict[Guard, int] = {}
        self._last: dict[str, Guard] = {}
        self._changes: dict[tuple[str, str], int] = {}

    def number(self, role: str, guard: Guard, module: nn.Module) -> int:
        """The snapshot's number. A new one is counted as a capture, by what has changed.

        Args:
            role: Whose step it is for: `"train"`, `"eval"` or `"predict"`.
            guard: The snapshot.
            module: The user's module.
        """
        before = self._last.get(role)
        self._last[role] = guard
        if guard not in self._met:
            self._met[guard] = len(self._met)
            if before is not None and before != guard:
                change = before.change(guard, module)
                self.causes[self._met[guard]] = f"{change} changed{before.values(guard)}"
                self._note(role, change)
        return self._met[guard]

    def _note(self, role: str, change: str) -> None:
        count_capture(change)
        self._changes[role, change] = self._changes.get((role, change), 0) + 1
        if self._changes[role, change] == _OFTEN:
            warnings.warn(
                f"the {role} step has been compiled anew {_OFTEN} times because {change} changed: it is part of the "
                "graph, and only the learning rate is an input. Change it seldom, or keep it as it is",
                stacklevel=2,
            )
