"""The steps of peers, traced and compiled as a preflight does for tpufit: each by a separate script."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpufit.preflight.analysis import CompiledProgram, analyze
from tpufit.preflight.children import run
from tpufit.preflight.compiling import NO_HOST, as_text
from tpufit.preflight.hlo import parse_arguments
from tpufit.preflight.preflight_plan import ENVIRON, TRACED, PreflightPlan
from tpufit.preflight.run_preflight import PreflightRun
from tpufit.preflight.tpu_slices import Slice

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Peer(PreflightRun):
    """The same training, by other means.

    Attributes:
        name: One of `TRAININGS`.
    """

    name: str = ""


class ByHand(Peer):
    """A step that uses only torch_xla, compiled with torch_xla's flags for TPUs."""

    def trace(self, plan: PreflightPlan, folder: Path) -> dict[str, Any]:
        environ = ENVIRON | {"CPU_NUM_DEVICES": str(plan.cores)}
        run([str(HERE / "tpu_by_hand.py"), self.name, str(folder)], "tracing", self.timeout, self.verbose, environ)
        traced: dict[str, Any] = json.loads((folder / TRACED).read_text())
        return traced


class Keras(Peer):
    """A step of Keras 3 on JAX, compiled by JAX with its flags."""

    def trace(self, plan: PreflightPlan, folder: Path) -> dict[str, Any]:
        self._run(folder, "v5e-8")  # the program is the same for all 8 cores
        traced: dict[str, Any] = json.loads((folder / TRACED).read_text())
        return traced

    def compile(self, traced: Mapping[str, Any], folder: Path, on: Slice) -> list[CompiledProgram]:
        self._run(folder, on.name, "compile")
        compiled = json.loads((folder / f"0.{on.name}.json").read_text())
        (folder / "0.before.txt").write_text(as_text((folder / "0.hlo").read_bytes()))
        after = (folder / f"0.{on.name}.txt").read_text()
        # The purpose of arguments is unknown: the figures don't distinguish them.
        arguments = [{"source": "state", "name": ""} for _ in parse_arguments(after)]
        return [analyze(traced["0"] | {"arguments": arguments}, compiled, "", after, on)]

    def _run(self, folder: Path, *words: str) -> None:
        command = [str(HERE / "tpu_keras.py"), self.name, str(folder), *words]
        run(command, " ".join(words), self.timeout, self.verbose, NO_HOST | {"KERAS_BACKEND": "jax"})


PEERS: dict[str, type[Peer]] = {"Keras": Keras, "by hand": ByHand}
