"""The accuracy that half precision loses: the same trainings in fp32, in bf16 and in bf16-true.

    python tests/benchmarks/precision.py [--seeds 3]

Trains a network on scikit-learn's digits, and a small GPT on the texts of Python's own help. Each number is for
held-out rows, which influence no choice, after training from one seed. XLA rounds to bfloat16 on the CPU as on a TPU;
but a TPU sums products in float32, and the CPU's kernels may not. Writes `results/precision.json`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
from pydoc_data.topics import topics
from typing import Any

import torch
from engine import HERE, machine, versions
from networks import GPT2, of_words
from sklearn.datasets import load_digits
from torch import Tensor, nn
from tpu_tables import comparison

import tpufit

PRECISIONS = ("fp32", "bf16", "bf16-true")
LENGTH = 64


def digits(precision: str, seed: int) -> float:
    """Return the accuracy on 360 digits."""
    data = load_digits()
    order = torch.from_numpy(data.target).argsort(stable=True)  # held out: each fifth of a class
    held_out = torch.zeros(len(order), dtype=torch.bool)
    held_out[order[::5]] = True
    x, y = torch.from_numpy(data.data).float() / 16, torch.from_numpy(data.target)
    tpufit.set_random_seed(seed)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
    model = tpufit.Model(net)
    model.compile("adamw", "cross_entropy", metrics=["accuracy"], precision=precision)
    model.fit(x[~held_out], y[~held_out], batch_size=32, epochs=30, verbose=0, cores=1)
    return float(model.evaluate(x[held_out], y[held_out], verbose=0, return_dict=True)["accuracy"])


def gpt(precision: str, seed: int) -> float:
    """Return the mean loss of the next character, in nats, over the end of the texts."""
    text = "".join(topics.values())
    kinds = sorted(set(text))
    numbers = torch.tensor([kinds.index(character) for character in text])
    rows = numbers[: len(numbers) // LENGTH * LENGTH].view(-1, LENGTH)
    rows, held_out = rows[:2048], rows[-512:]
    tpufit.set_random_seed(seed)
    model = tpufit.Model(GPT2(len(kinds), LENGTH, width=128, depth=2, dropout=0.0))
    model.compile(lambda parameters: torch.optim.AdamW(parameters, lr=1e-3), of_words, precision=precision)

    def pair(rows: Tensor) -> tuple[Tensor, Tensor]:
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    model.fit(*pair(rows), batch_size=32, epochs=4, verbose=0, cores=1)
    return float(model.evaluate(*pair(held_out), batch_size=32, verbose=0))


ROWS = {"digits, accuracy": digits, "GPT 2 x 128, loss in nats": gpt}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    seeds = range(parser.parse_args().seeds)
    report: dict[str, Any] = {"date": datetime.datetime.now(datetime.timezone.utc).date().isoformat()}
    report |= {"machine": machine(), "versions": versions(), "rows": {}}
    for name, train in ROWS.items():
        found = {precision: [round(train(precision, seed), 4) for seed in seeds] for precision in PRECISIONS}
        report["rows"][name] = found
        means = {precision: round(statistics.mean(numbers), 4) for precision, numbers in found.items()}
        print(f"{name}: {means}, by seed {found}", flush=True)
    (HERE / "results" / "precision.json").write_text(json.dumps(report, indent=1) + "\n")
    comparison(HERE / "results")


if __name__ == "__main__":
    main()
