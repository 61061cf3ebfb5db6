"""`ProgressLine`: the text of one line of progress. Independent of terminals."""

from collections.abc import Callable

from rich.text import Text

from .scalars import as_text

_WIDTH = 20


class ProgressLine:
    """The progress of a pass over the data, as text. Times are arguments, in seconds of any clock.

    Example:
        >>> line = ProgressLine("Epoch 3/10", total=23, now=0.0)
        >>> line.advance(23, now=2.0)
        >>> line.values = {"loss": 0.1234, "accuracy": 0.97}
        >>> line.summary(now=2.125)
        'Epoch 3/10 - 2.1s - 23 steps - loss: 0.1234 - accuracy: 0.9700'
    """

    def __init__(self, title: str, total: int | None, now: float) -> None:
        self.title = title  # the start of the line, e.g. "Epoch 3/10"
        self.total = total  # steps of the pass, or None if unknown
        self.done = 0  # steps so far
        self.values: dict[str, float] = {}  # the last known loss and metrics
        # Converts steps per second to other rates, see `tpufit.Model.speed`.
        self.speed: Callable[[float], dict[str, float]] = lambda steps_per_second: {}
        self.input_bound: float | None = None  # the share of time spent waiting for data, once known
        self._began = now
        # The state after the first step, which may have been compiled, and after the last.
        self._first_time = now
        self._first_rows = 0
        self._first_done = 0
        self._last_time = now
        self._last_rows = 0
        self._stopped = False

    def advance(self, done: int, now: float, rows: int = 0) -> None:
        """Record the steps since the start of the pass, and their rows (0: unknown)."""
        self._last_time = now
        self._last_rows = rows
        self._stopped = False
        if self.done == 0:
            self._first_time = now
            self._first_rows = rows
            self._first_done = done
        self.done = done

    def stop(self, now: float) -> None:
        """Record that the device has finished the steps; a validation may follow."""
        if not self._stopped:
            self._last_time = now
            self._stopped = True

    def exclude(self, seconds: float) -> None:
        """Exclude a validation that has just ended from the steps' time."""
        self._first_time += seconds
        self._last_time += seconds

    def samples_per_second(self) -> float | None:
        """Return the speed of the steps after the first; None if unknown."""
        rows = self._last_rows - self._first_rows
        seconds = self._last_time - self._first_time
        return rows / seconds if rows and seconds > 0 else None

    def _format_rates(self) -> list[str]:
        """Return tokens per second and the share of the peak, of the steps after the first, as text."""
        steps = self.done - self._first_done
        seconds = self._last_time - self._first_time
        if not steps or seconds <= 0:
            return []
        derived = self.speed(steps / seconds)
        tokens = derived.get("tokens_per_second")
        share = derived.get("share_of_peak")
        texts = [] if tokens is None else [f"{tokens:,.0f} tokens/s"]
        return texts if share is None else [*texts, f"{share:.0%} of the peak"]

    def seconds_remaining(self, now: float) -> float | None:
        """Estimate the remaining time from the steps after the first, which may have been compiled; None if unknown."""
        if self.total is None or not 2 <= self.done < self.total:
            return None
        return (self.total - self.done) * (now - self._first_time) / (self.done - 1)

    def summary(self, now: float) -> str:
        """Return the line without a bar, for a file."""
        steps = f"{self.done} step{'' if self.done == 1 else 's'}"
        return " - ".join([self.title, format_duration(now - self._began), steps, *self._values()])

    def bar(self, now: float, ended: bool, ascii_only: bool = False, compiling_since: float | None = None) -> Text:
        """Return the line with a bar, for a terminal, with the elapsed time if it has ended, else the remaining time.

        A running compilation began at `compiling_since`.
        """
        full, empty = ("=", "-") if ascii_only else ("━", "━")
        share = min(1.0, self.done / self.total) if self.total else 0.0
        filled = round(_WIDTH * share)
        remaining = None if ended else self.seconds_remaining(now)
        clock = format_duration(now - self._began) if remaining is None else f"{format_duration(remaining)} left"
        if compiling_since is not None:
            clock = f"compiling... {format_duration(now - compiling_since)}"
        line = Text(no_wrap=True, overflow="crop" if ascii_only else "ellipsis")
        line.append(f"{self.title} ", style="bold")
        line.append(full * filled, style="green")  # one of the 16 colors that every terminal has
        line.append(empty * (_WIDTH - filled), style="bright_black")
        line.append(f" {self.done}/{'?' if self.total is None else self.total} ")
        line.append(" - ".join([clock, *self._values()]))
        return line

    def _values(self) -> list[str]:
        speed = self.samples_per_second()
        values = [] if speed is None else [f"{speed:.0f} samples/s" if speed >= 10 else f"{speed:.2g} samples/s"]
        values += self._format_rates()
        values += [f"{name}: {as_text(value)}" for name, value in self.values.items()]
        if self.input_bound is not None and self.input_bound >= 0.01:
            values.append(f"waited for data: {self.input_bound:.0%}")
        return values


def format_duration(seconds: float) -> str:
    """Format a time for people.

    Example:
        >>> format_duration(2.125), format_duration(83), format_duration(3723)
        ('2.1s', '1:23', '1:02:03')
    """
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
