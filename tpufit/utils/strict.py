"""`Strict`: the policy that turns slow events into errors."""

from dataclasses import dataclass

from ..errors import StrictError


@dataclass(frozen=True)
class Strict:
    """The policy of `fit(strict=True)`. Code reports slow events here, and continues if this returns.

    Example:
        >>> Strict().refuse("the train step can't be replayed")
        >>> Strict("train.py:12").refuse("the train step can't be replayed")
        Traceback (most recent call last):
        tpufit.errors.StrictError: strict=True, in the fit at train.py:12: the train step can't be replayed
    """

    line: str = ""  # the user's line that called `fit`: "train.py:12"; if empty, everything passes

    def __bool__(self) -> bool:
        return bool(self.line)

    def refuse(self, event: str) -> None:
        """Raise an error for a slow event, a sentence with place and cure, if the policy is strict.

        Raises:
            StrictError: The policy is strict.
        """
        if self.line:
            raise StrictError(f"strict=True, in the fit at {self.line}: {event}")


LENIENT = Strict()
