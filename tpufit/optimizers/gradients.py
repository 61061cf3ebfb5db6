"""`GradientConfig`: how many batches' gradients are accumulated, and how gradients are clipped.

`accumulation.py` accumulates them.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from ..errors import ArgumentError, require_number, require_whole


@dataclass(frozen=True)
class GradientConfig:
    """The options of `compile` for accumulation and clipping.

    Raises:
        ArgumentError: A value is out of range, or more than one kind of clipping is given.
    """

    accumulate_steps: int = 1  # batches for each step of the optimizer
    clip_norm: float | None = None  # the largest norm of each parameter's gradient
    clip_value: float | None = None  # the largest absolute value of each element
    global_clip_norm: float | None = None  # the largest norm of all gradients together

    def __post_init__(self) -> None:
        object.__setattr__(self, "accumulate_steps", require_whole("accumulate_steps", self.accumulate_steps))
        limits = {name: getattr(self, name) for name in ("clip_norm", "clip_value", "global_clip_norm")}
        given = {name: limit for name, limit in limits.items() if limit is not None}
        if len(given) > 1:
            raise ArgumentError(f"only one of {', '.join(limits)} can be given, got {given}")
        for name, limit in given.items():
            object.__setattr__(self, name, require_number(name, limit, "a number above 0", lambda most: most > 0))

    def clip(self, parameters: Iterable[nn.Parameter]) -> None:
        """Clip the gradients, inside a step. On several cores the gradients are already the whole batch's.

        Source: `torch.nn.utils.clip_grad_norm_` and `clip_grad_value_`.
        """
        with_gradient = [p for p in parameters if p.grad is not None]
        if self.clip_value is not None:
            nn.utils.clip_grad_value_(with_gradient, self.clip_value, foreach=False)
        if self.clip_norm is not None:
            for parameter in with_gradient:
                nn.utils.clip_grad_norm_(parameter, self.clip_norm, foreach=False)
        if self.global_clip_norm is not None:
            nn.utils.clip_grad_norm_(with_gradient, self.global_clip_norm, foreach=False)
