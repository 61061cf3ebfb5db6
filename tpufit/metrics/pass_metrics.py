"""`PassMetrics`: the running values of a pass over the data.

Sums stay on the device, inside the step's graph; they are read once a pass, or when a callback reads a batch's logs.
torchmetrics then computes on the host, from sums over exactly the rows so far.
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
from .dataset_metric import DatasetMetric
from .lazy_logs import LazyLogs
from .sum_table import Key, SumTable
from .tracked_metric import TrackedMetric, update_separately

if TYPE_CHECKING:
    import torchmetrics

    from .metric import Metric

# The key of a sum that counts finite steps. The first step that isn't finite makes it negative, and then it doesn't
# change any more. A replayed step doesn't know its own number; this sum gives it.
_FINITE: Key = (None, "finite")

# The defaults of sums.
_NONE = torch.zeros((), dtype=COUNTS)
_ZERO = torch.zeros((), dtype=torch.float32)
_WEIGHTS = torch.zeros(2, 2, dtype=torch.float32)


class PassMetrics(SumTable):
    """The running values of a pass over the data: means of the scalars that its steps return, and metrics.

    Args:
        metrics: The metrics of `compile`, and the metrics that the user's steps update.
        placement: The placement of the steps.
        watches: True to note the first step that returns a scalar that isn't finite (default False).
    """

    def __init__(
        self, metrics: Sequence[Metric | TrackedMetric | DatasetMetric], placement: Placement, watches: bool = False
    ) -> None:
        super().__init__(placement)
        self._metrics = list(metrics)
        self._watches = watches
        # The batches of the traced step that metrics keep, each with the metric's slot.
        self.kept: list[tuple[int, Sequence[Tensor]]] = []
        self.rows = 0  # in the pass so far
        # Called with the host value of `finite` whenever the sums have been fetched.
        self.on_finite: Callable[[Tensor], None] = lambda finite: None
        self._returned: list[str] = []  # the names of logs that steps return: means and tracked metrics
        self._slots: dict[str, int] = {}  # the slot of each log that is a metric
        self._batches: list[list[tuple[Tensor, ...]]] = [[] for _ in metrics]
        self._fetched = self._due = [0] * len(metrics)  # numbers of batches of each metric, see `fetch_kept`
        self._noted: dict[str, Tensor] = {}

    @property
    def names(self) -> list[str]:
        """The names of the logs so far."""
        return list(dict.fromkeys([*self._returned, *self._slots]))

    def tracks(self, metrics: Iterable[torchmetrics.Metric]) -> bool:
        """True if these are the objects that the user's steps update."""
        tracked = [metric.metric for metric in self._metrics if isinstance(metric, TrackedMetric)]
        return list(map(id, tracked)) == list(map(id, metrics))

    def reset(self) -> None:
        """Begin a new pass."""
        super().reset()
        self.rows = 0
        self._noted = {}
        self._batches = [[] for _ in self._metrics]
        self._fetched = self._due = [0] * len(self._metrics)

    def begin(self) -> None:
        """Begin the trace of a step."""
        super().begin()
        self.kept = []
        self._noted = {}

    def roll_back(self) -> None:
        """Restore the sums from before the trace of a step, and drop the batches that it kept."""
        super().roll_back()
        self.kept = []
        self._noted = {}

    @contextmanager
    def tracking(self, attributes: Mapping[str, Any]) -> Iterator[None]:
        """A context for a step's Python, in which updates of metrics among the attributes are a part of the step."""
        with ExitStack() as stack:
            stack.enter_context(update_separately(attributes))
            for slot, metric in enumerate(self._metrics):
                if isinstance(metric, TrackedMetric):
                    stack.enter_context(metric.in_step(partial(self._track, slot, metric)))
            yield

    def _track(self, slot: int, metric: TrackedMetric, arguments: Sequence[Any]) -> None:
        self._slots.setdefault(metric.name, slot)
        self._keep(slot, metric.update(self, slot, arguments))

    def note(self, logs: Mapping[str, Tensor]) -> None:
        """Log further scalars, means over the batch, inside a step; scalars that the step returns win."""
        self._noted |= logs

    def add_means(self, logs: Mapping[str, Any], rows: int, averages: Averages | None = None) -> None:
        """Add the scalars that a step returned, inside that step.

        Args:
            logs: The scalars, by name.
            rows: The number of rows of the batch, as `count` will count it.
            averages: The denominators of the scalars (default: the rows).

        Raises:
            ArgumentError: A value is neither a number, nor a tensor of one element, nor a tracked metric.
        """
        noted = self._noted
        self._noted = {}
        slots = {id(metric.metric): i for i, metric in enumerate(self._metrics) if isinstance(metric, TrackedMetric)}
        scalars: list[Tensor] = []
        for name, value in {**logs, **{name: noted[name] for name in noted if name not in logs}}.items():
            if name not in self._returned:
                self._returned.append(name)
            if (slot := slots.get(id(value))) is not None:
                default_name = self._metrics[slot].name
                if self._slots.get(default_name) == slot and default_name not in self._returned:
                    del self._slots[default_name]
                self._slots[name] = slot
                continue
            if not isinstance(value, (Tensor, Real)) or (isinstance(value, Tensor) and value.numel() != 1):
                what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
                raise ArgumentError(
                    f"a step must return numbers or scalar tensors by name, but {name!r} is {what}: return its mean, "
                    "or log it with a metric"
                )
            for i, mean in enumerate((averages or Averages(rows)).of(value)):
                scalars.append(self._add_mean(name, str(i or ""), mean, rows))
        if self._watches and scalars:
            steps = self.get(_FINITE, _NONE)
            # x - x is NaN if x isn't finite, and NaN doesn't equal itself. (`isfinite` takes more operations, one of
            # them in 64 bits, which a TPU emulates.)
            zero = scalars[0] - scalars[0]
            for scalar in scalars[1:]:
                zero = zero + (scalar - scalar)
            self.set(_FINITE, torch.where(steps < 0, steps, torch.where(zero == zero, steps + 1, ~steps)))

    def _add_mean(self, name: str, part: str, mean: Mean, rows: int) -> Tensor:
        """Add one of the means whose sum is a log, and return it as a scalar."""
        scalar = self.place(mean.value).float()
        scalar = scalar.reshape(()) if scalar.dim() else scalar
        weight = rows if mean.weight is None else mean.weight
        if isinstance(weight, Tensor):
            weight = weight.detach().float()
            scalar = scalar.masked_fill(weight == 0, 0)  # a mean over a weight of 0 is NaN
        total = (name, f"{'sum' if isinstance(weight, str) else 'total'}{part}")
        rounding_error = (name, f"rounding_error{part}")
        sums = self.get(total, _ZERO), self.get(rounding_error, _ZERO)
        sums = _add(sums, scalar if isinstance(weight, str) else scalar * weight)
        self.set(total, sums[0])
        self.set(rounding_error, sums[1])
        if isinstance(weight, Tensor) or (not isinstance(weight, str) and weight != rows):
            # `count` counts the rows of all batches on the host. So sum here the weight that replaces this batch's
            # rows, and the rows that it replaces.
            replacement = (
                weight
                if isinstance(weight, Tensor)
                else torch.full((), weight, dtype=torch.float32, device=scalar.device)
            )
            key = (name, f"weights{part}")
            weights = self.get(key, _WEIGHTS)
            pair = torch.stack([replacement, torch.full_like(replacement, rows)])
            self.set(key, torch.stack(_add((weights[0], weights[1]), pair)))
        return scalar

    @property
    def finite(self) -> Tensor | None:
        """The count of finite steps so far, on the device, or None before the first step; see `find_first_bad`."""
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
            # Clones, because a graph's outputs are distinct, and two metrics may keep one tensor or views of one. On a
            # pod each host reads all rows.
            whole = self.placement.gather if self.placement.hosts > 1 else torch.clone
            self.kept.append((slot, [whole(tensor) for tensor in batch]))

    def count(self, rows: int, kept: Sequence[tuple[int, Sequence[Tensor]]]) -> None:
        """Note a group of started steps: its rows, and the batches that metrics keep, each with the metric's slot."""
        self.rows += rows
        for slot, batch in kept:
            self._batches[slot].append(tuple(batch))

    def fetch_kept(self) -> None:
        """Copy kept batches to the host: batches from before the last call, which are computed by now.

        Called whenever the host has waited for an older step.
        """
        places = [
            (batches, i)
            for batches, first, end in zip(self._batches, self._fetched, self._due, strict=True)
            for i in range(first, end)
        ]
        if places:
            host = iter(to_host([tensor for batches, i in places for tensor in batches[i]], "kept rows"))
            for batches, i in places:
                batches[i] = tuple(next(host) for _ in batches[i])
        self._fetched = self._due
        self._due = [len(batches) for batches in self._batches]

    def results(self, reason: str) -> dict[str, Any]:
        """Compute the means and metrics over all rows so far. **This waits** for the device; reports say `reason`."""
        return self._snapshot(self.names)(reason)

    def make_lazy_logs(self) -> LazyLogs:
        """Return the means and metrics over all rows so far, which are fetched only when they are read."""
        # Without `DatasetMetric`s, which would join all rows so far at each read.
        names = [name for name in self.names if not isinstance(self._metric_of(name), DatasetMetric)]
        snapshot = self._snapshot(names)

        def read() -> dict[str, Any]:
            with turns.taking_turn("a batch's logs"):
                return snapshot("batch logs")

        return LazyLogs(names, read)

    def pop_sums(self) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], dict[str, float]]]:
        """Return the sums on the device and a function that computes the means from their host values; then reset."""
        names = [name for name in self._returned if name not in self._slots]
        popped = self.tensors, partial(self._compute_means, names, self.rows)
        self.reset()
        return popped

    def _compute_means(self, names: Sequence[str], rows: int, host: Sequence[Tensor]) -> dict[str, float]:
        return {name: self._compute_mean(name, rows, host) for name in names}

    def _compute_mean(self, name: str, rows: int, host: Sequence[Tensor]) -> float:
        """Compute a log from the sums on the host and the number of rows that `count` counted."""

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
                replacement, replaced_rows = weights[0] - weights[1]
                weight = float(replacement + (rows - replaced_rows))
            if total is not None:
                value += float(total) / weight if weight else float("nan")
            if whole is not None:
                value += float(whole)
        return value

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the sums so far, to resume with them in another process.

        Returns:
            Numbers and names as JSON, and tensors on their devices, by name.
        """
        tensors = {f"default/{i}": tensor for i, tensor in enumerate(self._defaults)}
        tensors |= {f"sum/{i}": tensor for i, tensor in enumerate(self.tensors)}
        for slot, batches in enumerate(self._batches):
            tensors |= {f"batch/{slot}/{i}/{j}": t for i, batch in enumerate(batches) for j, t in enumerate(batch)}
        state = {
            "keys": [list(key) for key in self._index],
            "returned": self._returned,
            "slots": self._slots,
            "rows": self.rows,
            "batches": [[len(batch) for batch in batches] for batches in self._batches],
            "metrics": [metric.state_dict() for metric in self._metrics],
        }
        return state, tensors

    def load_state_dict(self, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Load the sums that `state_dict` returned, with tensors on the host, before the first step of a pass.

        Raises:
            DataError: The metrics differ.
        """
        now = [metric.name for metric in self._metrics]
        then = [saved["name"] for saved in state["metrics"]]
        if now != then:
            raise DataError(f"the metrics changed in the middle of an epoch: {then} then, {now} now")
        for metric, saved in zip(self._metrics, state["metrics"], strict=True):
            metric.load_state_dict(saved)
        self._index = {(owner, name): i for i, (owner, name) in enumerate(state["keys"])}
        self._returned = list(state["returned"])
        self.rows = state["rows"]
        self._slots = dict(state["slots"])
        self._defaults = [tensors[f"default/{i}"] for i in range(len(self._index))]
        sums = [tensors[f"sum/{i}"] for i in range(len(self._index))]
        self.tensors = to_device(sums, self.placement)
        self._batches = [
            [tuple(tensors[f"batch/{slot}/{i}/{j}"] for j in range(size)) for i, size in enumerate(sizes)]
            for slot, sizes in enumerate(state["batches"])
        ]

    def _metric_of(self, name: str) -> Metric | TrackedMetric | DatasetMetric | None:
        slot = self._slots.get(name)
        return None if slot is None else self._metrics[slot]

    def _snapshot(self, names: Sequence[str]) -> Callable[[str], dict[str, Any]]:
        """Return a function that reads the current values at any later time, because it keeps the current tensors."""
        rows = self.rows
        sums = self.tensors
        finite = self._index.get(_FINITE)
        on_finite = self.on_finite  # of this pass, because a later pass may have begun when the values are read
        lists = self._batches
        wanted = {self._slots.get(name) for name in names}
        sizes = [len(batches) if slot in wanted else 0 for slot, batches in enumerate(self._batches)]

        def read(reason: str) -> dict[str, Any]:
            kept = [batches[:size] for batches, size in zip(lists, sizes, strict=True)]
            host = to_host([*sums, *(t for batches in kept for batch in batches for t in batch)], reason)
            rest = iter(host[len(sums) :])
            if finite is not None:
                on_finite(host[finite])
            fetched = [[[next(rest) for _ in batch] for batch in batches] for batches in kept]

            def value(name: str) -> Any:
                slot = self._slots.get(name)
                if slot is None:
                    return self._compute_mean(name, rows, host)
                of_metric = {key[1]: host[i] for key, i in self._index.items() if key[0] == slot}
                return self._metrics[slot].compute(of_metric, fetched[slot])

            logs = {name: value(name) for name in names}
            over_dataset = [name for name in names if isinstance(self._metric_of(name), DatasetMetric)]
            return _flatten_dicts(logs, over_dataset) if over_dataset else logs

        return read


def _flatten_dicts(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return logs in which each dict under one of `names`, the `DatasetMetric`s, is replaced by its items.

    Raises:
        ArgumentError: Two logs would have one name.
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        logs = value if name in names and isinstance(value, dict) else {name: value}
        doubled = sorted(logs.keys() & (flat.keys() | (values.keys() - {name})))
        if doubled:
            raise ArgumentError(
                f"the function of the DatasetMetric {name!r} returns {doubled[0]!r}, the name of another log: choose "
                "another name"
            )
        flat |= logs
    return flat


def _add(sums: tuple[Tensor, Tensor], value: Tensor) -> tuple[Tensor, Tensor]:
    """Add to a sum by Kahan's summation; `sums` are the sum and its rounding error.

    A plain float32 sum would be wrong in the fifth digit after some ten thousand batches.
    """
    total, error = sums
    addend = value - error
    new = total + addend
    return new, (new - total) - addend


def find_first_bad(finite: Tensor) -> int | None:
    """Return the number, from 1, of the first step of a pass that returned a scalar that isn't finite, or None.

    Example:
        >>> find_first_bad(torch.tensor(5)), find_first_bad(torch.tensor(-6))
        (None, 6)
    """
    return -int(finite) if finite < 0 else None
