"""`Diagnostics`: says at the end of `fit` what made it slow, if anything did."""

from __future__ import annotations

from .base import Callback, Logs
from .terminal import say


class Diagnostics(Callback):
    """Measures where the host's time goes, and says at the end of `fit` what is wrong: a sentence each, with its cure.

    It is silent where nothing is wrong. All that it has seen is in `model.report()`: why each graph was compiled, what
    was traced, read, or left to the host, at which line, and the time of everything. It waits for nothing, and takes a
    few microseconds a step.

    Args:
        verbose: Print the whole report at the end, with hints (default False).

    Example:
        >>> import torch, tpufit
        >>> model = tpufit.Model(torch.nn.Linear(2, 2))
        >>> model.compile("sgd", "mse")
        >>> _ = model.fit(torch.zeros(64, 2), torch.zeros(64, 2), verbose=0, callbacks=Diagnostics())
        >>> [graph.cause for graph in model.report().counts.compiled]
        ['it is the first step']
    """

    reads_weights = False
    measures_time = True

    def __init__(self, verbose: bool = False) -> None:
        self._verbose = verbose

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Say what is wrong; after an error that error says it."""
        if not logs:
            return
        report = self.model.report()
        if self._verbose:
            say(str(report))
        elif report.problems:
            say("\n".join(["What made this slow:", *(f"- {sentence}" for sentence in report.problems)]))
