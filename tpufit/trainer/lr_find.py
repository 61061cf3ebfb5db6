"""`Model.lr_find`: a short training at rising learning rates shows at which rate the loss falls fastest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import numpy as np
from torch.utils._pytree import tree_leaves

from ..data import Stream
from ..data.batches import count_rows
from ..data.prefetch import Prefetcher
from ..data.reused_memory import copy_batch
from ..diagnostics.plots import make_axes
from ..errors import ArgumentError, require_number, require_whole
from ..hosts import all_reduce_max
from ..optimizers import set_rate
from ..runtime import fetch
from ..step import DeviceGroup, Engine, StepRunner
from ..utils.user_code import warn

# The number of steps between two waits for losses; after divergence at most this many steps are wasted.
_WINDOW = 10


@dataclass(frozen=True)
class Sweep:
    """The rates to try, and the rules for reading their losses.

    Raises:
        ArgumentError: A value is out of range.

    Example:
        >>> [f"{rate:g}" for rate in Sweep(0.001, 10.0, 5, 4.0, 0.9).rates]
        ['0.001', '0.01', '0.1', '1', '10']
    """

    start_lr: float
    end_lr: float
    steps: int  # the number of rates, which grow by a constant factor
    stop_factor: float  # the sweep ends when the smoothed loss exceeds its minimum times this factor
    smoothing: float  # the share of the running average that each step keeps, from 0 to below 1

    def __post_init__(self) -> None:
        ranges: dict[str, tuple[str, Callable[[float], bool]]] = {
            "start_lr": ("a finite number above 0", lambda rate: 0 < rate < math.inf),
            "end_lr": ("a finite number above start_lr", lambda rate: rate < math.inf),
            "stop_factor": ("a number above 1", lambda factor: factor > 1),
            "smoothing": ("a share from 0 to below 1", lambda share: 0 <= share < 1),
        }
        for name, (wanted, fits) in ranges.items():
            object.__setattr__(self, name, float(require_number(name, getattr(self, name), wanted, fits)))
        if not self.start_lr < self.end_lr:
            got = f"start_lr={self.start_lr!r}, end_lr={self.end_lr!r}"
            raise ArgumentError(f"start_lr must be below end_lr, got {got}")
        object.__setattr__(self, "steps", require_whole("steps", self.steps, 2))

    @property
    def rates(self) -> list[float]:
        """The rates, in order."""
        return [float(rate) for rate in np.geomspace(self.start_lr, self.end_lr, self.steps)]


@dataclass(frozen=True)
class LRCurve:
    """The loss at each learning rate of a `Model.lr_find`.

    Attributes:
        lrs: The actual rates; with several parameter groups, the first group's.
        losses: The loss of each step's batch, before its update.
        smoothed: The exponential moving average of the losses, bias-corrected.
        suggestion: The rate at which the smoothed loss falls most steeply over the rate's logarithm, moved back by the
            lag of the average (4 steps for a smoothing of 0.9); None if the loss never fell. Left out are the first
            tenth of the points, where the average has few losses, and the points after the minimum, where training
            breaks down. A fall smaller than twice the losses' scatter doesn't count.

    Example:
        >>> curve = LRCurve.of([0.001, 0.01, 0.1, 1.0, 10.0], [2.0, 1.9, 1.0, 0.8, 5.0], smoothing=0.0)
        >>> curve.suggestion
        0.1
    """

    lrs: list[float]
    losses: list[float]
    smoothed: list[float]
    suggestion: float | None

    @classmethod
    def of(
        cls, lrs: Sequence[float], losses: Iterable[float], smoothing: float, stop_factor: float = math.inf
    ) -> LRCurve:
        """Build the curve of some losses, up to the loss at which training broke down.

        Args:
            lrs: The rates.
            losses: A loss for each rate. Reading ends at a loss that is infinite or NaN, or that ends the curve.
            smoothing: See `Sweep`.
            stop_factor: See `Sweep`; ignored once a smoothed loss is negative.
        """
        read: list[float] = []
        smoothed: list[float] = []
        average = weight = 0.0
        for loss in islice(losses, len(lrs)):
            if all_reduce_max(not math.isfinite(loss)):
                break
            average = smoothing * average + (1 - smoothing) * loss
            weight = smoothing * weight + (1 - smoothing)
            read.append(loss)
            smoothed.append(average / weight)
            if all_reduce_max(0 < stop_factor * min(smoothed) < smoothed[-1]):
                break
        rates = list(lrs[: len(read)])
        steepest = _find_steepest(read, smoothed)
        # The average shows a sudden change at once, and a steady change after its mean age: take the middle.
        lag = round(smoothing / (1 - smoothing) / 2)
        return cls(rates, read, smoothed, None if steepest is None else rates[max(0, steepest - lag)])

    def plot(self, ax: Any = None) -> Any:
        """Draw the curve and its suggestion, if any.

        Args:
            ax: Matplotlib's `Axes` to draw in (default: a new figure's).

        Returns:
            The axes.

        Raises:
            ImportError: Matplotlib is not installed.
        """
        if ax is None:
            _, (ax,) = make_axes()
        ax.plot(self.lrs, self.losses, alpha=0.3, label="loss")
        ax.plot(self.lrs, self.smoothed, label="smoothed")
        if self.suggestion is not None:
            ax.axvline(self.suggestion, linestyle="--", color="gray", label=f"suggestion: {self.suggestion:.2g}")
        ax.set(xscale="log", xlabel="learning rate", ylabel="loss")
        if self.smoothed:
            # Where training breaks down, the loss may grow a thousandfold and would flatten the rest of the curve.
            lowest = min(self.smoothed)
            fall = max(self.smoothed[: self.smoothed.index(lowest) + 1]) - lowest
            if fall:
                ax.set_ylim(min(self.losses) - 0.2 * fall, lowest + 1.5 * fall)
        ax.legend()
        return ax


def find(engine: Engine, data: Stream, sweep: Sweep, seed: int) -> LRCurve:
    """Train at the rates of a sweep, repeating the data if needed; then restore everything."""
    rates = sweep.rates
    with engine.trial():
        engine.state.numbers.seed = seed
        runner = StepRunner(engine, "train", data.device_transform, warm=data.passed)
        engine.note_modes()
        engine.train_mode()
        batches = ([batch] for batch in islice(_whole_batches(data), len(rates)))
        with Prefetcher(batches, runner.send, _WINDOW) as feed:
            curve = LRCurve.of(rates, _losses(engine, runner, feed, rates), sweep.smoothing, sweep.stop_factor)
    if curve.suggestion is None:
        warn(
            f"the loss never fell between the learning rates {sweep.start_lr:g} and {sweep.end_lr:g} "
            f"({len(curve.losses)} of {sweep.steps} steps gave a loss), so there is no suggestion. Look at the curve's "
            "plot(), at the loss and the data, or try other rates and more steps",
        )
    return curve


def _losses(
    engine: Engine, runner: StepRunner, feed: Prefetcher[list[DeviceGroup]], rates: Sequence[float]
) -> Iterator[float]:
    """Yield the loss of a step at each rate. **This waits** for the device, once for every `_WINDOW` steps."""
    optimizer = engine.model.optimizer
    assert optimizer is not None
    for first in range(0, len(rates), _WINDOW):
        started = []
        for rate, (group,) in zip(rates[first : first + _WINDOW], feed, strict=False):
            set_rate(optimizer, rate)
            runner(group, feed.pausing)
            started.append(runner.pop_sums())
        sums = fetch([tensors for tensors, _ in started], "lr_find")
        for (_, means), tensors in zip(started, sums, strict=True):
            logs = means(tensors)
            if "loss" not in logs:
                step = f"{type(engine.model).__name__}.train_step"
                raise ArgumentError(f"lr_find needs a 'loss', but {step} returns {sorted(logs)}: return a 'loss', too")
            yield logs["loss"]


def _whole_batches(data: Stream) -> Iterator[Any]:
    """Yield the batches of repeated passes without short last batches, at which the curve would jump."""
    for number in count():
        size = 0
        previous = None
        for batch in data.epoch(number):
            if previous is not None:
                yield previous
            size = size or count_rows(tree_leaves(batch))
            previous = copy_batch(batch) if data.may_overwrite else batch
        if previous is not None and count_rows(tree_leaves(previous)) >= size:
            yield previous


def _find_steepest(losses: Sequence[float], smoothed: Sequence[float]) -> int | None:
    """Return the index at which the smoothed losses fall most steeply, or None; see `LRCurve`."""
    if len(smoothed) < 3:
        return None
    first = len(smoothed) // 10
    lowest = int(np.argmin(smoothed))
    if first >= lowest:
        return None
    scatter = float(np.std(np.diff(losses[first : lowest + 1]))) / math.sqrt(2)  # the differences remove the trend
    if smoothed[first] - smoothed[lowest] <= max(2 * scatter, 1e-3 * abs(smoothed[first])):
        return None
    return first + int(np.argmin(np.gradient(smoothed)[first:lowest]))
