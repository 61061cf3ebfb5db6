"""The key of a step's graph: everything that the graph depends on except the values of tensors.

User code may change something between two steps: a layer's mode, an optimizer's option, a number in a module. Each
change needs another graph, which is traced and compiled. Comparing everything takes long, so each snapshot gets a
number once, and a key consists of numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..data import Compose
from ..optimizers import list_constants
from ..utils.counters import count_capture
from ..utils.strict import LENIENT, Strict
from ..utils.user_code import warn
from .shape_watch import ShapeWatch

Parts = Sequence[nn.Module]
"""The module, the losses that are modules, and the modules that the model keeps."""

# Warn after this many captures for the same reason; fewer may be chance.
_OFTEN = 4


@dataclass(frozen=True)
class Guard:
    """A snapshot of the Python that a step's graph depends on. Equal snapshots share a graph for each batch shape."""

    modes: tuple[bool, ...]  # `training` of each part of the modules
    learning: tuple[bool, ...]  # `requires_grad` of each parameter
    parameters: tuple[int, ...]  # their `id`
    options: tuple[tuple[str, Any], ...]  # of the optimizers, see `list_constants`
    python: tuple[tuple[str, Any], ...]  # of the user's objects, see `python_state.list_values`

    @classmethod
    def of(cls, modules: Parts, optimizers: Iterable[Optimizer], python: dict[str, Any]) -> Guard:
        """Take a snapshot."""
        parameters = [parameter for module in modules for parameter in module.parameters()]
        return cls(
            tuple(part.training for module in modules for part in module.modules()),
            tuple(parameter.requires_grad for parameter in parameters),
            tuple(map(id, parameters)),
            list_constants(optimizers),
            tuple(python.items()),
        )

    def describe_change(self, later: Guard, modules: Parts) -> str:
        """Name the first difference from a later snapshot, e.g. `"momentum in the optimizer's param_groups"`."""
        if self.parameters != later.parameters or len(self.modes) != len(later.modes):
            return "the module's parameters"
        for kind, ours, theirs, names in (
            ("the training mode of", self.modes, later.modes, [p for m in modules for p in m.named_modules()]),
            ("requires_grad of", self.learning, later.learning, [p for m in modules for p in m.named_parameters()]),
        ):
            for before, after, (name, part) in zip(ours, theirs, names, strict=True):
                if before != after:
                    return f"{kind} {name or type(part).__name__}"
        for pairs, others, where in (
            (self.options, later.options, " in the optimizer's param_groups"),
            (self.python, later.python, ""),
        ):
            changed = sorted({name for name, _ in set(pairs) ^ set(others)})
            if changed:
                return f"{changed[0]}{where}"
        return "something without a name"

    def describe_values(self, later: Guard, varying: Mapping[str, tuple[Any, Any]]) -> str:
        """Give both values of the option or fact that `describe_change` names, e.g. `" (from 0.9 to 0.5)"`."""
        for pairs, others in ((self.options, later.options), (self.python, later.python)):
            before, after = (sorted(set(a) - set(b), key=str) for a, b in ((pairs, others), (others, pairs)))
            if before and after and before[0][0] == after[0][0]:
                return f" (from {before[0][1]!r} to {after[0][1]!r})"
            if before and not after and before[0][0] in varying:
                return " (from {!r} to {!r})".format(*varying[before[0][0]])
        return ""


