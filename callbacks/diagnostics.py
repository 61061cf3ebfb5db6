"""`Diagnostics`: reports the causes of a slow `fit` when it ends."""

from ..utils.terminal import say
from .base import Callback, Logs


class Diagnostics(Callback):
    """Measures the host's time, and at the end of `fit` reports what made it slow, and what to do about it.

    It prints nothing if `fit` wasn't slow. `model.report()` has all measurements: why each graph was compiled, the
    lines where steps were traced, read a value or ran on the host, and the time of everything. It never waits for the
    device, and takes a few microseconds per step.

    Args:
        verbose: Print the whole report at the end, with hints (default False).

    Example:
        >>> import torch, tpufit
        >>> model = tpufit.Model(torch.nn.Linear(3, 5))
        >>> model.compile("sgd", "mse")
        >>> _ = model.fit(torch.zeros(64, 3), torch.zeros(64, 5), verbose=0, callbacks=Diagnostics())
        >>> [graph.cause for graph in model.report().counts.compiled]
        ['it is the first step']
    """

    reads_weights = False
    measures_time = True
    only_writes = True

    def __init__(self, verbose: bool = False) -> None:
        self._verbose = verbose

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Print the problems; after an error print nothing."""
        if not logs:
            return
        report = self.model.report()
        if self._verbose:
            say(str(report))
        elif report.problems:
            say("\n".join(["What made this slow:", *(f"- {sentence}" for sentence in report.problems)]))
