"""One measured thing in a process of its own: `python worker.py '{"contender": "tpufit", "workload": "mlp", ...}'`.

The last line of its output is a JSON object: what was measured, or why it can't be.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
from typing import Any

from measure import WARM_UP, Clock, Missing, core_megabytes, peak_megabytes


def main() -> None:
    spec = json.loads(sys.argv[1])
    try:
        name = spec["contender"]
        if name != "keras_jax":
            # It is here for Keras. torch_xla's loader would import it too: a second, and memory, that few users pay.
            sys.modules["jax"] = None  # type: ignore[assignment]
        contenders = importlib.import_module("contender_keras" if name == "keras_jax" else "contenders_torch")
        clock = Clock()
        more = getattr(contenders, name)(clock, spec)
    except (Missing, ModuleNotFoundError) as reason:
        print(json.dumps({"missing": str(reason)}))
        return
    print(json.dumps(_result(clock, spec) | more))


def _result(clock: Clock, spec: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {"peak_mb": peak_megabytes()} | core_megabytes()
    if spec["kind"] == "first":
        return result | {"first_step_s": clock.reached[0], "fifth_step_s": clock.reached[1]}
    result["loss"] = clock.loss
    if spec["kind"] == "memory":
        return result
    for name, seconds in (("ms_per_step", clock.wall), ("host_ms_per_step", clock.host)):
        epochs = [1e3 * epoch / spec["steps"] for epoch in seconds[WARM_UP:]]
        result |= {name: statistics.median(epochs), f"{name}_epochs": epochs}
    return result


if __name__ == "__main__":
    main()
