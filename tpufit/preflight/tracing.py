"""Traces the steps of a plan on virtual cores, in a process of its own: `python -m tpufit.preflight.tracing FOLDER...`.

It reads a plan from each folder, and writes there the programs, which another process compiles.
"""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import PreflightError, TpufitError
from ..runtime import Recorded, Recorder, start, tracing_for
from ..step import Engine, FitOptions, StepRunner, joined
from ..utils.strict import Strict
from ..utils.users_code import raising_line
from .plan import FAULT, PLAN, TRACED, Batch, PlannedPass, PreflightPlan
from .scopes import Scopes

_ATTEMPTS = 4


class _Refusing(Strict):
    """Refuses whatever the host would do in a step."""

    def refuse(self, event: str) -> None:
        raise PreflightError(event)


class Tracer:
    """Traces the steps of a plan, as `fit` would."""

    def __init__(self, plan: PreflightPlan) -> None:
        self._plan = plan
        model = plan.model
        self.recorder = Recorder()  # the programs so far
        self._scopes = Scopes(model.module)
        # Steps that are always traced have the same programs.
        config = plan.config.with_option("jit_compile", "auto")
        model._engine = self._engine = Engine(model, config)
        placement = self._engine.place_on(start(plan.cores, "preflight"), self.recorder)
        self._engine.options = FitOptions(_Refusing("preflight"), plan.class_weight, fitting=True)
        self._engine.move_to(placement)
        self._engine.note_modes()
        self._groups: list[list[Batch]] = []  # of each program

    def trace(self) -> None:
        """Trace all steps until their programs are proven to be the ones that would be replayed."""
        with self._scopes.naming():
            for one in self._plan.passes:
                run = StepRunner(self._engine, one.role, one.transform)
                if one.role == "train":
                    self._engine.train_mode()
                else:
                    self._engine.eval_mode()
                for group in one.groups:
                    (batches,) = joined(run.send([batch.nest for batch in group], group[0].labels), len(group))
                    with tracing_for(self._plan.kind):
                        for last in self._until_known(one, group):
                            run(batches, last=last)
                    self._groups += [group] * (len(self.recorder.programs) - len(self._groups))

    def _until_known(self, one: PlannedPass, group: list[Batch]) -> Iterator[bool]:
        """Call a step until all its programs are known; True for a call that ends its pass, which may need another."""
        config = self._engine.config
        overwrites = config.ema.overwrite_frequency if config.ema is not None else None
        period = config.gradients.accumulate_steps * (overwrites or 1) if one.role == "train" else 1
        ends = period > 1 and group is one.groups[-1]
        short = group[0].rows < one.groups[0][0].rows  # and so the last of the data
        for last in (False,) * (not (ends and short)) + (True,) * ends:
            quiet = 0
            for _ in range(_ATTEMPTS * period):
                before = len(self.recorder.programs)
                yield last
                program = self._engine.roles[one.role].program
                proven = program is not None and all(map(program.replays, program.traced_keys))
                quiet = quiet + 1 if proven and len(self.recorder.programs) == before else 0
                if quiet == period:
                    break

    def described(self) -> dict[str, dict[str, Any]]:
        """Describe the programs, each by the name of its file, and whatever their text refers to by a number."""
        device = self._engine.state.device
        _, names = self._engine.state.tensors()
        state = [names.get(id(tensor), "") for tensor in device.tensors]
        lines = list(self._scopes.lines)
        precision = self._engine.config.precision
        remat = self._engine.keeps_inputs_alone
        attention = self._engine.attention.named(self._plan.model.module)
        return {
            str(number): {
                "role": one.role,
                "cause": one.cause,
                "rows": sum(batch.rows for batch in group),
                "steps": len(group),
                "arguments": _described(one, state),
                "lines": lines,
                "precision": precision,
                "remat": remat,
                "attention": attention,
            }
            for number, (one, group) in enumerate(zip(self.recorder.programs, self._groups, strict=True))
        }


def _described(program: Recorded, state: list[str]) -> list[dict[str, Any]]:
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
    """Trace the plan in a folder, and write the programs there; an error's kind and words, if there is one."""
    try:
        tracer = Tracer(pickle.loads((folder / PLAN).read_bytes()))
        tracer.trace()
    except Exception as error:  # the user's own may be of any type
        ours = isinstance(error, TpufitError)
        line = raising_line(error)
        words = str(error)
        message = words if ours else f"the steps can't be traced: {type(error).__name__}: {words}"
        at = f" (at {line})" if line and line not in words else ""
        kind = type(error).__name__ if ours else PreflightError.__name__
        (folder / FAULT).write_text(json.dumps({"kind": kind, "message": message + at}))
        raise
    for number, program in enumerate(tracer.recorder.programs):
        (folder / f"{number}.hlo").write_bytes(program.hlo)
    (folder / TRACED).write_text(json.dumps(tracer.described()))


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        main(Path(folder))
