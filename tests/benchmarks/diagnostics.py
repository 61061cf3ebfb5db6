"""Measures the cost of measuring the host's time: `Diagnostics` on and off, with the same step.

    python tests/benchmarks/diagnostics.py [--rounds 5] [--out DIR]

`hooks` times a pass around an empty step: two hooks of a callback, and the call of the step. `fit` is a training of a
tiny network, with and without `Diagnostics`, in turns; its steps vary by more than the difference, so it only shows
that nothing else is added. A run writes `results/diagnostics.json`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from engine import HERE, machine, versions
from hooks import Epochs
from torch import nn

import tpufit
from tpufit.callbacks import Callback, CallbackList, Diagnostics
from tpufit.runtime import counts
from tpufit.utils.counters import time_function

CALLS = 100_000
STEPS, EPOCHS = 500, 6
MICROSECONDS_ALLOWED = 10.0


class Hooked(Callback):
    """A callback with two empty hooks."""

    reads_weights = False

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        pass

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ended = batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    rounds = [{"hooks": hooks(), "fit": fits(on_first=i % 2 == 1)} for i in range(args.rounds)]
    report: dict[str, Any] = {"date": datetime.datetime.now(datetime.timezone.utc).date().isoformat()}
    report |= {"machine": machine(), "versions": versions(), "calls": CALLS, "steps": STEPS}
    for name in ("hooks", "fit"):
        off, on = ([one[name][which] for one in rounds] for which in ("off", "on"))
        added = statistics.median(b - a for a, b in zip(off, on, strict=True))
        report[name] = {"off_us": statistics.median(off), "on_us": statistics.median(on), "added_us": added}
        report[name] |= {"off_us_rounds": off, "on_us_rounds": on}
        print(
            f"{name}: {report[name]['off_us']:.2f} us per step off, {report[name]['on_us']:.2f} on, {added:.2f} added"
        )
    report["waits"] = {which: rounds[0]["fit"][f"waits_{which}"] for which in ("off", "on")}
    print(f"waits for the device: {report['waits']}; allowed are {MICROSECONDS_ALLOWED:g} us per step")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "diagnostics.json").write_text(json.dumps(report, indent=1) + "\n")


def hooks() -> dict[str, float]:
    """Return the microseconds of a pass around an empty step."""

    def nothing(group: object, pause: object, last: bool) -> None:
        return None

    def run(callbacks: CallbackList, step: Callable[[object, object, bool], None]) -> float:
        began = time.perf_counter()
        for i in range(CALLS):
            callbacks.call("on_train_batch_begin", i)
            step(None, None, False)
            callbacks.call("on_train_batch_end", i, {})
        return (time.perf_counter() - began) / CALLS * 1e6

    return {
        "off": run(CallbackList([Hooked()]), nothing),
        "on": run(CallbackList([Hooked(), Diagnostics()]), time_function("steps", nothing)),
    }


def fits(on_first: bool) -> dict[str, Any]:
    """Return the microseconds of a tiny network's step, and the waits except back-pressure."""
    runs = [("off", []), ("on", [Diagnostics()])]
    x, y = np.zeros((STEPS * 8, 16), "float32"), np.zeros(STEPS * 8, "int64")
    result: dict[str, Any] = {}
    for which, more in reversed(runs) if on_first else runs:
        model = tpufit.Model(nn.Linear(16, 4))
        model.compile("sgd", "cross_entropy")
        clock, before = Epochs(), counts()
        model.fit(x, y, batch_size=8, epochs=EPOCHS, verbose=0, callbacks=[clock, Hooked(), *more])
        result[which] = min(clock.seconds[2:]) / STEPS * 1e6
        waits = (counts() - before).waits
        result[f"waits_{which}"] = {reason: n for reason, n in sorted(waits.items()) if n and reason != "throttle"}
    return result


if __name__ == "__main__":
    main()
