"""`History`: the logs of every epoch."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from ..diagnostics import plots
from ..errors import say_count
from ._support.scalars import as_scalar
from .base import Callback, Logs

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class History(Callback):
    """Keeps the logs of every epoch. `fit` makes one and returns it.

    Attributes:
        history: For each log a list of its values, one per epoch; `val_*` has fewer if not every epoch validated.
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
        self._epochs: dict[str, list[int]] = {}  # of each log's values

    def __repr__(self) -> str:
        logs = ", ".join(f"{name} {_format(self.history[name][-1])}" for name in self._scalar_names())
        return f"History({say_count(len(self.epoch), 'epoch')}{': ' * bool(logs)}{logs})"

    def _repr_html_(self) -> str:
        """Return a table of the epochs, for a notebook."""
        by_epoch = {
            name: dict(zip(self._epochs[name], self.history[name], strict=True)) for name in self._scalar_names()
        }
        rows = [["epoch", *map(escape, by_epoch)]]
        for epoch in self.epoch:
            rows.append([str(epoch + 1), *(_format(values.get(epoch, "")) for values in by_epoch.values())])
        lines = ("".join(f"<td>{cell}</td>" for cell in row) for row in rows)
        return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Add the epoch's logs."""
        self.epoch.append(epoch)
        for name, value in (logs or {}).items():
            self.history.setdefault(name, []).append(value)
            self._epochs.setdefault(name, []).append(epoch)

    def plot(self) -> Figure:
        """Draw a line for each log over the epochs, from 1, with training and validation in one chart.

        Logs with more than one number per epoch are omitted.

        Returns:
            Matplotlib's `Figure`: `history.plot().savefig("history.png")`.

        Raises:
            ImportError: Matplotlib is not installed.
            ArgumentError: There are no logs.

        Example:
            >>> history = History()
            >>> history.on_train_begin()
            >>> history.on_epoch_end(0, {"loss": 1.0, "val_loss": 2.0})
            >>> len(history.plot().axes)  # loss and val_loss share a chart
            1
        """
        lines = {}
        for name in self._scalar_names():
            numbers = [number for value in self.history[name] if (number := as_scalar(value)) is not None]
            lines[name] = ([epoch + 1 for epoch in self._epochs[name]], numbers)
        return plots.curves(lines)

    def _scalar_names(self) -> list[str]:
        """List the logs with one number per epoch."""
        return [name for name, values in self.history.items() if all(as_scalar(value) is not None for value in values)]

    def state_dict(self) -> dict[str, Any]:
        """Return the logs of the epochs so far, as lists."""
        return {
            "epoch": list(self.epoch),
            "history": {name: _as_numbers(values) for name, values in self.history.items()},
            "epochs": {name: list(epochs) for name, epochs in self._epochs.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state.

        Args:
            state: The dict that `state_dict` returned.
        """
        self.epoch = list(state["epoch"])
        self.history = {name: list(values) for name, values in state["history"].items()}
        self._epochs = {name: list(epochs) for name, epochs in state["epochs"].items()}


def _format(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else escape(str(value))


def _as_numbers(values: list[Any]) -> list[Any]:
    """Replace arrays by lists, for JSON."""
    return [value.tolist() if hasattr(value, "tolist") else value for value in values]