class GraphKeys:
    """Makes the keys of one role's graphs: numbers their parts, and notes for reports what made each part new.

    The snapshot is renewed only when user code may have changed something.
    """

    def __init__(self, role: str, python: Callable[[], dict[str, Any]]) -> None:
        self._role = role
        self._python = python
        # The change that made each snapshot new, by its number: "momentum in ... changed (from 0.9 to 0.5)".
        self.changes: dict[int, str] = {}
        self._guards: dict[Guard, int] = {}
        self._times: dict[str, int] = {}  # the number of captures, by change
        self._signatures: list[Any] = []
        self._transforms: list[
            Any
        ] = []  # a list, because some can't be hashed; it keeps them alive, so that no `id` is reused
        self._shapes = ShapeWatch(role)
        self._last: Guard | None = None
        # Of the current pass.
        self._strict = LENIENT
        self._transform = 0
        self._guard: Guard | None = None
        self._number = 0
        self._hooked = False

    def begin_pass(self, transform: Any, strict: Strict) -> None:
        """Begin a pass over data; a strict pass refuses a batch of a new shape, and a new snapshot."""
        self._strict = strict
        self._transform = self._number_of(transform)
        self._guard = None
        self._hooked = False

    def signature(self, structure: Any) -> int:
        """Return the number of a batch's structure, shapes and dtypes."""
        try:
            return self._signatures.index(structure)
        except ValueError:
            self._signatures.append(structure)
            return len(self._signatures) - 1

    def note_shape(self, signature: int, batch: Any) -> None:
        """Watch for batches of too many shapes; see `ShapeWatch.note`."""
        self._shapes.note(signature, batch, self._strict)

    def _number_of(self, transform: Any) -> int:
        for number, known in enumerate(self._transforms):
            if known is transform or (isinstance(known, Compose) and known.has_same_parts(transform)):
                return number
        self._transforms.append(transform)
        return len(self._transforms) - 1

    def _number_guard(self, guard: Guard, modules: Parts, varying: Mapping[str, tuple[Any, Any]]) -> int:
        """Return the number of a snapshot. A new snapshot counts as a capture, for the change that made it new."""
        before = self._last
        self._last = guard
        if guard not in self._guards:
            self._guards[guard] = len(self._guards)
            if before is not None and before != guard:
                change = before.describe_change(guard, modules)
                self.changes[self._guards[guard]] = f"{change} changed{before.describe_values(guard, varying)}"
                self.count_change(change)
        return self._guards[guard]

    def count_change(self, change: str) -> None:
        """Count a change that needs another graph; warn once it has often happened."""
        count_capture(change)
        self._times[change] = self._times.get(change, 0) + 1
        if self._times[change] == _OFTEN:
            warn(
                f"the {self._role} step has been compiled {_OFTEN} times because {change} changed: it is part of the "
                "graph, whose only inputs are the optimizer's numbers, such as the learning rate. Change it rarely, or "
                "not at all",
            )

    def note_hooks(self) -> None:
        """Note that the user's Python has run, which may have changed the optimizer's options."""
        self._hooked = True

    def may_have_changed(self, held: bool) -> bool:
        """True if the optimizer's options can have changed since the last snapshot; see `confirm`."""
        return self._hooked or not held or self._guard is None

    def confirm(self, optimizers: Iterable[Optimizer], held: bool) -> bool:
        """Check whether the snapshot still holds, and note that it has been checked; False if it must be renewed.

        If the weights were `held` since the last step, user code can only have changed the optimizer's options. A
        callback that reads weights makes `held` False, and may have changed anything.
        """
        hooked = self._hooked
        self._hooked = False
        return held and self._guard is not None and (not hooked or self._guard.options == list_constants(optimizers))

    def refresh(
        self,
        modules: Parts,
        optimizers: Iterable[Optimizer],
        known_keys: Iterable[Any],
        varying: Mapping[str, tuple[Any, Any]],
    ) -> None:
        """Renew the snapshot. `varying` has both values of options that have become inputs, for reports.

        Raises:
            StrictError: The snapshot is new, and the pass is strict.
        """
        self._guard = Guard.of(modules, optimizers, self._python())
        self._number = self._number_guard(self._guard, modules, varying)
        if self._strict and self._number not in {key[0] for key in known_keys}:
            self._strict.refuse(
                f"after its first pass over the data the {self._role} step needs another graph, because "
                f"{self._cause_of_snapshot()}. Only the optimizer's numbers, such as the learning rate, are inputs of "
                "a graph: change the rest before fit, or fit without strict=True"
            )

    def make_key(self, signature: int, steps: int, stacked: bool, updates: Iterable[Hashable]) -> tuple[Any, ...]:
        """Return the key of the graph of some steps. `updates` has a plan for each step, or none if all are alike."""
        return (self._number, self._transform, signature, steps, stacked, *updates)

    def explain_capture(self, key: tuple[Any, ...], steps: int, known_keys: set[Any]) -> str:
        """Explain why a call needs a new graph, for the report."""
        if not known_keys:
            return "it is the first step"
        if key in known_keys:
            return "the previous step created new state"
        if type(key[-1]) is int and any(other[:-1] == key[:-1] for other in known_keys):
            return "the optimizer computes its numbers differently"
        guard, transform, signature = key[:3]
        if guard not in {other[0] for other in known_keys}:
            return self._cause_of_snapshot()
        if transform not in {other[1] for other in known_keys}:
            return "the data have another device_transform"
        if signature not in {other[2] for other in known_keys}:
            return self._shapes.changes[signature]
        alike = [other for other in known_keys if other[:3] == key[:3]]
        if not alike:
            return "this combination of a batch's shape with the options and the Python of the step is new"
        if steps not in {other[3] for other in alike}:
            return f"{steps} step{'s run' if steps > 1 else ' runs'} as one graph"
        return "it uses its gradients differently"

    def _cause_of_snapshot(self) -> str:
        return self.changes.get(self._number, "its options changed")
