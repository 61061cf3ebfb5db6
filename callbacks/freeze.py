"""`Freeze`: freezes parameters for some epochs."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from ..errors import ArgumentError, join_few, require_whole
from .base import Callback, Logs

if TYPE_CHECKING:
    from torch import nn


class Freeze(Callback):
    """Freezes parameters in all epochs or some: they get no gradient, and the step computes none for them.

    The step is compiled once more when the parameters are first frozen or unfrozen, and not again on later changes:
    once for each batch shape, of which `fit(last_batch="pad")` and `"drop"` leave only one. A step in which all layers
    learn takes longer to compile than a step in which few do. After `fit` the parameters learn as before. A layer that
    was in eval mode when `fit` began stays in eval mode while frozen; other batch norms still update their running
    statistics, as in PyTorch.

    Args:
        layers: One or several patterns of names of modules or parameters, such as `"encoder"` or `"layers.[0-5].*"`.
        until: The epoch, from 0, that unfreezes the parameters (default: none).
        since: The epoch, from 0, that freezes them (default 0).

    Raises:
        ArgumentError: An argument has a wrong type or value; or, when training begins, a pattern matches nothing.

    Example: for two epochs only the head learns, then all layers do.
        >>> callback = Freeze("encoder", until=2)

    Source: `BackboneFinetuning` of Lightning; `freeze` of fastai.
    """

    def __init__(self, layers: str | Sequence[str], until: int | None = None, since: int = 0) -> None:
        patterns = [layers] if isinstance(layers, str) else layers
        if not isinstance(patterns, (list, tuple)) or not all(isinstance(pattern, str) for pattern in patterns):
            raise ArgumentError(f"layers must be patterns of names, as in 'encoder.*', got {layers!r}")
        require_whole("since", since, 0)
        if until is not None:
            require_whole("until", until, since + 1)
        self.layers = list(patterns)
        self.until = until
        self.since = since
        self._parameters: list[nn.Parameter] = []

    @property
    def sets_requires_grad_of(self) -> list[nn.Parameter]:
        """The parameters whose `requires_grad` this callback sets in each epoch, so that no checkpoint has to."""
        return self._parameters

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Find the parameters to freeze that aren't frozen yet."""
        named = dict(self.model.module.named_parameters())
        for pattern in self.layers:
            if not any(_matches(name, pattern) for name in named):
                kind = type(self.model.module).__name__
                raise ArgumentError(
                    f"Freeze: {kind} has no parameter of {pattern!r}; it has {join_few([*named]) or 'none'}"
                )
        chosen = [p for name, p in named.items() if any(_matches(name, pattern) for pattern in self.layers)]
        self._parameters = [p for p in chosen if p.requires_grad]

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Freeze or unfreeze the parameters."""
        frozen = epoch >= self.since and (self.until is None or epoch < self.until)
        for parameter in self._parameters:
            parameter.requires_grad_(not frozen)

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Unfreeze the parameters."""
        for parameter in self._parameters:
            parameter.requires_grad_(True)
        self._parameters = []


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
