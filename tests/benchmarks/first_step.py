"""Measures the host's work for the first step, from the call of `fit` to its end, and that of Keras and a manual loop.

    PYTHONPATH=.:KERAS python tests/benchmarks/first_step.py [--rounds 3]

KERAS is a separate folder: `pip install --target KERAS keras==3.15.1`. Each row is a process with one core of the CPU
and two rows of data, in float32. The time is processor time of the thread that calls `fit`, so that neither other load
nor the step itself counts; the time of XLA's compiler is reported separately. tpufit has its second trace in its second
step, which is another row. Writes `results/first_step.json`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from time import perf_counter, thread_time
from typing import Any

from engine import HERE, ROOT, machine, versions

NAMES = ("MLP 2 x 2048", "LSTM 2 x 256", "GPT 4 x 512", "ResNet-50", "ViT-S/16")
CONTENDERS = ("tpufit", "tpufit, both traces", "Keras", "by hand")
ROWS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measured(*args.child)))
        return
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    load = os.getloadavg()[0]
    environment = os.environ | {"PJRT_DEVICE": "CPU", "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
    # A short time for the compiler: with LLVM's optimizations the LSTM alone takes minutes.
    environment["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    for _ in range(args.rounds):
        for name in NAMES:
            for who in CONTENDERS:
                command = [sys.executable, __file__, "--child", name, who]
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
                found.setdefault((name, who), []).append(json.loads(done.stdout.splitlines()[-1]))
                print(name, who, found[name, who][-1], flush=True)
    rows = [
        {"network": name, "contender": who}
        | {key: round(statistics.median(one[key] for one in rounds), 3) for key in rounds[0]}
        for (name, who), rounds in found.items()
    ]
    for row in rows:
        print("{network}, {contender}: {own_s:.2f} s, and {compiler_s:.2f} s in the compiler".format(**row))
    report = {"date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(), "machine": machine()}
    report |= {"versions": versions(), "load_before": round(load, 2), "rounds": args.rounds, "rows": rows}
    (HERE / "results" / "first_step.json").write_text(json.dumps(report, indent=1) + "\n")


def measured(name: str, who: str) -> dict[str, float]:
    from networks import TRAININGS

    training = TRAININGS[name]
    first = {"Keras": keras_step, "by hand": step_by_hand}.get(who, tpufit_step)
    steps = 2 if "both" in who else 1
    x, y = (rows[:1].repeat(ROWS * steps, *[1] * (rows.ndim - 1)) for rows in training.batch(1))
    run, owner, function = first(training, x, y)
    compiler = Timed(getattr(owner, function))
    setattr(owner, function, compiler)
    began, wall = thread_time(), perf_counter()
    run()
    total = thread_time() - began
    return {"own_s": total - compiler.seconds, "compiler_s": compiler.seconds, "wall_s": perf_counter() - wall}


class Timed:
    """A function, and the processor time of its calls.

    Attributes:
        seconds: The time.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.seconds, self._function = 0.0, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        began = thread_time()
        try:
            return self._function(*args, **kwargs)
        finally:
            self.seconds += thread_time() - began


def tpufit_step(training: Any, x: Any, y: Any) -> tuple[Callable[[], Any], object, str]:
    import torch
    import torch_xla

    import tpufit

    tpufit.init(1)
    net = training.make()
    model = tpufit.Model(net)
    model.compile(torch.optim.AdamW(net.parameters()), training.loss, metrics=["accuracy"])
    return lambda: model.fit(x, y, batch_size=ROWS, verbose=0), torch_xla._XLAC, "_xla_warm_up_cache"


def keras_step(training: Any, x: Any, y: Any) -> tuple[Callable[[], Any], object, str]:
    import jax._src.compiler
    import keras
    from keras_networks import NETWORKS

    model = NETWORKS[training.peer](ROWS)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(weight_decay=0.01), loss, metrics=["accuracy"])
    x = x.numpy() if x.ndim != 4 else x.permute(0, 2, 3, 1).numpy()  # channels last
    x = x if x.dtype == "float32" else x.astype("int32")
    y = y.numpy().astype("int32")
    return lambda: model.fit(x, y, batch_size=ROWS, verbose=0), jax._src.compiler, "compile_or_get_cached"


def step_by_hand(training: Any, x: Any, y: Any) -> tuple[Callable[[], Any], object, str]:
    import torch
    import torch_xla
    from torch.nn import functional as F

    device = torch_xla.device()
    torch.ones(2, device=device).sum().item()  # the runtime has started
    net = training.make()
    loss_of = F.cross_entropy if training.loss == "cross_entropy" else training.loss

    def run() -> None:
        net.to(device)
        optimizer = torch.optim.AdamW(net.parameters())
        rows, targets = x.to(device), y.to(device)
        predicted = net(rows)
        loss = loss_of(predicted, targets)
        loss.backward()
        optimizer.step()
        hits = (predicted.argmax(-1) == targets).sum()
        torch_xla.sync()
        loss.item(), hits.item()

    return run, torch_xla._XLAC, "_xla_step_marker"


if __name__ == "__main__":
    main()
