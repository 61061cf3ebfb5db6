"""`Report`: what the steps of a model did and what they took, with what is wrong in sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..runtime import Compiled, Counts, cure_of
from ..utils.text import rendered
from . import messages as advice

_WIDTH = 100  # columns
_SHOWN = 12  # compilations that the table has a row for
_ASIDE = ("read", "prepare")  # phases that pass beside the others, or within them


@dataclass(frozen=True)
class Pass:
    """One pass over data.

    Attributes:
        role: `"train"`, `"eval"` or `"predict"`.
        steps: How many steps it had.
        rows: How many rows.
        seconds: How long it took.
        waited: For how long of that the loop had no batch.
    """

    role: str
    steps: int
    rows: int
    seconds: float
    waited: float


@dataclass(frozen=True)
class Report:
    """What the steps of a model did since its last `fit` began, or since it was made.

    Counters and times are the process's: those of another model that ran meanwhile are in them.

    Attributes:
        passes: The passes over data, the last thousand.
        counts: Graphs, waits, fallbacks, host reads and times.
        traced: Why a step is traced on every call, by role; nothing where it is replayed. Only roles that have run.
        donated: How many bytes of weights and optimizer state each step writes its new values over.
        cores: How many cores compute,
        available: and how many there are.
        joined: Whether several steps run as one graph.
        metrics_report: The runtime's own report, if it was asked for.

    Example:
        >>> seconds = {"wait: batch logs": 2.0, "compile": 0.5}
        >>> counts = Counts(waits=Counter({"batch logs": 40}), seconds=seconds)
        >>> report = Report((Pass("train", 40, 1280, 4.0, 0.1),), counts, {"train": ""})
        >>> report.problems
        ['callbacks read the logs of 40 of 40 batches, and each time the device was waited for: read them every \
hundredth batch, or in on_epoch_end']
    """

    passes: tuple[Pass, ...]
    counts: Counts
    traced: Mapping[str, str]
    donated: int = 0
    cores: int = 1
    available: int = 1
    joined: bool = False
    metrics_report: str = ""

    @property
    def seconds(self) -> float:
        """How long all passes took, or all that was measured if that is more: callbacks also work between passes."""
        measured = sum(seconds for phase, seconds in self.counts.seconds.items() if phase not in _ASIDE)
        return max(measured, sum(one.seconds for one in self.passes))

    @property
    def steps(self) -> int:
        """How many steps of training there were."""
        return sum(one.steps for one in self.passes if one.role == "train")

    @property
    def rows_per_second(self) -> float | None:
        """How many rows a second the last epoch trained, over all cores; None if there was none."""
        last = next((one for one in reversed(self.passes) if one.role == "train" and one.seconds), None)
        return None if last is None else last.rows / last.seconds

    @property
    def problems(self) -> list[str]:
        """What is wrong, in a sentence each with its cure. Empty if nothing is."""
        counts, training = self.counts, [one for one in self.passes if one.role == "train"]
        causes = {
            role: [one.cause for one in counts.compiled if one.role == role] for role in ("train", "eval", "predict")
        }
        traced = [cause for cause in self.traced.values() if cause]
        reads = {line for what, line in counts.lines if what == "read" and not any(line in cause for cause in traced)}
        found = [
            *(advice.traced(role, cause) for role, cause in self.traced.items() if cause),
            *(
                advice.fallen(what, counts.fallbacks[what], line, cure_of(what))
                for what, line in counts.lines
                if counts.fallbacks[what]
            ),
            advice.read(reads, counts.host_reads) if reads else None,
            None if counts.lines or traced else advice.read_elsewhere(counts.host_reads, self.steps),
            *(advice.compiled(role, list_) for role, list_ in causes.items()),
            advice.compiling(counts.seconds.get("compile", 0.0), self.seconds, len(counts.compiled)),
            advice.waiting(sum(one.waited for one in training), sum(one.seconds for one in training)),
            advice.logs_read(counts.waits["batch logs"], self.steps),
            advice.weights_changed(counts.waits["changed weights"], self.steps),
            advice.in_callbacks(counts.seconds.get("callbacks", 0.0), self.seconds),
            advice.validating(*self._repeated("eval")),
            advice.unused(self.cores, self.available),
        ]
        return [sentence for sentence in found if sentence]

    def _repeated(self, role: str) -> tuple[float, float]:
        """How long the passes of a role took, and all passes, without the first of each role, which compile."""
        first = {one.role: i for i, one in reversed(list(enumerate(self.passes)))}
        later = [one for i, one in enumerate(self.passes) if first[one.role] != i]
        return sum(one.seconds for one in later if one.role == role), sum(one.seconds for one in later)

    @property
    def hints(self) -> list[str]:
        """What a TPU could do better with, where nothing is wrong."""
        busy = self.counts.seconds
        elapsed = self.seconds - busy.get("compile", 0.0) - busy.get("trace", 0.0)
        found = advice.starting(busy.get("steps", 0.0), elapsed, self.joined)
        return [found] if found else []

    @property
    def host_time(self) -> str:
        """Where the host's time went, as a table: each phase without the others inside it."""
        return rendered(_times(self), _WIDTH)

    def __str__(self) -> str:
        return rendered(self, _WIDTH)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield _facts(self)
        yield _section("Where the host's time went", _times(self))
        if self.counts.compiled:
            yield _section("Graphs compiled", _compilations(self.counts.compiled))
        for title, sentences in (("What is wrong", self.problems), ("Hints", self.hints)):
            if sentences:
                yield _section(title, Group(*(Text(f"- {sentence}") for sentence in sentences)))
        if self.metrics_report:
            yield _section("The runtime's own report", Text(self.metrics_report))


