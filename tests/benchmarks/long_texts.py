"""GPT-2 small on long texts, with plain and with flash attention, compiled for TPUs.

It has 32,768 words, and an untied head.

    python tests/benchmarks/long_texts.py                # all rows, a quarter of an hour on two idle cores
    python tests/benchmarks/long_texts.py --only "4096, flash"    # rows with this in their name

Each row is stored in results/long_texts.json when it is known. tpufit estimates the time of kernels, see
`TPU.estimate_cycles`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from networks import GPT2, of_words
from torch import nn

import tpufit

SLICE, WORDS = "v5e-8", 32768
RESULTS = Path(__file__).with_name("results") / "long_texts.json"


@dataclass(frozen=True)
class Row:
    length: int
    rows: int
    attention: str
    remat: bool | None = None

    @property
    def name(self) -> str:
        """The text that `--only` searches."""
        return f"{self.length}, {self.attention}"


ROWS = [
    Row(1024, 4, "plain"),
    Row(1024, 4, "flash"),
    Row(4096, 1, "plain"),
    Row(4096, 1, "flash"),
    Row(8192, 1, "flash"),
    Row(16384, 1, "flash"),
    Row(32768, 1, "flash", remat=True),
]


def compiled(row: Row) -> dict[str, Any]:
    """Return the figures of a training step."""
    net = GPT2(WORDS, row.length, dropout=0.0)
    net.head = nn.Linear(768, WORDS, bias=False)
    model = tpufit.Model(net)
    model.compile(
        torch.optim.AdamW(net.parameters()),
        of_words,
        metrics=["accuracy"],
        precision="bf16",
        attention=row.attention,
        remat=row.remat,
    )
    words = torch.zeros(row.rows * 8, row.length, dtype=torch.long)
    report = model.preflight(words, words, batch_size=row.rows, tpu=SLICE, verbose=0)
    cost, memory = report.step.cost, report.step.memory
    return asdict(row) | {
        "fits": report.fits,
        "GiB": memory.total / 2**30,
        "temporaries_GiB": memory.temporaries / 2**30,
        "million_cycles": cost.cycles / 1e6,
        "of_kernels": cost.of_kernels / max(1, cost.cycles),
        "GFLOP": cost.flops / 1e9,
        "GB": cost.nbytes / 1e9,
        "ms": 1000 * report.seconds,
        "share_of_peak": report.share_of_peak,
        "compiler": dict(report.compiler),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a part of the names of rows")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where they are kept (default: results/)")
    args = parser.parse_args()
    kept = {_row_of(one): one for one in json.loads(args.out.read_text())} if args.out.exists() else {}
    for row in ROWS:
        if args.only in row.name:
            kept[row] = compiled(row)
            print(json.dumps(kept[row]), flush=True)
            args.out.write_text(json.dumps([kept[each] for each in ROWS if each in kept], indent=1) + "\n")


def _row_of(kept: dict[str, Any]) -> Row:
    return Row(**{each.name: kept[each.name] for each in fields(Row)})


if __name__ == "__main__":
    main()
