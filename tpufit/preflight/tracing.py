"""Traces the steps of a plan on virtual cores, in a separate process: `python -m tpufit.preflight.tracing FOLDER...`.

It reads a plan from each folder, and writes the programs there. Another process compiles them.
"""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import PreflightError, TpufitError
from ..runtime import Recorded, Recorder, start_absent, tracing_for
from ..step import Engine, FitOptions, StepRunner, join_groups
from ..utils.strict import Strict
from ..utils.user_code import find_raising_line
from .layer_scopes import Scopes
from .preflight_plan import FAULT, PLAN, TRACED, Batch, PlannedPass, PreflightPlan

_ATTEMPTS = 4


class _Refusing(Strict):
    """Refuses work on the host in a step."""

    def refuse(self, event: str) -> None:
        raise PreflightError(event)


class Tracer:
    """Traces the steps of a plan, as `fit` would."""

    def __init__(self, plan: PreflightPlan) -> None:
        self._plan = plan
        model = plan.model
        self.recorder = Recorder()  # keeps the programs
        self._scopes = Scopes(model.module)
        # With jit_compile=False the programs would be the same.
        config = plan.config.with_option("jit_compile", "auto")
        model._engine = self._engine = Engine(model, config)
        placement = self._engine.place_on(start_absent(plan.cores, "preflight"), self.recorder)
        self._engine.options = FitOptions(_Refusing("preflight"), plan.class_weight, fitting=True)
        self._engine.move_to(placement)
        self._engine.note_modes()
        self._groups: list[list[Batch]] = []  # the group of each program

    def trace(self) -> None:
        """Trace all steps until their programs are proven to be replayable."""
        with self._scopes.naming():
            for one in self._plan.passes:
                runner = StepRunner(self._engine, one.role, one.transform)
                if one.role == "train":
                    self._engine.train_mode()
                else:
                    self._engine.eval_mode()
                for group in one.groups:
                    (batches,) = join_groups(runner.send([batch.nest for batch in group], group[0].labels), len(group))
                    with tracing_for(self._plan.kind):
                        for last in self._until_known(one, group):
                            runner(batches, last=last)
                    self._groups += [group] * (len(self.recorder.programs) - len(self._groups))

    def _until_known(self, one: PlannedPass, group: list[Batch]) -> Iterator[bool]:
        """Yield once for each call of a step until all its programs are known; True if the call ends its pass.

        The last call of a pass may need another program.
        """
        config = self._engine.config
        overwrites = config.ema.overwrite_frequency if config.ema is not None else None
        period = config.gradients.accumulate_steps * (overwrites or 1) if one.role == "train" else 1
        ends = period > 1 and group is one.groups[-1]
        short = group[0].rows < one.groups[0][0].rows  # so it is the last batch
        for last in (False,) * (not (ends and short)) + (True,) * ends:
            quiet = 0
            for _ in range(_ATTEMPTS * period):
                before = len(self.recorder.programs)
                yield last
                program = self._engine.roles[one.role].program
                proven = program is not None and all(map(program.prepare_replay, program.traced_keys))
                quiet = quiet + 1 if proven and len(self.recorder.programs) == before else 0
                if quiet == period:
                    break

    def describe_programs(self) -> dict[str, dict[str, Any]]:
        """Return descriptions of the programs by the name of their file, with the lines to which their texts refer."""
        device = self._engine.state.device
        _, names = self._engine.state.tensors()
        state = [names.get(id(tensor), "") for tensor in device.tensors]
        lines = list(self._scopes.lines)
        precision = self._engine.config.precision
        remat = self._engine.keeps_only_inputs
        attention = self._engine.attention.named(self._plan.model.module)
        return {
            str(number): {
                "role": one.role,
                "cause": one.cause,
                "rows": sum(batch.rows for batch in group),
                "steps": len(group),
                "arguments": _describe(one, state),
                "lines": lines,
                "precision": precision,
                "remat": remat,
                "attention": attention,
            }
            for number, (one, group) in enumerate(zip(self.recorder.programs, self._groups, strict=True))
        }


def _describe(program: Recorded, state: list[str]) -> list[dict[str, Any]]:
    return [
        {
            "source": one.source,
            "name": state[one.index] if one.source == "state" else "",
            "shape": list(one.shape),
            "nbytes": one.nbytes,
            "donated": one.donated,
            "axis": one.axis,
        }
        for one in program.arguments
    ]


def main(folder: Path) -> None:
    """Trace the plan in a folder, and write the programs there, or the type and message of an error."""
    try:
        tracer = Tracer(pickle.loads((folder / PLAN).read_bytes()))
        tracer.trace()
    except Exception as error:  # the user's code may raise any error
        is_ours = isinstance(error, TpufitError)
        line = find_raising_line(error)
        words = str(error)
        message = words if is_ours else f"the steps can't be traced: {type(error).__name__}: {words}"
        at = f" (at {line})" if line and line not in words else ""
        kind = type(error).__name__ if is_ours else PreflightError.__name__
        (folder / FAULT).write_text(json.dumps({"kind": kind, "message": message + at}))
        raise
    for number, program in enumerate(tracer.recorder.programs):
        (folder / f"{number}.hlo").write_bytes(program.hlo)
    (folder / TRACED).write_text(json.dumps(tracer.describe_programs()))


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        main(Path(folder))