def _facts(report: Report) -> Table:
    table = Table.grid(padding=(0, 2))
    speed = report.rows_per_second
    reads = ", ".join(sorted({line for what, line in report.counts.lines if what == "read"}))
    called = {what: line for what, line in report.counts.lines}
    fallbacks = [
        f"{name} ({times}x{', at ' + called[name] if name in called else ''})"
        for name, times in report.counts.fallbacks.items()
        if times
    ]
    for name, value in (
        ("steps of training", f"{report.steps:,}"),
        ("rows a second", f"{speed:,.0f}" if speed else ""),
        *((f"{role} step", f"traced: {cause}" if cause else "replayed") for role, cause in report.traced.items()),
        ("on the host", ", ".join(fallbacks)),
        ("values read", f"{report.counts.host_reads}{reads and f', at {reads}'}" if report.counts.host_reads else ""),
        ("memory reused", f"{report.donated:,} bytes" if report.donated else ""),
    ):
        if value:
            table.add_row(name, value)
    return table


def _times(report: Report) -> Table:
    """The phases with their times, and of waits how many there were."""
    busy = dict(report.counts.seconds)
    aside = {name: busy.pop(name, 0.0) for name in _ASIDE}
    table = Table("phase", "seconds", "share", "times", box=None, header_style="bold")
    for column in table.columns[1:]:
        column.justify = "right"
    whole = report.seconds or float("inf")
    names = {"steps": "start of graphs", "data": "waiting for data", "trace": "tracing", "compile": "compiling"}
    for phase, seconds in sorted(busy.items(), key=lambda item: -item[1]):
        reason = phase.removeprefix("wait: ")
        waits = report.counts.waits[reason] if reason != phase else 0
        name = names.get(phase, phase) if reason == phase else f"waiting for the device: {reason}"
        if seconds:
            table.add_row(name, f"{seconds:.3f}", f"{seconds / whole:.0%}", str(waits or ""))
    rest = report.seconds - sum(busy.values())
    if rest > 0:
        unknown = "steps, callbacks and the loop (Diagnostics() tells them apart)"
        what = "the loop itself" if "steps" in busy else unknown
        table.add_row(what, f"{rest:.3f}", f"{rest / whole:.0%}", "")
    for name, seconds in aside.items():
        if seconds:
            table.add_row(f"{name} data, beside or while waiting for them", f"{seconds:.3f}", "", "")
    if report.counts.executing:
        table.add_row("execution, as the runtime counts it", f"{report.counts.executing:.3f}", "", "")
    return table


def _compilations(compiled: Sequence[Compiled]) -> Table:
    table = Table("for", "seconds", "because", box=None, header_style="bold")
    for one in compiled[:_SHOWN]:
        table.add_row(one.role, f"{one.seconds:.2f}", one.cause)
    if len(compiled) > _SHOWN:
        rest = Counter(one.role for one in compiled[_SHOWN:])
        table.add_row("...", f"{sum(one.seconds for one in compiled[_SHOWN:]):.2f}", f"and more: {dict(rest)}")
    return table


def _section(title: str, content: Table | Group | Text) -> Group:
    return Group(Text(f"\n{title}", style="bold"), Padding(content, (0, 0, 0, 2)))
