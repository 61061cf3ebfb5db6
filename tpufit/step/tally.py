"""`Tally`: what the steps of a pass come to."""

from dataclasses import dataclass


@dataclass
class Tally:
    """The steps and rows of a pass so far, and its seed."""

    steps: int = 0  # started; so are those of rows and tokens
    rows: int = 0
    tokens: int = 0
    operations: int = 0  # that they compute; 0 if nobody has counted
    batches: int = 0  # done, including those before a resumption
    seed: int = 0  # of the pass; training has that of the run instead

    def speed(self, steps_per_second: float, peak: float | None) -> dict[str, float]:
        """What steps at this pace come to: `tokens_per_second` and `share_of_peak`, if they are known.

        `peak` is in operations a second, of all cores together.

        Example:
            >>> Tally(steps=4, tokens=4096, operations=2_000).speed(10.0, 1e4)
            {'tokens_per_second': 10240.0, 'share_of_peak': 0.5}
        """
        found = {}
        if self.tokens:
            found["tokens_per_second"] = steps_per_second * self.tokens / self.steps
        if self.operations and peak is not None:
            found["share_of_peak"] = steps_per_second * self.operations / self.steps / peak
        return found
