"""`ProgressLine`: the text of one line of progress, with no terminal."""

from collections.abc import Callable

from rich.text import Text

from .scalars import as_text

_WIDTH = 20


class ProgressLine:
    """The progress of a pass over the data, as text. Time comes in as an argument, in seconds of any clock.

    Example:
        >>> line = ProgressLine("Epoch 3/10", total=23, now=0.0)
        >>> line.advance(23, now=2.0)
        >>> line.values = {"loss": 0.1234, "accuracy": 0.97}
        >>> line.summary(now=2.125)
        'Epoch 3/10 - 2.1s - 23 steps - loss: 0.1234 - accuracy: 0.9700'
    """

    def __init__(self, title: str, total: int | None, now: float) -> None:
        self.title = title  # the line's beginning, e.g. "Epoch 3/10"
        self.total = total  # steps of the pass, or None if unknown
        self.done = 0  # steps so far
        self.values: dict[str, float] = {}  # the loss and the metrics, as they were last known
        # Says what steps at some pace come to, see `tpufit.Model.speed`.
        self.speed: Callable[[float], dict[str, float]] = lambda steps_per_second: {}
        self.input_bound: float | None = None  # the share of the time in which data were waited for, once that is known
        self._began = now
        # After the first step, which may have been compiled, and after the last.
        self._first_time = now
        self._first_rows = 0
        self._first_done = 0
        self._last_time = now
        self._last_rows = 0
        self._stopped = False

    def advance(self, done: int, now: float, rows: int = 0) -> None:
        """Note the steps done since the start of the pass, and the rows in them (0: unknown)."""
        self._last_time = now
        self._last_rows = rows
        if self.done == 0:
            self._first_time = now
            self._first_rows = rows
            self._first_done = done
        self.done = done

    def stop(self, now: float) -> None:
        """Note that the device has come to the end of the steps; a validation may follow."""
        if not self._stopped:
            self._last_time = now
            self._stopped = True

    def samples_per_second(self) -> float | None:
        """The speed of the steps after the first; None if it isn't known."""
        rows = self._last_rows - self._first_rows
        seconds = self._last_time - self._first_time
        return rows / seconds if rows and seconds > 0 else None

    def _derived(self) -> list[str]:
        """What the steps after the first come to."""
        steps = self.done - self._first_done
        seconds = self._last_time - self._first_time
        if not steps or seconds <= 0:
            return []
        found = self.speed(steps / seconds)
        tokens = found.get("tokens_per_second")
        share = found.get("share_of_peak")
        said = [] if tokens is None else [f"{tokens:,.0f} tokens/s"]
        return said if share is None else [*said, f"{share:.0%} of the peak"]

    def seconds_left(self, now: float) -> float | None:
        """An estimate from the steps after the first, which may have been compiled; None before and in the end."""
        if self.total is None or not 2 <= self.done < self.total:
            return None
        return (self.total - self.done) * (now - self._first_time) / (self.done - 1)

    def summary(self, now: float) -> str:
        """The line without a bar, for a file."""
        steps = f"{self.done} step{'' if self.done == 1 else 's'}"
        return " - ".join([self.title, duration(now - self._began), steps, *self._values()])

    def bar(self, now: float, ended: bool, ascii_only: bool = False, compiling_since: float | None = None) -> Text:
        """The line with a bar, for a terminal, with the time taken if it has ended, else with the time left.

        A compilation under way began at `compiling_since`.
        """
        full, empty = ("=", "-") if ascii_only else ("━", "━")
        share = min(1.0, self.done / self.total) if self.total else 0.0
        filled = round(_WIDTH * share)
        left = None if ended else self.seconds_left(now)
        clock = f"{duration(left)} left" if left is not None else duration(now - self._began)
        if compiling_since is not None:
            clock = f"compiling... {duration(now - compiling_since)}"
        line = Text(no_wrap=True, overflow="crop" if ascii_only else "ellipsis")
        line.append(f"{self.title} ", style="bold")
        line.append(full * filled, style="green")  # two of the 16 colours that every terminal has
        line.append(empty * (_WIDTH - filled), style="bright_black")
        line.append(f" {self.done}/{'?' if self.total is None else self.total} ")
        line.append(" - ".join([clock, *self._values()]))
        return line

    def _values(self) -> list[str]:
        speed = self.samples_per_second()
        values = [] if speed is None else [f"{speed:.0f} samples/s" if speed >= 10 else f"{speed:.2g} samples/s"]
        values += self._derived()
        values += [f"{name}: {as_text(value)}" for name, value in self.values.items()]
        if self.input_bound is not None and self.input_bound >= 0.01:
            values.append(f"waited for data: {self.input_bound:.0%}")
        return values


def duration(seconds: float) -> str:
    """A time for people.

    Example:
        >>> duration(2.125), duration(83), duration(3723)
        ('2.1s', '1:23', '1:02:03')
    """
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
