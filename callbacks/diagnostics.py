"""`Diagnostics`: names the causes of a slow `fit` at its end, if there are any."""

from ..utils.terminal import say
from .base import Callback, Logs


class Diagnostics(Callback):
    """Measures the host's time, and prints the problems of a `fit` at its end: a sentence each, with its cure.

    It prints nothing if there are none. `model.report()` has all that it has seen: the cause of each graph that was
    compiled, the line of each step that was traced, read from or left to the host, and the time of everything. It waits
    for nothing, and takes a few microseconds a step.

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
    only_writes = True

    def __init__(self, verbose: bool = False) -> None:
        self._verbose = verbose

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Print the problems; after an error there is only the error."""
        if not logs:
            return
        report = self.model.report()
        if self._verbose:
            say(str(report))
        elif report.problems:
            say("\n".join(["What made this slow:", *(f"- {sentence}" for sentence in report.problems)]))
