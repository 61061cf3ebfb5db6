"""`Report`: the work of a model's steps, their time, and a sentence about each problem."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..errors import join_few
from ..runtime import explain_slowness, find_cure
from ..utils.counters import Compiled, Counts
from ..utils.text import render
from . import messages as advice

_WIDTH = 100  # columns
_SHOWN = 12  # compilations that the table has a row for
_PARALLEL = ("read", "prepare")  # phases in parallel to the others, or inside them


@dataclass(frozen=True)
class Pass:
    """One pass over data.

    Attributes:
        role: `"train"`, `"eval"` or `"predict"`.
        steps: The number of steps.
        rows: The number of rows.
        seconds: The pass's time.
        waited: The part of that time in which the loop had no batch.
        tokens: The number of tokens in the rows, including padding; 0 if they aren't texts.
        operations: The operations that the steps computed; 0 if they weren't counted.
        begun: This pass's totals after its first graph, which may have been compiled; None if unknown.
    """

    role: str
    steps: int
    rows: int
    seconds: float
    waited: float
    tokens: int = 0
    operations: int = 0
    begun: Pass | None = None

    def per_second(self, what: str) -> float:
        """Return the speed of the steps after the first graph, or of all steps if there is only one graph.

        Args:
            what: `"steps"`, `"rows"`, `"tokens"` or `"operations"`.

        Example:
            >>> Pass("train", 11, 352, 70.0, 0.0, begun=Pass("train", 1, 32, 60.0, 0.0)).per_second("rows")
            32.0
        """
        count, seconds = getattr(self, what), self.seconds
        first = self.begun
        if first is not None and first.steps < self.steps and first.seconds < seconds:
            count, seconds = count - getattr(first, what), seconds - first.seconds
        return float(count / seconds)


@dataclass(frozen=True)
class Report:
    """The work of a model's steps since its last `fit` began, or since the model was created.

    `passes`, `traced` and `donated` are the model's. `counts`, and the problems in them, are the whole process's: they
    include graphs, waits, reads and times of other models that ran at the same time.

    Attributes:
        passes: The last thousand passes over data.
        counts: Graphs, waits, fallbacks, host reads and times of the process.
        traced: Why a step is traced at every call, by role; "" if it is replayed. Only roles that have run.
        eager: The roles whose steps run operation by operation, because TorchTPU can't trace the whole step.
        donated: The bytes of weights and optimizer state that each step updates in place.
        cores: The number of cores in use.
        available: The number of all cores.
        joined: True if several steps run as one graph.
        metrics_report: The runtime's own report, if requested.
        peak: The peak operations per second of all cores; None on a CPU, or if unknown.
        predicted: The seconds of a training step, as estimated by the model's last preflight; None without a preflight.
        attention: How each layer's attention is computed, by layer name: `"flash"`, or `"plain"` with the reason; empty
            with `attention="plain"`.
        data: Facts about the training data, such as their padding, by name.

    Example:
        >>> seconds = {"wait: batch logs": 2.0, "compile": 0.5}
        >>> counts = Counts(waits=Counter({"batch logs": 40}), seconds=seconds)
        >>> report = Report((Pass("train", 40, 1280, 4.0, 0.1),), counts, {"train": ""})
        >>> report.problems
        ['callbacks read the logs of 40 of 40 batches, and waited for the device each time: read them every \
hundredth batch, or in on_epoch_end']
    """

    passes: tuple[Pass, ...]
    counts: Counts
    traced: Mapping[str, str]
    eager: frozenset[str] = frozenset()
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
        """The time of all passes, or all measured time if it is longer: callbacks also work between passes."""
        measured = sum(seconds for phase, seconds in self.counts.seconds.items() if phase not in _PARALLEL)
        return max(measured, sum(each.seconds for each in self.passes))

    @property
    def steps(self) -> int:
        """The number of training steps."""
        return sum(each.steps for each in self.passes if each.role == "train")

    @property
    def rows_per_second(self) -> float | None:
        """The last epoch's rows per second, over all cores; None if there was no epoch.

        Like the progress bar's samples/s, it excludes validations and the first steps, which may be compiled.
        """
        last = self.last_epoch
        return None if last is None else last.per_second("rows")

    @property
    def tokens_per_second(self) -> float | None:
        """The last epoch's tokens per second, over all cores, including padding; None if rows aren't texts."""
        last = self.last_epoch
        return last.per_second("tokens") if last is not None and last.tokens else None

    @property
    def share_of_peak(self) -> float | None:
        """The share of the chips' published bfloat16 peak that the last epoch reached; None on a CPU.

        Counts the operations of matrix products and convolutions.
        """
        last = self.last_epoch
        if last is None or not last.operations or self.peak is None:
            return None
        return last.per_second("operations") / self.peak

    @property
    def last_epoch(self) -> Pass | None:
        """The last pass of training, or None."""
        return next((each for each in reversed(self.passes) if each.role == "train" and each.seconds), None)

    @property
    def problems(self) -> list[str]:
        """What made the training slow: a sentence for each problem, with a cure."""
        counts = self.counts
        training = [each for each in self.passes if each.role == "train"]
        traced = {role: cause for role, cause in self.traced.items() if cause}
        on_host = [(what, line) for what, line in counts.lines if counts.fallbacks[what]]
        reads = self.lines_read - {line for line in self.lines_read for cause in traced.values() if line in cause}
        roles = ("train", "eval", "predict")
        compiled = {role: [each.cause for each in counts.compiled if each.role == role] for role in roles}
        sentences = [
            *(explain_slowness(role, cause, role in self.eager) for role, cause in traced.items()),
            *(advice.report_fallback(what, counts.fallbacks[what], line, find_cure(what)) for what, line in on_host),
            advice.report_reads(reads, counts.host_reads) if reads else None,
            None if counts.lines or traced else advice.report_reads_elsewhere(counts.host_reads, self.steps),
            *(advice.report_compilations(role, causes) for role, causes in compiled.items()),
            advice.report_compile_time(counts.seconds.get("compile", 0.0), self.seconds, len(counts.compiled)),
            advice.report_waiting(sum(each.waited for each in training), sum(each.seconds for each in training)),
            advice.report_read_logs(counts.waits["batch logs"], self.steps),
            advice.report_changed_weights(counts.waits["changed weights"], self.steps),
            advice.report_slow_callbacks(counts.seconds.get("callbacks", 0.0), self.seconds),
            advice.report_validation_time(*self._time_validating()),
            advice.report_idle_cores(self.cores, self.available),
        ]
        return [sentence for sentence in sentences if sentence]

    @property
    def lines_read(self) -> set[str]:
        """The lines where steps read a value."""
        return {line for what, line in self.counts.lines if what == "read"}

    def _time_validating(self) -> tuple[float, float]:
        """Return the time of validations, and of all passes, without the first of each role, which compile."""
        first = {each.role: i for i, each in reversed(list(enumerate(self.passes)))}
        later = [each for i, each in enumerate(self.passes) if first[each.role] != i]
        return sum(each.seconds for each in later if each.role == "eval"), sum(each.seconds for each in later)

    @property
    def hints(self) -> list[str]:
        """Sentences about what could be faster, but isn't a problem."""
        busy = self.counts.seconds
        elapsed = self.seconds - busy.get("compile", 0.0) - busy.get("trace", 0.0)
        hint = advice.report_starting(busy.get("steps", 0.0), elapsed, self.joined)
        return [hint] if hint else []

    def __str__(self) -> str:
        return render(self, _WIDTH)

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
        "samples/s": f"{speed:,.0f}" if speed else "",
        "tokens/s": f"{tokens:,.0f}" if tokens else "",
        "share of the peak": "" if share is None else f"{share:.1%} of {report.peak:.3g} operations per second",
        **report.data,
        "a step": _compare_with_prediction(report),
        **{f"{role} step": _describe_execution(report, role, cause) for role, cause in report.traced.items()},
        **group_attention_forms(report.attention),
        "on the host": ", ".join(fallbacks),
        "values read": f"{counts.host_reads}{reads and f', at {reads}'}" if counts.host_reads else "",
        "memory reused": f"{report.donated:,} bytes" if report.donated else "",
    }
    table = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        if value:
            table.add_row(name, value)
    return table


