"""`Freeze`: keeps parameters as they are, for some epochs."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from ..errors import ArgumentError, few, require_whole
from .base import Callback, Logs

if TYPE_CHECKING:
    from torch import nn


class Freeze(Callback):
    """Keeps parameters as they are, in all epochs or some: they get no gradient, and the step computes none for them.

    The step is compiled once more when they begin to learn or end to, and not again when they go back. At the end of
    `fit` they learn as before. A layer in eval mode when `fit` began stays in it while it is frozen; otherwise
    batch norms go on counting, as in PyTorch.

    Args:
        layers: A pattern of names of modules or parameters, such as `"encoder"` or `"layers.[0-5].*"`, or several.
        until: The epoch, from 0, in which they begin to learn (default: they don't).
        since: The epoch, from 0, in which they end to (default 0).

    Raises:
        ArgumentError: A value is of the wrong kind; or, as training begins, a pattern matches nothing.

    Example: the head learns alone for two epochs, and then all layers.
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
        self._own: list[nn.Parameter] = []

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Find the parameters that learn until now."""
        named = dict(self.model.module.named_parameters())
        for pattern in self.layers:
            if not any(_matches(name, pattern) for name in named):
                kind = type(self.model.module).__name__
                raise ArgumentError(f"Freeze: {kind} has no parameter of {pattern!r}; it has {few([*named]) or 'none'}")
        chosen = [p for name, p in named.items() if any(_matches(name, pattern) for pattern in self.layers)]
        self._own = [p for p in chosen if p.requires_grad]

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Let them learn, or not."""
        frozen = epoch >= self.since and (self.until is None or epoch < self.until)
        for parameter in self._own:
            parameter.requires_grad_(not frozen)

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Let them learn as before."""
        for parameter in self._own:
            parameter.requires_grad_(True)
        self._own = []


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
