"""`PreflightReport`: what a TPU will do with a training, in a table; and `Comparison`, of several TPUs."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from ..diagnostics.plots import new_axes
from ..diagnostics.report import attention_in_words
from ..errors import counted
from ..utils.text import rendered, size
from .analysis import CompiledProgram
from .slices import Slice

_WIDTH = 120  # columns
_SHOWN = 12  # layers that the table has a row for
_PHASES = ("forward", "backward", "optimizer", "")
_JOINED_LATER = (
    "steps_per_execution='auto' is compiled as 1: fit joins steps by the time that they take, in one more program"
)
FITS = 0
TOO_LARGE = 1
FAILED = 2


@dataclass(frozen=True)
class _Work:
    """The work of a core in one step: operations, bytes of memory, cycles, and bytes sent; and the step's rows."""

    flops: float
    nbytes: float
    cycles: float
    sent: float
    rows: float


@dataclass(frozen=True)
class PreflightReport:
    """What a TPU will do with a training, by the TPU's own compiler. All times are its estimates, and none is measured.

    Attributes:
        tpu: The slice.
        programs: The programs that `fit` would compile, in its order.
        batch_size: The rows per core.
        precision: The argument of `compile`.
        steps_per_execution: The argument of `compile` (default 1).
        compiler: The versions of the compiler and of what goes with it, by their names (default: not told).
        remat: The argument of `compile`, or what `remat="auto"` has come to (default None).

    Example:
        >>> from tpufit.preflight.analysis import Cost, Memory
        >>> from tpufit.preflight.slices import slice_of
        >>> cost = Cost(flops=4e9, nbytes=1e8, cycles=3_000_000)
        >>> step = CompiledProgram("train", "it is the first step", 512, 1, 2.0, True, Memory(weights=1 << 30), cost)
        >>> report = PreflightReport(slice_of("v5e-8"), [step], 64, "bf16")
        >>> report.fits, report.status, f"{1000 * report.seconds:.2f} ms a step"
        (True, 0, '2.00 ms a step')
    """

    tpu: Slice
    programs: Sequence[CompiledProgram]
    batch_size: int
    precision: str
    steps_per_execution: int | str = 1
    compiler: Mapping[str, str] = field(default_factory=dict)
    remat: Any = None

    @property
    def step(self) -> CompiledProgram:
        """The program of a whole training step, which takes most of the time.

        Of several for the same batches it is the last: the first may only make the optimizer's state, or accumulate.
        """
        first = self.programs[0]
        of_step = [one for one in self.programs if (one.role, one.rows) == (first.role, first.rows)]
        return next((one for one in of_step if not one.fits), of_step[-1])

    @property
    def fits(self) -> bool:
        """True if every program fits into a core's memory."""
        return all(program.fits for program in self.programs)

    @property
    def status(self) -> int:
        """The exit status of `python -m tpufit preflight`: 0 if all fits, else 1."""
        return FITS if self.fits else TOO_LARGE

    @property
    def seconds(self) -> float:
        """The estimated seconds of a step: the compiler's cycles at the chip's clock, and the time on the links."""
        return self._work.cycles / self.tpu.chip.clock + self.bounds["links"]

    @property
    def rows_per_second(self) -> float:
        """The estimated rows a second, on all cores; 0 if the step doesn't fit."""
        return self._work.rows / self.seconds if self.seconds else 0.0

    @property
    def bounds(self) -> dict[str, float]:
        """The seconds of a step if only arithmetic, memory or the links took time, at their published peak."""
        work = self._work
        chip = self.tpu.chip
        return {
            "arithmetic": work.flops / chip.peak,
            "memory": work.nbytes / chip.bandwidth,
            "links": work.sent / chip.links,
        }

    @property
    def bound(self) -> str:
        """What bounds a step most: `"arithmetic"`, `"memory"` or `"links"`."""
        return max(self.bounds, key=self.bounds.__getitem__)

    @property
    def share_of_peak(self) -> float:
        """The share of the chip's published peak in bfloat16 that a step is estimated to reach, from 0 to 1."""
        return self.bounds["arithmetic"] / self.seconds if self.seconds else 0.0

    @property
    def warnings(self) -> list[str]:
        """What is wrong, in sentences, each with its program."""
        # Of one kind that of the first program is enough: the others have the same layers.
        found: dict[str, str] = {}
        for program in self.programs:
            for kind, said in program.warnings.items():
                found.setdefault(kind, f"{program.role} of {program.rows} rows: {said}")
        return list(found.values())

    def as_dict(self) -> dict[str, Any]:
        """Return all figures, as JSON holds them."""
        programs = [
            {
                **{name: value for name, value in asdict(program).items() if name not in ("text", "layers")},
                "layers": [[*place, cycles] for place, cycles in program.layers.items()],
            }
            for program in self.programs
        ]
        estimates = {
            "seconds": self.seconds,
            "rows_per_second": self.rows_per_second,
            "bounds": self.bounds,
            "share_of_peak": self.share_of_peak,
        }
        own = {"tpu": asdict(self.tpu), "batch_size": self.batch_size, "precision": self.precision, "fits": self.fits}
        own |= {"steps_per_execution": self.steps_per_execution, "compiler": dict(self.compiler), "remat": self.remat}
        return own | {"estimates": estimates, "programs": programs}

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write `report.json`, and each optimised program as text.

        Args:
            folder: The folder, which is made if it is missing.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.json").write_text(json.dumps(self.as_dict(), indent=1))
        for number, program in enumerate(self.programs):
            (folder / f"{number}-{program.role}.txt").write_text(program.text)

    def plot(self) -> Any:
        """Draw the memory of a core, and the estimated time of each layer.

        Returns:
            Matplotlib's `Figure`.

        Raises:
            ImportError: Matplotlib is not installed.
        """
        figure, (memory, layers) = new_axes(2, (6.0, 4.0))
        parts = {name: nbytes / 2**30 for name, nbytes in self.step.memory.parts.items() if nbytes}
        memory.barh(list(parts), list(parts.values()))
        memory.axvline(self.tpu.chip.memory / 2**30, linestyle="--", color="gray", label=f"a core of {self.tpu.name}")
        memory.invert_yaxis()
        memory.set(xlabel="GiB", title="memory of a core")
        memory.legend()
        shown = self._by_layer()[:_SHOWN]
        names = [layer for layer, _ in shown]
        left = [0.0] * len(shown)
        for phase in _PHASES:
            widths = [1000 * seconds[phase] for _, seconds in shown]
            layers.barh(names, widths, left=left, label=phase or "elsewhere")
            left = [a + b for a, b in zip(left, widths, strict=True)]
        layers.invert_yaxis()
        layers.set(xlabel="ms, estimated", title="time of a step by layer")
        layers.legend()
        return figure

    @property
    def _work(self) -> _Work:
        """The work of one step, of which a program may join several."""
        step = self.step
        count = self.tpu.devices
        # A sum over n cores sends each byte (n - 1) / n times to be added, and as often to be spread.
        sent = sum(one.nbytes * (1 + one.adds) for one in step.collectives) * (count - 1) / count
        amounts = (step.cost.flops, step.cost.nbytes, step.cost.cycles, sent, step.rows)
        return _Work(*(amount / step.steps for amount in amounts))

    def _by_layer(self) -> list[tuple[str, dict[str, float]]]:
        """The estimated seconds of each layer in one step by phase, the most first."""
        found: dict[str, dict[str, float]] = {}
        for (phase, layer), cycles in self.step.layers.items():
            own = found.setdefault(layer or phase or "elsewhere", dict.fromkeys(_PHASES, 0.0))
            own[phase] += cycles / self.step.steps / self.tpu.chip.clock
        return sorted(found.items(), key=lambda pair: -sum(pair[1].values()))

    def _headline(self) -> Text:
        step = self.step
        chip = self.tpu.chip
        hosts = f" on {self.tpu.hosts} hosts" if self.tpu.hosts > 1 else ""
        cores = f"{counted(self.tpu.devices, 'core')}{hosts}"
        remat = f", remat={self.remat!r}" if self.remat else ""
        head = f"{self.tpu.name}: {cores}, {self._work.rows:.0f} rows a step, {self.precision}{remat}\n"
        share = step.memory.total / chip.memory
        verdict = "fits" if self.fits else "does NOT fit"
        memory = f": {size(step.memory.total)} of {size(chip.memory)} a core ({share:.0%})\n"
        text = Text(head, style="bold") + Text(verdict, style="green" if self.fits else "bold red") + Text(memory)
        if step.cost.cycles:
            text += Text(
                f"estimated {1000 * self.seconds:.3g} ms a step, {self.rows_per_second:,.0f} rows a second, "
                f"{self.share_of_peak:.0%} of the chip's peak; bound by {self.bound}\n"
            )
        return text

    def _of_kernels(self) -> str:
        """What is said of kernels, which the compiler doesn't estimate."""
        cost = self.step.cost
        steps = self.step.steps
        share = cost.of_kernels / cost.cycles
        return (
            f"the compiler has no estimate for {counted(cost.kernels // steps, 'kernel')}: their {share:.0%} of the "
            "time are tpufit's own, by their products at the chip's peak and their bytes at its bandwidth"
        )

    def _memory(self) -> Table:
        table = Table("memory of a core", "", box=None, header_style="bold")
        table.columns[1].justify = "right"
        for name, nbytes in self.step.memory.parts.items():
            if nbytes:
                table.add_row(name, size(nbytes))
        return table

    def _layers(self) -> Table:
        columns = ("layer", "forward", "backward", "other", "share")
        table = Table(*columns, box=None, header_style="bold", title_justify="left")
        for column in table.columns[1:]:
            column.justify = "right"
        rows = self._by_layer()
        whole = sum(sum(seconds.values()) for _, seconds in rows)
        if len(rows) > _SHOWN:
            rest = {phase: sum(seconds[phase] for _, seconds in rows[_SHOWN:]) for phase in _PHASES}
            rows = [*rows[:_SHOWN], (f"{len(rows) - _SHOWN} others", rest)]
        for layer, seconds in rows:
            times = [seconds["forward"], seconds["backward"], seconds["optimizer"] + seconds[""]]
            shown = [f"{1e6 * each:,.0f} us" if each else "" for each in times]
            table.add_row(layer, *shown, f"{sum(times) / whole:.0%}")
        return table

    def _programs(self) -> Table:
        columns = ("program", "rows", "compiled in", "memory", "cycles", "between cores", "needed because")
        table = Table(*columns, box=None, header_style="bold")
        for program in self.programs:
            sums: Counter[str] = Counter()
            for one in program.collectives:
                sums[one.kind + one.said_of] += one.count
            between = ", ".join(f"{count} {kind}" for kind, count in sums.items())
            cycles = f"{program.cost.cycles:,}" if program.cost.cycles else "?"
            memory = size(program.memory.total)
            row = (program.role, str(program.rows), f"{program.seconds:.1f} s", memory, cycles, between, program.cause)
            table.add_row(*row)
        return table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        parts: list[Any] = [self._headline(), self._memory()]
        if self.step.cost.cycles:
            parts += [Text(), self._layers()]
        parts += [Text(), self._programs()]
        for name, layers in attention_in_words(self.step.attention).items():
            parts.append(Text(f"\n{name}: {layers}"))
        if self.step.cost.kernels:
            parts.append(Text(self._of_kernels()))
        if self.step.cost.loops:
            loops = counted(self.step.cost.loops // self.step.steps, "loop")
            parts.append(Text(f"how often {loops} will turn isn't known: all figures count what is in it once"))
        if self.compiler:
            parts.append(Text(f"\ncompiled with {_named(self.compiler)}"))
        if self.steps_per_execution == "auto":
            parts.append(Text(_JOINED_LATER))
        parts += [Text(f"warning: {said}", style="yellow") for said in self.warnings]
        yield Group(*parts)

    def __str__(self) -> str:
        return rendered(self, _WIDTH)


@dataclass(frozen=True)
class Comparison:
    """The reports of one training on several TPUs.

    Attributes:
        reports: The reports, in the order that was asked for.
    """

    reports: Sequence[PreflightReport]

    @property
    def fits(self) -> bool:
        """True if at least one of them fits."""
        return any(report.fits for report in self.reports)

    @property
    def status(self) -> int:
        """The exit status: 0 if at least one fits, else 1."""
        return FITS if self.fits else TOO_LARGE

    @property
    def cheapest(self) -> PreflightReport | None:
        """The report of the slice with the lowest list price a row, by the estimates, of those that fit; or None."""
        fitting = [report for report in self.reports if report.fits]
        return min(fitting, key=price, default=None)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write each report into a folder of its own, named by its slice.

        Args:
            folder: The folder.
        """
        for report in self.reports:
            report.save(Path(folder) / report.tpu.name)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = (
            "TPU",
            "cores",
            "fits",
            "memory a core",
            "ms a step*",
            "rows a second*",
            "$ a million rows*",
            "bound by",
        )
        table = Table(*columns, box=None, header_style="bold")
        for report in self.reports:
            used = f"{size(report.step.memory.total)} of {size(report.tpu.chip.memory)}"
            times = ("?", "?", "?", "?")
            if report.step.cost.cycles:
                cost = f"{1e6 * price(report):.3g}"
                times = (f"{1000 * report.seconds:.3g}", f"{report.rows_per_second:,.0f}", cost, report.bound)
            mark = " <- cheapest that fits" if report is self.cheapest else ""
            fits = Text("yes", style="green") if report.fits else Text("no", style="bold red")
            table.add_row(report.tpu.name, str(report.tpu.devices), fits, used, *times[:3], times[3] + mark)
        own = self.reports[0].compiler
        by = f" ({_named(own)})" if own else ""
        note = f"* the compiler's estimate{by}, at list prices of a chip's hour; none of it is measured"
        yield Group(table, Text(note))

    def __str__(self) -> str:
        return rendered(self, _WIDTH)


def _named(compiler: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in compiler.items())


def price(report: PreflightReport) -> float:
    """The estimated list price of a row, in US dollars."""
    chip = report.tpu.chip
    return report.tpu.devices * chip.price / 3600 / max(report.rows_per_second, 1e-9)


def status_of(reports: Iterable[PreflightReport | Comparison]) -> int:
    """The exit status for several reports: the highest."""
    return max((report.status for report in reports), default=FITS)
