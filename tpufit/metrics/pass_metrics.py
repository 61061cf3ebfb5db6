"""`PassMetrics`: the running values of a pass over the data.

Sums stay on the device, inside the step's graph; they are read once a pass, or when somebody looks at a batch's logs.
torchmetrics then computes on the host, from sums over exactly the rows that were seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..backend import Placement, turns
from ..errors import ArgumentError, DataError
from ..losses import Averages, Mean
from ..runtime import COUNTS, to_device, to_host
from .lazy_logs import LazyLogs
from .sums import Key, SumTable
from .tracked import TrackedMetric, one_by_one

if TYPE_CHECKING:
    import torchmetrics

    from .metric import Metric

# The key of a sum that counts the finite steps. The first step that isn't finite makes it negative, and it stays as it
# is then: one number tells both. A replayed step doesn't know its own number.
_FINITE: Key = (None, "finite")

# What sums begin with.
_NONE = torch.zeros((), dtype=COUNTS)
_ZERO = torch.zeros(())
_WEIGHTS = torch.zeros(2, 2)


class PassMetrics(SumTable):
    """The running values of a pass over the data: means of the scalars that its steps return, and metrics.

    The metrics are those of `compile`, and those that the model's own steps update. If it `watches`, it notes the first
    step that returns a scalar which is not finite.
    """

    def __init__(self, metrics: Sequence[Metric | TrackedMetric], placement: Placement, watches: bool = False) -> None:
        super().__init__(placement)
        self._metrics = list(metrics)
        self._watches = watches
        # Of the step being traced, the batches that metrics keep, each with its slot.
        self.kept: list[tuple[int, Sequence[Tensor]]] = []
        self.rows = 0  # of the pass so far
        # Called with `finite` on the host whenever the sums have been fetched.
        self.on_finite: Callable[[Tensor], None] = lambda finite: None
        self._returned: list[str] = []  # the names of the logs that steps return: means, and tracked metrics
        self._slots: dict[str, int] = {}  # the slot of each log that is a metric
        self._batches: list[list[tuple[Tensor, ...]]] = [[] for _ in metrics]
        self._noted: dict[str, Tensor] = {}

    @property
    def names(self) -> list[str]:
        """The names of the logs that there are so far."""
        return list(dict.fromkeys([*self._returned, *self._slots]))

    def tracks(self, metrics: Iterable[torchmetrics.Metric]) -> bool:
        """True if these objects are the ones that the model's own steps update."""
        own = [metric.metric for metric in self._metrics if isinstance(metric, TrackedMetric)]
        return list(map(id, own)) == list(map(id, metrics))

    def reset(self) -> None:
        """Begin a new pass."""
        super().reset()
        self.rows = 0
        self._noted = {}
        self._batches = [[] for _ in self._metrics]

    def begin(self) -> None:
        """Begin the trace of a step."""
        super().begin()
        self.kept = []
        self._noted = {}

    def roll_back(self) -> None:
        """Return to the sums that the trace of a step began with, and let go what it gave metrics to keep."""
        super().roll_back()
        self.kept = []
        self._noted = {}

    @contextmanager
    def tracking(self, attributes: Mapping[str, Any]) -> Iterator[None]:
        """A context for the Python of a step, in which updates of the metrics among the attributes are part of it."""
        with ExitStack() as stack:
            stack.enter_context(one_by_one(attributes))
            for slot, metric in enumerate(self._metrics):
                if isinstance(metric, TrackedMetric):
                    stack.enter_context(metric.in_step(partial(self._track, slot, metric)))
            yield

    def _track(self, slot: int, metric: TrackedMetric, arguments: Sequence[Any]) -> None:
        self._slots.setdefault(metric.name, slot)
        self._keep(slot, metric.update(self, slot, arguments))

    def note(self, logs: Mapping[str, Tensor]) -> None:
        """Log scalars, means over the batch, inside a step besides those that it returns, which win."""
        self._noted |= logs

    def add_means(self, logs: Mapping[str, Any], rows: int, averages: Averages | None = None) -> None:
        """Add the scalars that a step returned, inside that step.

        Args:
            logs: The scalars, by name.
            rows: The rows of the batch, as `count` will count them.
            averages: What each of the scalars is the mean over (default: the rows).

        Raises:
            ArgumentError: One of them is no number, no tensor of one element and no tracked metric.
        """
        noted = self._noted
        self._noted = {}
        slots = {id(metric.metric): i for i, metric in enumerate(self._metrics) if isinstance(metric, TrackedMetric)}
        scalars: list[Tensor] = []
        for name, value in {**logs, **{name: noted[name] for name in noted if name not in logs}}.items():
            if name not in self._returned:
                self._returned.append(name)
            if (slot := slots.get(id(value))) is not None:
                own = self._metrics[slot].name
                if self._slots.get(own) == slot and own not in self._returned:
                    del self._slots[own]
                self._slots[name] = slot
                continue
            if not isinstance(value, (Tensor, Real)) or (isinstance(value, Tensor) and value.numel() != 1):
                what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
                raise ArgumentError(f"a step must return numbers or scalar tensors by name, got {name!r}: {what}")
            for i, mean in enumerate((averages or Averages(rows)).of(value)):
                scalars.append(self._add_mean(name, str(i or ""), mean, rows))
        if self._watches and scalars:
            steps = self.get(_FINITE, _NONE)
            # What is not finite is NaN if it is taken from itself, and NaN isn't equal to itself. (`isfinite` is more
            # operations, and one of them in 64 bits, which a TPU emulates.)
            rest = scalars[0] - scalars[0]
            for scalar in scalars[1:]:
                rest = rest + (scalar - scalar)
            self.set(_FINITE, torch.where(steps < 0, steps, torch.where(rest == rest, steps + 1, ~steps)))

    def _add_mean(self, name: str, part: str, mean: Mean, rows: int) -> Tensor:
        """Add one of the means whose sum is a log, and return it as a scalar."""
        scalar = self.placed(mean.value).float()
        scalar = scalar.reshape(()) if scalar.dim() else scalar
        weight = rows if mean.weight is None else mean.weight
        if isinstance(weight, Tensor):
            weight = weight.detach().float()
            scalar = scalar.masked_fill(weight == 0, 0)  # the mean over nothing is NaN
        total = (name, f"{'sum' if isinstance(weight, str) else 'total'}{part}")
        lost = (name, f"lost{part}")
        sums = self.get(total, _ZERO), self.get(lost, _ZERO)
        sums = _added(sums, scalar if isinstance(weight, str) else scalar * weight)
        self.set(total, sums[0])
        self.set(lost, sums[1])
        if isinstance(weight, Tensor) or (not isinstance(weight, str) and weight != rows):
            # `count` counts the rows, on the host. What this batch counts by instead is summed here, beside those rows.
            own = weight if isinstance(weight, Tensor) else torch.full((), weight, device=scalar.device)
            key = (name, f"weights{part}")
            weights = self.get(key, _WEIGHTS)
            pair = torch.stack([own, torch.full_like(own, rows)])
            self.set(key, torch.stack(_added((weights[0], weights[1]), pair)))
        return scalar

    @property
    def finite(self) -> Tensor | None:
        """The count of finite steps so far, on the device, or None before the first: see `first_bad`."""
        place = self._index.get(_FINITE)
        return None if place is None else self.tensors[place]

    def update_metrics(self, y_pred: Any, y: Any, sample_weight: Any = None) -> None:
        """Add a batch to every metric, inside a step."""
        for slot, metric in enumerate(self._metrics):
            if not isinstance(metric, TrackedMetric):
                self._slots[metric.name] = slot
                self._keep(slot, metric.update(self, slot, y_pred, y, sample_weight))

    def _keep(self, slot: int, batch: Sequence[Tensor] | None) -> None:
        if batch is not None:
            # Clones: a graph gives each output once, and two metrics may keep the same tensor, or two views of it. On a
            # pod each host reads all rows.
            whole = self.placement.gather if self.placement.hosts > 1 else torch.clone
            self.kept.append((slot, [whole(tensor) for tensor in batch]))

    def count(self, rows: int, kept: Sequence[tuple[int, Sequence[Tensor]]]) -> None:
        """Note a group of steps that was started, and the batches that it gave metrics to keep, each with its slot."""
        self.rows += rows
        for slot, batch in kept:
            self._batches[slot].append(tuple(batch))

    def results(self, reason: str) -> dict[str, Any]:
        """Compute the means and metrics over all rows so far. **This waits** for the device, once, for this reason."""
        return self._snapshot()(reason)

    def lazy(self) -> LazyLogs:
        """The means and metrics over all rows so far, fetched only if one is read."""
        snapshot = self._snapshot()

        def read() -> dict[str, Any]:
            with turns.taken("a batch's logs"):
                return snapshot("batch logs")

        return LazyLogs(self.names, read)

    def pop_sums(self) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], dict[str, float]]]:
        """Take the sums so far, on the device, and what makes the means of them on the host; a new pass begins."""
        names = [name for name in self._returned if name not in self._slots]
        taken = self.tensors, partial(self._means, names, self.rows)
        self.reset()
        return taken

    def _means(self, names: Sequence[str], rows: int, host: Sequence[Tensor]) -> dict[str, float]:
        return {name: self._mean(name, rows, host) for name in names}

    def _mean(self, name: str, rows: int, host: Sequence[Tensor]) -> float:
        """Compute a log of the sums, on the host, and the number of rows that `count` counted."""

        def read(sum_name: str) -> Any:
            place = self._index.get((name, sum_name))
            return None if place is None else host[place].numpy().astype(np.float64)

        value = 0.0
        for part in map(str, ["", *range(1, len(self._index))]):
            total, whole, weights = (read(f"{kind}{part}") for kind in ("total", "sum", "weights"))
            if total is None and whole is None:
                break
            weight = float(rows)
            if weights is not None:
                own, instead_of = weights[0] - weights[1]
                weight = float(own + (rows - instead_of))
            if total is not None:
                value += float(total) / weight if weight else float("nan")
            if whole is not None:
                value += float(whole)
        return value

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Give the sums so far, to go on with them in another process.

        Returns:
            Numbers and names, as JSON holds them; and tensors, wherever they are, by names of our own.
        """
        tensors = {f"default/{i}": tensor for i, tensor in enumerate(self._defaults)}
        tensors |= {f"sum/{i}": tensor for i, tensor in enumerate(self.tensors)}
        for slot, batches in enumerate(self._batches):
            tensors |= {f"batch/{slot}/{i}/{j}": t for i, batch in enumerate(batches) for j, t in enumerate(batch)}
        state = {
            "keys": [list(key) for key in self._index],
            "means": self._returned,
            "updated": self._slots,
            "rows": self.rows,
            "batches": [[len(batch) for batch in batches] for batches in self._batches],
            "metrics": [metric.state_dict() for metric in self._metrics],
        }
        return state, tensors

    def load_state_dict(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Go on with the sums that `state_dict` gave, their tensors on the host, before the first step of a pass.

        Raises:
            DataError: There are other metrics now.
        """
        now = [metric.name for metric in self._metrics]
        then = [own["name"] for own in state["metrics"]]
        if now != then:
            raise DataError(f"the metrics are others in the middle of an epoch: {then} then, {now} now")
        for metric, own in zip(self._metrics, state["metrics"], strict=True):
            metric.load_state_dict(own)
        self._index = {(owner, name): i for i, (owner, name) in enumerate(state["keys"])}
        self._returned = list(state["means"])
        self.rows = state["rows"]
        self._slots = dict(state["updated"])
        self._defaults = [tensors[f"default/{i}"] for i in range(len(self._index))]
        sums = [tensors[f"sum/{i}"] for i in range(len(self._index))]
        self.tensors = to_device(sums, self.placement)
        self._batches = [
            [tuple(tensors[f"batch/{slot}/{i}/{j}"] for j in range(size)) for i, size in enumerate(sizes)]
            for slot, sizes in enumerate(state["batches"])
        ]

    def _snapshot(self) -> Callable[[str], dict[str, Any]]:
        """A function that reads this moment's values, whenever it is called: it holds this moment's tensors."""
        rows = self.rows
        sums = self.tensors
        finite = self._index.get(_FINITE)
        tell = self.on_finite  # this pass's, though a later pass may have begun when the values are read
        lists = self._batches
        sizes = [len(batches) for batches in self._batches]
        names = self.names

        def read(reason: str) -> dict[str, Any]:
            kept = [batches[:size] for batches, size in zip(lists, sizes, strict=True)]
            host = to_host([*sums, *(t for batches in kept for batch in batches for t in batch)], reason)
            rest = iter(host[len(sums) :])
            if finite is not None:
                tell(host[finite])
            fetched = [[[next(rest) for _ in batch] for batch in batches] for batches in kept]

            def value(name: str) -> Any:
                slot = self._slots.get(name)
                if slot is None:
                    return self._mean(name, rows, host)
                own = {key[1]: host[i] for key, i in self._index.items() if key[0] == slot}
                return self._metrics[slot].compute(own, fetched[slot])

            return {name: value(name) for name in names}

        return read


def _added(sums: tuple[Tensor, Tensor], value: Tensor) -> tuple[Tensor, Tensor]:
    """Add to a sum by Kahan's summation, with the part that rounding has taken from the sum so far.

    A plain float32 sum would be off in the fifth digit after some ten thousand batches.
    """
    total, lost = sums
    addend = value - lost
    new = total + addend
    return new, (new - total) - addend


def first_bad(finite: Tensor) -> int | None:
    """The number of the first step of a pass, from 1, that returned a scalar which is not finite; None if none did.

    Example:
        >>> first_bad(torch.tensor(5)), first_bad(torch.tensor(-6))
        (None, 6)
    """
    return -int(finite) if finite < 0 else None
