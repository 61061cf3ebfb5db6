"""`Report`: the work of a model's steps, the time that it took, and a sentence about each fault."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..errors import few
from ..runtime import cure_for
from ..utils.counters import Compiled, Counts
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
        steps: The number of its steps.
        rows: The number of its rows.
        seconds: The time that it took.
        waited: The part of that time in which the loop had no batch.
        tokens: The number of tokens in its rows, padding included; 0 if they are no texts.
        operations: What its steps computed, in operations; 0 if nobody has counted.
    """

    role: str
    steps: int
    rows: int
    seconds: float
    waited: float
    tokens: int = 0
    operations: int = 0


@dataclass(frozen=True)
class Report:
    """The work of a model's steps since its last `fit` began, or since the model was made.

    `passes`, `traced` and `donated` are the model's. `counts` are the whole process's, and so are the problems found in
    them: graphs, waits, reads and times of another model that ran meanwhile are among them.

    Attributes:
        passes: The last thousand passes over data.
        counts: Graphs, waits, fallbacks, host reads and times of the process.
        traced: The reason why a step is traced on every call, by role; empty where it is replayed. Only roles that
            have run.
        donated: The bytes of weights and optimizer state that each step writes its new values over.
        cores: The number of cores that compute.
        available: The number of cores that there are.
        joined: True if several steps run as one graph.
        metrics_report: The runtime's own report, if it was asked for.
        peak: The operations a second that all cores can compute at most; None on a CPU, or if it isn't known.
        predicted: The seconds of a training step that the model's last preflight has estimated; None without one.
        attention: How each layer's attention is computed, by its name: `"flash"`, or `"plain"` with the reason; empty
            with `attention="plain"`.
        data: What the training data say of themselves, such as their padding, by name.

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
    peak: float | None = None
    predicted: float | None = None
    attention: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, str] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """The time of all passes, or all time measured if that is more: callbacks also work between passes."""
        measured = sum(seconds for phase, seconds in self.counts.seconds.items() if phase not in _ASIDE)
        return max(measured, sum(one.seconds for one in self.passes))

    @property
    def steps(self) -> int:
        """The number of training steps."""
        return sum(one.steps for one in self.passes if one.role == "train")

    @property
    def rows_per_second(self) -> float | None:
        """The rows a second of the last epoch, over all cores; None if there was none."""
        last = self.last_epoch
        return None if last is None else last.rows / last.seconds

    @property
    def tokens_per_second(self) -> float | None:
        """The tokens a second of the last epoch, over all cores, padding included; None if rows are no texts."""
        last = self.last_epoch
        return last.tokens / last.seconds if last is not None and last.tokens else None

    @property
    def share_of_peak(self) -> float | None:
        """The share of the chips' published peak in bfloat16 that the last epoch reached; None on a CPU.

        The operations are those of matrix products and convolutions.
        """
        last = self.last_epoch
        if last is None or not last.operations or self.peak is None:
            return None
        return last.operations / last.seconds / self.peak

    @property
    def last_epoch(self) -> Pass | None:
        """The last pass of training; None if there was none."""
        return next((one for one in reversed(self.passes) if one.role == "train" and one.seconds), None)

    @property
    def problems(self) -> list[str]:
        """What made the training slow: a sentence for each fault, which says what to do."""
        counts = self.counts
        training = [one for one in self.passes if one.role == "train"]
        traced = {role: cause for role, cause in self.traced.items() if cause}
        on_host = [(what, line) for what, line in counts.lines if counts.fallbacks[what]]
        reads = self.lines_read - {line for line in self.lines_read for cause in traced.values() if line in cause}
        roles = ("train", "eval", "predict")
        compiled = {role: [one.cause for one in counts.compiled if one.role == role] for role in roles}
        found = [
            *(advice.traced(role, cause) for role, cause in traced.items()),
            *(advice.fell_back(what, counts.fallbacks[what], line, cure_for(what)) for what, line in on_host),
            advice.read(reads, counts.host_reads) if reads else None,
            None if counts.lines or traced else advice.read_elsewhere(counts.host_reads, self.steps),
            *(advice.compiled(role, causes) for role, causes in compiled.items()),
            advice.compiling(counts.seconds.get("compile", 0.0), self.seconds, len(counts.compiled)),
            advice.waiting(sum(one.waited for one in training), sum(one.seconds for one in training)),
            advice.logs_read(counts.waits["batch logs"], self.steps),
            advice.weights_changed(counts.waits["changed weights"], self.steps),
            advice.in_callbacks(counts.seconds.get("callbacks", 0.0), self.seconds),
            advice.validating(*self._repeated("eval")),
            advice.unused(self.cores, self.available),
        ]
        return [sentence for sentence in found if sentence]

    @property
    def lines_read(self) -> set[str]:
        """The lines where steps read a value."""
        return {line for what, line in self.counts.lines if what == "read"}

    def _repeated(self, role: str) -> tuple[float, float]:
        """The time of a role's passes, and of all passes, without the first of each role, which compile."""
        first = {one.role: i for i, one in reversed(list(enumerate(self.passes)))}
        later = [one for i, one in enumerate(self.passes) if first[one.role] != i]
        return sum(one.seconds for one in later if one.role == role), sum(one.seconds for one in later)

    @property
    def hints(self) -> list[str]:
        """Sentences about things that are no fault, but could be faster."""
        busy = self.counts.seconds
        elapsed = self.seconds - busy.get("compile", 0.0) - busy.get("trace", 0.0)
        found = advice.starting(busy.get("steps", 0.0), elapsed, self.joined)
        return [found] if found else []

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
    counts = report.counts
    speed = report.rows_per_second
    tokens = report.tokens_per_second
    share = report.share_of_peak
    reads = ", ".join(sorted(report.lines_read))
    called = {what: f", at {line}" for what, line in counts.lines}
    fallbacks = [f"{name} ({times}x{called.get(name, '')})" for name, times in counts.fallbacks.items() if times]
    facts = {
        "steps of training": f"{report.steps:,}",
        "rows a second": f"{speed:,.0f}" if speed else "",
        "tokens a second": f"{tokens:,.0f}" if tokens else "",
        "share of the peak": "" if share is None else f"{share:.1%} of {report.peak:.3g} operations a second",
        **report.data,
        "a step": _beside_predicted(report),
        **{f"{role} step": f"traced: {cause}" if cause else "replayed" for role, cause in report.traced.items()},
        **attention_in_words(report.attention),
        "on the host": ", ".join(fallbacks),
        "values read": f"{counts.host_reads}{reads and f', at {reads}'}" if counts.host_reads else "",
        "memory reused": f"{report.donated:,} bytes" if report.donated else "",
    }
    table = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        if value:
            table.add_row(name, value)
    return table


