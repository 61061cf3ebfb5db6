"""`Monitor`: follows a log, and knows the best value. Independent of hooks and models."""

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import ArgumentError
from ...utils.user_code import warn
from .scalars import as_scalar

# Words in the names of logs for which higher, or lower, is better, for logs whose metric doesn't say.
_RISING = re.compile(
    "acc|accuracy|auc|auroc|dice|f1|fbeta|iou|jaccard|kappa|precision|psnr|r2|recall|sensitivity|specificity|ssim"
)
_FALLING = re.compile("cer|distance|divergence|error|loss|mae|mape|mse|nll|perplexity|rmse|wer")


class Monitor:
    """Follows one log, and tells when it improves.

    Args:
        name: The log, e.g. `"val_loss"`.
        mode: `"min"`, `"max"` or `"auto"` (default: decided by the metric, else by the log's name; if neither decides,
            `choose_direction` raises an error).
        min_delta: The least change that counts (default 0).
        baseline: A value that must be beaten, too, to reset `wait` to 0 (default: none).
        best: The initial best value (default: none, so any finite value is better).

    Attributes:
        best: The best value so far, or None.
        wait: The number of values since the last that beat `best` and `baseline`.
        rising: True if higher is better.
        has_direction: True once the direction is decided.

    Raises:
        ArgumentError: An unknown mode.

    Example:
        >>> monitor = Monitor("val_loss", min_delta=0.1)
        >>> [monitor.observe(value) for value in (0.9, 0.85, 0.7, float("nan"), 0.65)]
        [True, False, True, False, False]
        >>> monitor.best, monitor.wait
        (0.7, 2)
    """

    def __init__(
        self,
        name: str,
        mode: str = "auto",
        min_delta: float = 0.0,
        baseline: float | None = None,
        best: float | None = None,
    ) -> None:
        self.baseline = baseline
        self.best = best
        self.min_delta = abs(min_delta)
        self.wait = 0
        self._warned = False
        self.follow(name, mode)

    def follow(self, name: str, mode: str) -> None:
        """Follow another log, or in another mode; see the class.

        Raises:
            ArgumentError: An unknown mode.
        """
        if mode not in ("auto", "min", "max"):
            raise ArgumentError(f"mode must be 'auto', 'min' or 'max', got {mode!r}")
        self.name = name
        self.mode = mode
        self.rising = mode == "max" or (mode == "auto" and _infer_rising(name) is True)
        self.has_direction = False

    def choose_direction(self, higher_is_better: bool | None, known: Sequence[str] = ()) -> None:
        """Decide the direction, if the mode is `"auto"`, by the metric or, if that is None, by the log's name.

        The error lists the `known` logs, in case of a typo.

        Raises:
            ArgumentError: The name doesn't decide, either. A wrong guess would keep the worst weights.
        """
        if self.mode == "auto":
            rising = _infer_rising(self.name) if higher_is_better is None else higher_is_better
            if rising is None:
                logs = [*known, *(f"val_{log}" for log in known)]
                listed = f" The logs are {', '.join(logs)}, and a step's own." if logs else ""
                raise ArgumentError(
                    f"neither a metric nor the name of {self.name!r} says whether higher is better."
                    f"{_suggest(self.name, logs)}{listed} For a log of your own pass mode='max' or mode='min'"
                )
            self.rising = rising
        self.has_direction = True

    def reset(self, best: float | None = None) -> None:
        """Forget the values so far, and start from `best`."""
        self.best = best
        self.wait = 0

    def read(self, logs: Mapping[str, Any] | None, asker: str, params: Mapping[str, Any] | None = None) -> float | None:
        """Return the value in logs. If they are lazy and contain it, this waits for the device.

        The first time the value is missing, a warning lists the available logs and names the callback, `asker`.
        Validation logs may be missing after an epoch that doesn't validate, see the callback's `params`.

        Raises:
            ArgumentError: The log is not a single number.
        """
        if not logs or self.name not in logs:
            later = (params or {}).get("validates") and self.name.startswith("val_")
            if not self._warned and not (later and not any(log.startswith("val_") for log in logs or ())):
                self._warned = True
                known = sorted(logs or {})
                warn(
                    f"{asker} can't find {self.name!r} in the logs and does nothing without it."
                    f"{_suggest(self.name, known)} Available: {', '.join(known) or 'none'}. "
                    "A val_* log needs validation_data, and is there only after epochs that validate",
                )
            return None
        value = as_scalar(logs[self.name])
        if value is None:
            raise ArgumentError(f"{asker} can monitor single numbers only, and {self.name!r} is {logs[self.name]!r}")
        return value

    def is_better(self, value: float, than: float | None) -> bool:
        """True if a value beats another by more than `min_delta`. Any finite value beats None; others beat nothing."""
        if not math.isfinite(value):
            return False
        if than is None:
            return True
        return value - self.min_delta > than if self.rising else value + self.min_delta < than

    def observe(self, value: float) -> bool:
        """Compare a value with the best so far, keep it if it is better, and return True if it is."""
        better = self.is_better(value, self.best)
        self.wait += 1
        if better:
            self.best = value
            if self.is_better(value, self.baseline):
                self.wait = 0
        return better

    def state_dict(self) -> dict[str, Any]:
        """Return the best value so far, and the count of values since, as numbers."""
        return {"best": self.best, "wait": self.wait}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the dict that `state_dict` returned."""
        self.best = state["best"]
        self.wait = state["wait"]


def _suggest(name: str, known: list[str]) -> str:
    # A name that only lacks its validation isn't a typo.
    near = [] if name.removeprefix("val_") in known else difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def _infer_rising(name: str) -> bool | None:
    words = re.split(r"[^a-z0-9]+", name.lower())
    if any(map(_FALLING.fullmatch, words)):
        return False
    return True if any(map(_RISING.fullmatch, words)) else None
