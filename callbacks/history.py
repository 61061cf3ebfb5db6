"""`History`: the logs of every epoch."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from ..diagnostics import plots
from ..errors import counted
from ._support.scalars import as_scalar
from .base import Callback, Logs

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class History(Callback):
    """Keeps the logs of every epoch. `fit` makes one and returns it.

    Attributes:
        history: For each log a list of its values, one an epoch; `val_*` has fewer if not every epoch was validated.
        epoch: The epochs' numbers, from 0.

    Example:
        >>> history = History()
        >>> history.on_epoch_end(0, {"loss": 0.5})
        >>> history.on_epoch_end(1, {"loss": 0.25})
        >>> history.epoch, history.history
        ([0, 1], {'loss': [0.5, 0.25]})

    Source: `keras.callbacks.History`.
    """

    reads_weights = False

    def __init__(self) -> None:
        self.epoch: list[int] = []
        self.history: dict[str, list[Any]] = {}
        self._epochs: dict[str, list[int]] = {}  # those that each log's values are of

    def __repr__(self) -> str:
        logs = ", ".join(f"{name} {_short(values[-1])}" for name, values in self.history.items())
        return f"History({counted(len(self.epoch), 'epoch')}{': ' * bool(logs)}{logs})"

    def _repr_html_(self) -> str:
        """A table of the epochs, for a notebook."""
        at = {name: dict(zip(self._epochs[name], values, strict=True)) for name, values in self.history.items()}
        rows = [["epoch", *map(escape, at)]]
        rows += [[str(epoch + 1), *(_short(own.get(epoch, "")) for own in at.values())] for epoch in self.epoch]
        lines = ("".join(f"<td>{cell}</td>" for cell in row) for row in rows)
        return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Add the epoch's logs."""
        self.epoch.append(epoch)
        for name, value in (logs or {}).items():
            self.history.setdefault(name, []).append(value)
            self._epochs.setdefault(name, []).append(epoch)

    def plot(self) -> Figure:
        """Draw a line for each log over the epochs, from 1, validation beside training.

        A log with more than a number an epoch is left out.

        Returns:
            Matplotlib's `Figure`: `history.plot().savefig("history.png")`.

        Raises:
            ImportError: Matplotlib is not installed.
            ArgumentError: There are no logs.
        """
        lines = {}
        for name, values in self.history.items():
            numbers = [number for value in values if (number := as_scalar(value)) is not None]
            if len(numbers) == len(values):
                lines[name] = ([epoch + 1 for epoch in self._epochs[name]], numbers)
        return plots.curves(lines)

    def state_dict(self) -> dict[str, Any]:
        """The logs of the epochs so far, as lists."""
        return {
            "epoch": list(self.epoch),
            "history": {name: _as_numbers(values) for name, values in self.history.items()},
            "epochs": {name: list(epochs) for name, epochs in self._epochs.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Args:
            state: The dict that `state_dict` returned.
        """
        self.epoch = list(state["epoch"])
        self.history = {name: list(values) for name, values in state["history"].items()}
        self._epochs = {name: list(epochs) for name, epochs in state["epochs"].items()}


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else escape(str(value))


def _as_numbers(values: list[Any]) -> list[Any]:
    """Values with lists for arrays, for JSON."""
    return [value.tolist() if hasattr(value, "tolist") else value for value in values]
