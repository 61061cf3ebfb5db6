"""`Tally`: the totals of a pass."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

from ..diagnostics.report import Pass


@dataclass
class Tally:
    """The numbers of steps, rows and tokens of a pass so far, its times, and its seed."""

    role: str = "train"
    steps: int = 0  # started
    rows: int = 0  # of started steps
    tokens: int = 0  # of started steps
    operations: int = 0  # of started steps; 0 if unknown
    batches: int = 0  # done, including batches before a resumption
    seed: int = 0  # of the pass; training uses the run's seed instead
    began: float = 0.0  # by `perf_counter`
    waited: float = 0.0  # seconds in which the loop had no batch; known at the end
    validated: float = 0.0  # seconds of validations inside the pass, which don't count as its own
    first: Pass | None = None  # the pass after its first graph, which may have been compiled

    def record(self) -> Pass:
        """Return the pass up to now, for a report."""
        seconds = perf_counter() - self.began - self.validated
        return Pass(
            self.role, self.steps, self.rows, seconds, self.waited, self.tokens, self.operations, begun=self.first
        )

    def speed(self, steps_per_second: float, peak: float | None) -> dict[str, float]:
        """Return the throughput at this pace: `tokens_per_second` and `share_of_peak`, if known.

        `peak` is in operations per second, over all cores.

        Example:
            >>> Tally(steps=4, tokens=4096, operations=2_000).speed(10.0, 1e4)
            {'tokens_per_second': 10240.0, 'share_of_peak': 0.5}
        """
        throughput = {}
        if self.tokens:
            throughput["tokens_per_second"] = steps_per_second * self.tokens / self.steps
        if self.operations and peak is not None:
            throughput["share_of_peak"] = steps_per_second * self.operations / self.steps / peak
        return throughput
