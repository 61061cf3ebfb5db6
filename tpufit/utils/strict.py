"""`Strict`: the one policy that makes errors of things that slow steps down."""

from dataclasses import dataclass

from ..errors import StrictError


@dataclass(frozen=True)
class Strict:
    """The policy of `fit(strict=True)`. Code that meets a slow thing reports it here, and goes on if this returns.

    Example:
        >>> Strict().refuse("the train step can't be replayed")
        >>> Strict("train.py:12").refuse("the train step can't be replayed")
        Traceback (most recent call last):
        tpufit.errors.StrictError: strict=True, in the fit at train.py:12: the train step can't be replayed
    """

    line: str = ""  # of the user's, that called `fit`: "train.py:12"; if empty, everything passes

    def __bool__(self) -> bool:
        return bool(self.line)

    def refuse(self, event: str) -> None:
        """Raise for an event that makes steps slow, if the policy is strict. It is a sentence, with place and cure.

        Raises:
            StrictError: The policy is strict.
        """
        if self.line:
            raise StrictError(f"strict=True, in the fit at {self.line}: {event}")


LENIENT = Strict()