def attention_in_words(forms: Mapping[str, str]) -> dict[str, str]:
    """The layers of each form of attention, for a table.

    Example:
        >>> attention_in_words({"blocks.0": "flash", "blocks.1": "flash", "head": "plain: 64 places are few"})
        {'flash attention': 'blocks.0, blocks.1', 'plain attention': 'head (64 places are few)'}
    """
    layers: dict[str, list[str]] = {}
    for layer, form in forms.items():
        layers.setdefault(form, []).append(layer or "the module")
    words: dict[str, str] = {}
    for form, names in layers.items():
        kind, _, reason = form.partition(": ")
        said = few(names) + (f" ({reason})" if reason else "")
        words[f"{kind} attention"] = "; ".join(filter(None, [words.get(f"{kind} attention", ""), said]))
    return words


def _beside_predicted(report: Report) -> str:
    """The time of a step in the last epoch beside the predicted one, on a TPU."""
    last = report.last_epoch
    if last is None or not last.steps or report.predicted is None or report.peak is None:
        return ""
    real = last.seconds / last.steps
    return f"{1000 * real:.3g} ms, predicted {1000 * report.predicted:.3g}: {real / report.predicted:.2f} times"


def _times(report: Report) -> Table:
    """The phases with their times, and the number of waits."""
    busy = dict(report.counts.seconds)
    waits = report.counts.waits
    aside = {f"{name} data, beside or while waiting for them": busy.pop(name, 0.0) for name in _ASIDE}
    aside["execution, as the runtime counts it"] = report.counts.executing
    table = Table("phase", "seconds", "share", "times", box=None, header_style="bold")
    for column in table.columns[1:]:
        column.justify = "right"
    names = {
        "steps": "start of graphs",
        "data": "waiting for data",
        "trace": "tracing",
        "audit": "auditing",
        "compile": "compiling",
    }
    names |= {f"wait: {reason}": f"waiting for the device: {reason}" for reason in waits}
    rows = [
        (names.get(phase, phase), seconds, str(waits[phase.removeprefix("wait: ")] or ""))
        for phase, seconds in sorted(busy.items(), key=lambda item: -item[1])
    ]
    unknown = "steps, callbacks and the loop (Diagnostics() tells them apart)"
    rows.append(("the loop itself" if "steps" in busy else unknown, max(0.0, report.seconds - sum(busy.values())), ""))
    for name, seconds, times in rows:
        if seconds:
            table.add_row(name, f"{seconds:.3f}", f"{seconds / report.seconds:.0%}", times)
    for name, seconds in aside.items():
        if seconds:
            table.add_row(name, f"{seconds:.3f}", "", "")
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