def _describe_execution(report: Report, role: str, cause: str) -> str:
    """Say how a step runs, and why if it isn't replayed."""
    if not cause:
        return "replayed"
    return f"{'eager' if role in report.eager else 'traced'}: {cause}"


def group_attention_forms(forms: Mapping[str, str]) -> dict[str, str]:
    """Group the layers by their form of attention, for a table.

    Example:
        >>> group_attention_forms({"blocks.0": "flash", "blocks.1": "flash", "head": "plain: it has dropout"})
        {'flash attention': 'blocks.0, blocks.1', 'plain attention': 'head (it has dropout)'}
    """
    layers: dict[str, list[str]] = {}
    for layer, form in forms.items():
        layers.setdefault(form, []).append(layer or "the module")
    words: dict[str, str] = {}
    for form, names in layers.items():
        kind, _, reason = form.partition(": ")
        text = join_few(names) + (f" ({reason})" if reason else "")
        words[f"{kind} attention"] = "; ".join(filter(None, [words.get(f"{kind} attention", ""), text]))
    return words


def _compare_with_prediction(report: Report) -> str:
    """Compare the time of a step in the last epoch with the predicted time, on a TPU."""
    last = report.last_epoch
    if last is None or not last.steps or report.predicted is None or report.peak is None:
        return ""
    actual = 1 / last.per_second("steps")
    return f"{1000 * actual:.3g} ms, predicted {1000 * report.predicted:.3g}: {actual / report.predicted:.2f} times"


def _times(report: Report) -> Table:
    """Make a table of the phases, their times, and the number of waits."""
    busy = dict(report.counts.seconds)
    waits = report.counts.waits
    aside = {f"{name} data, beside or while waiting for them": busy.pop(name, 0.0) for name in _PARALLEL}
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
    for each in compiled[:_SHOWN]:
        table.add_row(each.role, f"{each.seconds:.2f}", each.cause)
    if len(compiled) > _SHOWN:
        rest = Counter(each.role for each in compiled[_SHOWN:])
        table.add_row("...", f"{sum(each.seconds for each in compiled[_SHOWN:]):.2f}", f"and more: {dict(rest)}")
    return table


def _section(title: str, content: Table | Group | Text) -> Group:
    return Group(Text(f"\n{title}", style="bold"), Padding(content, (0, 0, 0, 2)))
