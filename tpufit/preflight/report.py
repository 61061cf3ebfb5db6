"""`PreflightReport`: the memory and speed of a training on a TPU; and `Comparison`, for several TPUs."""

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

from ..diagnostics.plots import make_axes
from ..diagnostics.report import group_attention_forms
from ..errors import say_count
from ..utils.text import format_bytes, render
from .analysis import CompiledProgram
from .tpu_slices import Slice

_WIDTH = 120  # columns
_SHOWN = 12  # the most layers with a row in the table
_PHASES = ("forward", "backward", "optimizer", "")
_JOINED_LATER = (
    "steps_per_execution='auto' is compiled as 1: fit measures steps before it joins them, in one more program"
)
FITS = 0
TOO_LARGE = 1
FAILED = 2


@dataclass(frozen=True)
class _Work:
    """The work of a core in one step: operations, bytes moved in memory, cycles, bytes sent; and the step's rows."""

    flops: float
    nbytes: float
    cycles: float
    sent: float
    rows: float


@dataclass(frozen=True)
class PreflightReport:
    """The memory and speed of a training on a TPU, from the TPU's compiler. All times are estimates, none is measured.

    Attributes:
        tpu: The slice.
        programs: The programs that `fit` would compile, in its order.
        batch_size: The rows per core.
        precision: The argument of `compile`.
        steps_per_execution: The argument of `compile` (default 1).
        compiler: The versions of the compiler and related packages, by name (default: unknown).
        remat: The argument of `compile`, or the choice of `remat="auto"` (default None).

    Example:
        >>> from tpufit.preflight.analysis import Cost, Memory
        >>> from tpufit.preflight.tpu_slices import find_slice
        >>> cost = Cost(flops=4e9, nbytes=1e8, cycles=3_000_000)
        >>> step = CompiledProgram("train", "it is the first step", 512, 1, 2.0, True, Memory(weights=1 << 30), cost)
        >>> report = PreflightReport(find_slice("v5e-8"), [step], 64, "bf16")
        >>> report.fits, report.status, f"{1000 * report.seconds:.2f} ms per step"
        (True, 0, '2.00 ms per step')
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

        If several have the same batches it is the last: the first may only create the optimizer's state, or accumulate.
        """
        first = self.programs[0]
        candidates = [one for one in self.programs if (one.role, one.rows) == (first.role, first.rows)]
        return next((one for one in candidates if not one.fits), candidates[-1])

    @property
    def fits(self) -> bool:
        """True if every program fits into a core's memory."""
        return all(program.fits for program in self.programs)

    @property
    def status(self) -> int:
        """The exit status of `python -m tpufit preflight`: 0 if all programs fit, else 1."""
        return FITS if self.fits else TOO_LARGE

    @property
    def seconds(self) -> float:
        """The estimated seconds of a step: the compiler's cycles at the chip's clock, and the time on the links."""
        return self._work.cycles / self.tpu.chip.clock + self.bounds["links"]

    @property
    def rows_per_second(self) -> float:
        """The estimated rows per second, on all cores; 0 if the step doesn't fit."""
        return self._work.rows / self.seconds if self.seconds else 0.0

    @property
    def bounds(self) -> dict[str, float]:
        """The seconds of a step if only arithmetic, only memory or only the links took time, at published peaks."""
        work = self._work
        chip = self.tpu.chip
        return {
            "arithmetic": work.flops / chip.peak,
            "memory": work.nbytes / chip.bandwidth,
            "links": work.sent / chip.links,
        }

    @property
    def bound(self) -> str:
        """The resource that limits a step: `"arithmetic"`, `"memory"` or `"links"`."""
        return max(self.bounds, key=self.bounds.__getitem__)

    @property
    def share_of_peak(self) -> float:
        """The share of the chip's published peak in bfloat16 that a step is estimated to reach, from 0 to 1."""
        return self.bounds["arithmetic"] / self.seconds if self.seconds else 0.0

    @property
    def warnings(self) -> list[str]:
        """The warnings, in sentences, each with its program."""
        # Only the first program's warning of each kind: the other programs have the same layers.
        warnings: dict[str, str] = {}
        for program in self.programs:
            for kind, message in program.warnings.items():
                warnings.setdefault(kind, f"{program.role} of {program.rows} rows: {message}")
        return list(warnings.values())

    def as_dict(self) -> dict[str, Any]:
        """Return all figures in a form that JSON can store."""
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
        facts = {"tpu": asdict(self.tpu), "batch_size": self.batch_size, "precision": self.precision, "fits": self.fits}
        facts |= {"steps_per_execution": self.steps_per_execution, "compiler": dict(self.compiler), "remat": self.remat}
        return facts | {"estimates": estimates, "programs": programs}

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write `report.json`, and each optimized program as text.

        Args:
            folder: The folder, which is created if it is missing.
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
        figure, (memory, layers) = make_axes(2, (6.0, 4.0))
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
        """The work of one step; a program may join several."""
        step = self.step
        count = self.tpu.devices
        # A sum over n cores sends each byte (n - 1) / n times for the sum, and as often to distribute it.
        sent = sum(one.nbytes * (1 + one.adds) for one in step.collectives) * (count - 1) / count
        amounts = (step.cost.flops, step.cost.nbytes, step.cost.cycles, sent, step.rows)
        return _Work(*(amount / step.steps for amount in amounts))

    def _by_layer(self) -> list[tuple[str, dict[str, float]]]:
        """Return the estimated seconds of each layer in one step by phase, in descending order."""
        by_layer: dict[str, dict[str, float]] = {}
        for (phase, layer), cycles in self.step.layers.items():
            seconds = by_layer.setdefault(layer or phase or "elsewhere", dict.fromkeys(_PHASES, 0.0))
            seconds[phase] += cycles / self.step.steps / self.tpu.chip.clock
        return sorted(by_layer.items(), key=lambda pair: -sum(pair[1].values()))

    def _headline(self) -> Text:
        step = self.step
        chip = self.tpu.chip
        hosts = f" on {self.tpu.hosts} hosts" if self.tpu.hosts > 1 else ""
        cores = f"{say_count(self.tpu.devices, 'core')}{hosts}"
        remat = f", remat={self.remat!r}" if self.remat else ""
        head = f"{self.tpu.name}: {cores}, {self._work.rows:.0f} rows per step, {self.precision}{remat}\n"
        share = step.memory.total / chip.memory
        verdict = "fits" if self.fits else "does NOT fit"
        memory = f": {format_bytes(step.memory.total)} of {format_bytes(chip.memory)} per core ({share:.0%})\n"
        text = Text(head, style="bold") + Text(verdict, style="green" if self.fits else "bold red") + Text(memory)
        if step.cost.cycles:
            text += Text(
                f"estimated {1000 * self.seconds:.3g} ms per step, {self.rows_per_second:,.0f} rows per second, "
                f"{self.share_of_peak:.0%} of the chip's peak; bound by {self.bound}\n"
            )
        return text

    def _of_kernels(self) -> str:
        """Return a sentence about kernels, for which the compiler has no estimate."""
        cost = self.step.cost
        steps = self.step.steps
        share = cost.of_kernels / cost.cycles
        return (
            f"the compiler has no estimate for {say_count(cost.kernels // steps, 'kernel')}: tpufit estimates "
            f"{share:.0%} of the time for them, from their products at the chip's peak and their bytes at its bandwidth"
        )

    def _memory(self) -> Table:
        table = Table("memory of a core", "", box=None, header_style="bold")
        table.columns[1].justify = "right"
        for name, nbytes in self.step.memory.parts.items():
            if nbytes:
                table.add_row(name, format_bytes(nbytes))
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
            cells = [f"{1e6 * each:,.0f} us" if each else "" for each in times]
            table.add_row(layer, *cells, f"{sum(times) / whole:.0%}")
        return table

    def _programs(self) -> Table:
        columns = ("program", "rows", "compiled in", "memory", "cycles", "between cores", "needed because")
        table = Table(*columns, box=None, header_style="bold")
        for program in self.programs:
            sums: Counter[str] = Counter()
            for one in program.collectives:
                sums[one.kind + one.content_phrase] += one.count
            between = ", ".join(f"{count} {kind}" for kind, count in sums.items())
            cycles = f"{program.cost.cycles:,}" if program.cost.cycles else "?"
            memory = format_bytes(program.memory.total)
            row = (program.role, str(program.rows), f"{program.seconds:.1f} s", memory, cycles, between, program.cause)
            table.add_row(*row)
        return table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        parts: list[Any] = [self._headline(), self._memory()]
        if any(layer for _, layer in self.step.layers):  # a trace by torch_tpu has no layers
            parts += [Text(), self._layers()]
        parts += [Text(), self._programs()]
        for name, layers in group_attention_forms(self.step.attention).items():
            parts.append(Text(f"\n{name}: {layers}"))
        if self.step.cost.kernels:
            parts.append(Text(self._of_kernels()))
        if self.step.cost.loops:
            loops = say_count(self.step.cost.loops // self.step.steps, "loop")
            parts.append(Text(f"the number of iterations of {loops} is unknown: all figures count one iteration"))
        if self.compiler:
            parts.append(Text(f"\ncompiled with {_named(self.compiler)}"))
        if self.steps_per_execution == "auto":
            parts.append(Text(_JOINED_LATER))
        parts += [Text(f"warning: {message}", style="yellow") for message in self.warnings]
        yield Group(*parts)

    def __str__(self) -> str:
        return render(self, _WIDTH)


@dataclass(frozen=True)
class Comparison:
    """The reports of one training on several TPUs.

    Attributes:
        reports: The reports, in the requested order.
    """

    reports: Sequence[PreflightReport]

    @property
    def fits(self) -> bool:
        """True if the training fits on at least one of the TPUs."""
        return any(report.fits for report in self.reports)

    @property
    def status(self) -> int:
        """The exit status: 0 if at least one fits, else 1."""
        return FITS if self.fits else TOO_LARGE

    @property
    def cheapest(self) -> PreflightReport | None:
        """The report of the fitting slice with the lowest estimated list price per row; None if none fits.

        Slices without a published price are left out.
        """
        prices = [
            (each, i) for i, one in enumerate(self.reports) if one.fits and (each := estimate_price(one)) is not None
        ]
        return self.reports[min(prices)[1]] if prices else None

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write each report into a subfolder, named after its slice.

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
            "memory per core",
            "ms per step*",
            "rows/s*",
            "$ per million rows*",
            "bound by",
        )
        table = Table(*columns, box=None, header_style="bold")
        for report in self.reports:
            used = f"{format_bytes(report.step.memory.total)} of {format_bytes(report.tpu.chip.memory)}"
            times = ("?", "?", "?", "?")
            if report.step.cost.cycles:
                each = estimate_price(report)
                cost = "?" if each is None else f"{1e6 * each:.3g}"
                times = (f"{1000 * report.seconds:.3g}", f"{report.rows_per_second:,.0f}", cost, report.bound)
            mark = " <- cheapest that fits" if report is self.cheapest else ""
            fits = Text("yes", style="green") if report.fits else Text("no", style="bold red")
            table.add_row(report.tpu.name, str(report.tpu.devices), fits, used, *times[:3], times[3] + mark)
        compiler = self.reports[0].compiler
        versions = f" ({_named(compiler)})" if compiler else ""
        note = f"* the compiler's estimate{versions}, at list prices of a chip's hour; nothing is measured"
        yield Group(table, Text(note))

    def __str__(self) -> str:
        return render(self, _WIDTH)


def _named(compiler: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in compiler.items())


def estimate_price(report: PreflightReport) -> float | None:
    """Return the estimated list price of a row, in US dollars; None if no price is published."""
    chip = report.tpu.chip
    if chip.price is None:
        return None
    return report.tpu.devices * chip.price / 3600 / max(report.rows_per_second, 1e-9)


def find_exit_status(reports: Iterable[PreflightReport | Comparison]) -> int:
    """Return the exit status for several reports, which is the highest."""
    return max((report.status for report in reports), default=FITS)
