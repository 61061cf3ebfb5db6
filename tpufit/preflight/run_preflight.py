"""`run_preflight`: plans, traces and compiles the steps of a compiled model, and analyzes the programs."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from .. import errors
from ..backend import Cores
from ..data.stream import DEFAULT_BATCH_SIZE, GLOBAL
from ..data.user_data import recognize, recognize_held_out
from ..errors import ArgumentError, PreflightError, say_count
from ..runtime import has_flash, keeps_bfloat16
from ..step import Engine, list_policies
from ..trainer.auto_batch_size import require_rows
from ..trainer.fit_arguments import TrainingData, ValidationData
from ..trainer.preconditions import require_learning
from ..utils import hardware, releases
from ..utils.user_code import warn
from .analysis import CompiledProgram, analyze
from .children import run
from .compiling import FLAGS
from .pickling import pickle_training
from .preflight_plan import ENVIRON, FAULT, PLAN, TRACED, PreflightPlan, make_plan
from .report import Comparison, PreflightReport
from .tpu_slices import Slice, find_slice, find_slice_of_chips

# The arguments of `fit` that change none of its programs.
_WITHOUT_EFFECT = {"epochs", "callbacks", "initial_epoch", "min_epochs", "max_steps", "max_time", "resume", "strict"}
_WITHOUT_EFFECT |= {"cores", "sanity_steps"}
_CLOSE = 1.05  # the search ends if a batch larger by this factor doesn't fit


@dataclass(frozen=True)
class PreflightRun:
    """A requested preflight."""

    engine: Engine
    train: TrainingData
    validation: ValidationData
    limit: int | float | None
    timeout: float  # the time limit of one process, in seconds
    verbose: bool  # show a clock
    # The versions of the TPU's compiler and related packages.
    compiler: Mapping[str, str] = field(default_factory=dict)
    remat: str | None = None  # "auto" to find the cheapest policy with which all programs fit

    def make_reports(self, slices: Sequence[Slice]) -> list[PreflightReport]:
        """Compile the programs of a `fit` for slices; return a report for each. Equal steps are traced once."""
        with_batch_size = [
            replace(self, train=replace(self.train, batch_size=self.batch_size_on(tpu))) for tpu in slices
        ]
        slices_by_key: dict[Any, list[int]] = {}
        for i, tpu in enumerate(slices):
            kind = tpu.chip.kind
            key = tpu.devices, with_batch_size[i].train.batch_size, keeps_bfloat16(kind), has_flash(kind)
            slices_by_key.setdefault(key, []).append(i)
        reports: dict[int, PreflightReport] = {}
        for group in slices_by_key.values():
            reports |= with_batch_size[group[0]].compile_for({i: slices[i] for i in group})
        return [reports[i] for i in range(len(slices))]

    def compile_for(self, slices: Mapping[int, Slice]) -> dict[int, PreflightReport]:
        """Compile all programs for numbered slices with equal traces; return a report for each, by its number.

        With `remat="auto"` a report is for the first policy with which all programs fit, or for the last.
        """
        remaining = dict(slices)
        reports: dict[int, PreflightReport] = {}
        plan = self.plan(next(iter(slices.values())))
        remat_argument = plan.config.remat
        for remat in [remat_argument] if self.remat is None else list_policies(remat_argument):
            tried = replace(plan, config=plan.config.with_remat(remat, plan.model.module))
            reports |= zip(remaining, self.compile_plan(tried, list(remaining.values())), strict=True)
            remaining = {i: tpu for i, tpu in remaining.items() if not reports[i].fits}
            if not remaining:
                break
        return reports

    def plan(self, tpu: Slice) -> PreflightPlan:
        """Plan the steps for a slice."""
        plan = make_plan(self.engine, self.train, self.validation, tpu.devices, self.limit)
        return replace(plan, kind=tpu.chip.kind)

    def compile_plan(self, plan: PreflightPlan, slices: Sequence[Slice]) -> list[PreflightReport]:
        """Trace the steps of a plan, and compile them; return a report for each slice.

        All slices have the plan's number of cores, and equal traces.
        """
        rows = plan.passes[0].groups[0][0].rows
        given = self.train.batch_size
        size = -(-rows // plan.cores) if given in (None, GLOBAL) else given
        config = plan.config
        with tempfile.TemporaryDirectory(prefix="tpufit-preflight-") as name:
            folder = Path(name)
            traced = self.trace(plan, folder)
            return [
                PreflightReport(
                    tpu,
                    self.compile(traced, folder, tpu),
                    size,
                    config.precision,
                    config.steps_per_execution,
                    self.compiler,
                    config.remat,
                )
                for tpu in slices
            ]

    def trace(self, plan: PreflightPlan, folder: Path) -> dict[str, Any]:
        """Trace the steps of a plan into a folder, for all slices with this number of cores and equal traces.

        Returns:
            The facts about each program, by the name of its file, see `Tracer.describe_programs`.
        """
        state, _ = self.engine.state.tensors()
        (folder / PLAN).write_bytes(pickle_training(plan, plan.model, state.keys()))
        what = f"tracing for {say_count(plan.cores, 'core')}"
        try:
            run(["-P", "-m", f"{__package__}.tracing", str(folder)], what, self.timeout, self.verbose, ENVIRON)
        except PreflightError as error:
            raise _fault(folder) or error from None
        traced: dict[str, Any] = json.loads((folder / TRACED).read_text())
        return traced

    def compile(self, traced: Mapping[str, Any], folder: Path, tpu: Slice) -> list[CompiledProgram]:
        """Compile some of the programs that `trace` has written to its folder."""
        starts_with_flags = releases.sets_flags(self.compiler)
        job = {
            "slice": tpu.name,
            "topology": tpu.topology,
            "chips_per_host_bounds": tpu.chips_per_host_bounds,
            "cores": tpu.devices,
            "flags": f"{FLAGS} {tpu.chip.flags}" if starts_with_flags else tpu.chip.flags_of_torchtpu,
            "config": tpu.chip.config,
            "programs": traced,
        }
        (folder / "job.json").write_text(json.dumps(job))
        script = str(Path(__file__).with_name("compiling.py"))
        command = ["-P", script, str(folder), str(folder / "job.json")]
        try:
            run(command, f"compiling for {tpu.name}", self.timeout, self.verbose)
        except PreflightError as error:
            if not self.compiler or releases.is_tested(self.compiler):
                raise
            why = releases.explain_untested(self.compiler)
            cure = releases.make_install_command(self.compiler)
            raise PreflightError(f"{error}\nPerhaps because {why}. A tested version: {cure}") from None
        programs = []
        for name, facts in traced.items():
            compiled = json.loads((folder / f"{name}.{tpu.name}.json").read_text())
            before = (folder / f"{name}.before.txt").read_text()
            text = folder / f"{name}.{tpu.name}.txt"
            after = text.read_text() if text.exists() else ""
            try:
                programs.append(analyze(facts, compiled, before, after, tpu))
            except ValueError as error:
                raise PreflightError(f"the compiler for {tpu.name} refuses the {facts['role']} step: {error}") from None
        return programs

    def batch_size_on(self, tpu: Slice) -> int | str | None:
        """Return the batch size on a slice, from the argument of `fit`."""
        size: int | str | None = self.train.batch_size
        return self._find_largest_batch(tpu) if size == "auto" else size

    def _find_largest_batch(self, tpu: Slice) -> int:
        """Find the largest batch size per core whose training step fits, by compiling it at several sizes.

        A compilation takes minutes and returns the bytes, from which the next size is computed.
        `trainer.auto_batch_size` tries sizes on the device, which shows only whether they fit.
        """
        require_rows(self.train.data)
        train, _ = self.validation.split_off(self.train)
        largest = 0
        smallest_too_large = 0
        totals: dict[int, int] = {}  # the memory of a core, by the batch size
        size = DEFAULT_BATCH_SIZE
        while True:
            sized = replace(self, train=replace(train, batch_size=size), validation=ValidationData())
            plan = sized.plan(tpu)
            size = min(size, -(-plan.passes[0].groups[0][0].rows // tpu.devices))
            if size in totals:  # all rows are in one batch, and it fits
                return size
            one = replace(plan, passes=[replace(plan.passes[0], groups=plan.passes[0].groups[:1])])
            step = sized.compile_plan(one, [tpu])[0].step
            totals[size] = step.memory.total
            if step.fits:
                largest = size
            else:
                smallest_too_large = size
            if smallest_too_large and (smallest_too_large <= largest * _CLOSE or smallest_too_large - largest <= 1):
                break
            size = _next_size(largest, smallest_too_large, totals, tpu)
        if not largest:
            raise PreflightError(f"not even one row per core fits into a core of {tpu.name}: {step.warnings['memory']}")
        return largest


def run_preflight(
    engine: Engine, tpu: str | Sequence[str], arguments: Mapping[str, Any]
) -> PreflightReport | Comparison:
    """Compile the steps of a `fit` for one TPU or several, by its arguments and `timeout`.

    Raises:
        ArgumentError: `fit` has no such argument.
        PreflightError: The steps can't be traced, or the compiler is missing, refuses or fails.
    """
    slices = [find_slice(name) for name in ([tpu] if isinstance(tpu, str) else tpu)]
    if not slices:
        raise ArgumentError("tpu must be the name of a slice, such as 'v5e-8', or several, got none")
    preflight_run = make_preflight_run(engine, arguments)
    for each in slices:
        if each.chip.runtime not in ("", releases.find_runtime(preflight_run.compiler)):
            raise PreflightError(releases.explain_unknown_chip(preflight_run.compiler, each.chip.name))
    reports = preflight_run.make_reports(slices)
    engine.log.predicted = reports[0].seconds
    return reports[0] if isinstance(tpu, str) else Comparison(reports)


def find_largest_batch(engine: Engine, train: TrainingData, cores: Cores, memory: int) -> int | None:
    """Find the most rows per core whose training step fits into the memory of these cores, in bytes.

    None if the compiler is missing, or if it can't compile for a slice of these cores.

    Raises:
        PreflightError: The step can't be traced or compiled, or not even one row fits.
    """
    tpu = find_slice_of_chips(hardware.find_chips(), cores.count, memory)
    if tpu is None or releases.list_missing(releases.find_compiler_versions()):
        return None
    preflight_run = PreflightRun(
        engine, replace(train, batch_size="auto"), ValidationData(), None, 3600.0, True, check_compiler()
    )
    size = preflight_run.batch_size_on(tpu)
    return None if isinstance(size, str) else size


def make_preflight_run(engine: Engine, arguments: Mapping[str, Any]) -> PreflightRun:
    """Create a run from the arguments of `Model.preflight` except `tpu`.

    Raises:
        ArgumentError: `fit` has no such argument, or no parameter learns.
        PreflightError: The compiler is missing.
    """
    parts = {"x", "y", "sample_weight"}
    own = {one.name for one in fields(TrainingData)} - {"data"}
    held = {f"validation_{one.name}" for one in fields(ValidationData)}
    unknown = sorted(arguments.keys() - parts - own - held - _WITHOUT_EFFECT - {"limit", "timeout", "verbose", "remat"})
    if unknown:
        raise ArgumentError(f"preflight takes the arguments of fit, tpu, remat and timeout, got {', '.join(unknown)}")
    require_learning(engine)
    remat = arguments.get("remat")
    if remat not in (None, "auto"):
        raise ArgumentError(f"preflight's remat must be 'auto' or None, got {remat!r}: compile takes the others")
    if remat and arguments.get("batch_size") == "auto":
        raise ArgumentError("remat='auto' needs a fixed batch_size, but got batch_size='auto' too: pass a number")
    data = recognize(**{name: value for name, value in arguments.items() if name in parts})
    train = TrainingData(data, **{name: value for name, value in arguments.items() if name in own})
    given = {name.removeprefix("validation_"): value for name, value in arguments.items() if name in held}
    timeout = arguments.get("timeout", 3600.0)
    verbose = bool(arguments.get("verbose", True))
    if remat:  # missing names are errors before the first compilation
        for one in list_policies(engine.config.remat):
            engine.config.with_remat(one, engine.model.module)
    if given.get("data") is not None:
        given["data"] = recognize_held_out(given["data"], "validation_data", data)
    validation = ValidationData(**given)
    return PreflightRun(engine, train, validation, arguments.get("limit"), timeout, verbose, check_compiler(), remat)


def check_compiler() -> dict[str, str]:
    """Return the versions of the TPU's compiler and related packages. Warn if this combination is untested.

    Raises:
        PreflightError: The compiler isn't installed.
    """
    found = releases.find_compiler_versions()
    missing = releases.list_missing(found)
    if found.get(releases.find_runtime(found)) is None:
        raise PreflightError(
            "a preflight traces steps with the runtime for the TPU's compiler, but no runtime is installed. Run: "
            "pip install 'tpufit[preflight]', or for TorchTPU: pip install 'tpufit[tpu]'"
        )
    releases.check_versions(*(releases.find_version(name) for name in ("torch", *releases.RUNTIMES)))
    if missing:
        here = ", ".join(f"{name} {own or 'missing'}" for name, own in found.items())
        cure = releases.make_install_command(found, *missing)
        raise PreflightError(
            f"a preflight needs the TPU's compiler: {cure}, which takes up to 1 GB (from Python 3.11 on). Here: {here}"
        )
    if not releases.is_tested(found):
        cure = releases.make_install_command(found)
        warn(f"{releases.explain_untested(found)}. The preflight uses it; a tested version: {cure}")
    return {name: str(own) for name, own in found.items()}


def _fault(folder: Path) -> errors.TpufitError | None:
    """Return the error that ended the tracing process, if it was one of tpufit's."""
    path = folder / FAULT
    if not path.exists():
        return None
    told = json.loads(path.read_text())
    kind = getattr(errors, told["kind"], PreflightError)
    try:
        fault: errors.TpufitError = kind(told["message"])
    except TypeError:  # its class takes other arguments
        fault = PreflightError(told["message"])
    return fault


def _next_size(largest: int, too_large: int, totals: dict[int, int], tpu: Slice) -> int:
    """Return the next batch size: where a line through two known sizes reaches the memory of a core."""
    if not too_large and len(totals) == 1:
        return largest * 4
    known = sorted(totals)
    (a, b) = (
        (largest, too_large) if largest and too_large else (known[0], known[-1]) if len(known) > 1 else (0, too_large)
    )
    slope = (totals[b] - totals.get(a, 0)) / (b - a)
    reaches = int(b + (tpu.chip.memory * 0.98 - totals[b]) / slope) if slope > 0 else 2 * b
    if not largest:
        return max(1, min(too_large // 2, reaches))
    # At least 5 % from a bound: a wrong guess then ends the search, and a right guess moves a bound by this distance.
    low = max(largest + 1, int(largest * _CLOSE))
    high = min(too_large - 1, math.ceil(too_large / _CLOSE)) if too_large else 16 * largest
    return max(low, min(high, reaches))
