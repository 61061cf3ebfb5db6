"""`StepSpeed`: the training speed since an epoch, its first step, or the last written point began."""

import time


class StepSpeed:
    """The training speed, excluding validations."""

    def __init__(self) -> None:
        # The steps and time at which an epoch, its steps after the first, and the batches since the last point began.
        self._marks = {"epoch": (0, 0.0), "later": (0, 0.0), "batch": (0, 0.0)}
        self._paused = 0.0

    def mark(self, name: str, steps: int) -> None:
        """Measure the speed from here on."""
        self._marks[name] = (steps, time.perf_counter())

    def pause(self) -> None:
        """Note that a validation begins."""
        self._paused = time.perf_counter()

    def resume(self) -> None:
        """Exclude the validation's time."""
        took = time.perf_counter() - self._paused
        self._marks = {name: (steps, began + took) for name, (steps, began) in self._marks.items()}

    def has_passed_multiple(self, name: str, every: int, steps: int) -> bool:
        """True if a multiple of `every` steps has been reached since a mark."""
        return steps // every > self._marks[name][0] // every

    def steps_per_second(self, name: str, steps: int) -> float:
        """Return the speed since a mark."""
        before, began = self._marks[name]
        return (steps - before) / max(time.perf_counter() - began, 1e-9)
