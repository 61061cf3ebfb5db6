"""Writes `pages/reference/operations.md`, about wrong results of torch_xla and TorchTPU, from `operations.json`.

    python docs/operations.py --record     # run PyTorch's table first, with and without tpufit: 30 minutes

`--record` runs the table of `tests/operation_table.py` on the installed runtime.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
RECORD = DOCS / "operations.json"
PAGE = DOCS / "pages" / "reference" / "operations.md"
TABLE = DOCS.parent / "tests" / "operation_table.py"
DTYPES = ("float32", "bfloat16", "complex64")
# The verdicts, worst first.
ENDED, WRONG, ERROR, UNKNOWN, RIGHT = "ends the process", "wrong", "error", "not shown", "right"
VERDICTS = (ENDED, WRONG, ERROR, UNKNOWN, RIGHT)
# Words in errors of the CPU plugin, which is older than TorchTPU.
OF_THE_PLUGIN = ("to plugin version", "no FFI handler", "host memory allocator", "no registered implementation")

INTRODUCTION = """\
# What torch_xla and TorchTPU get wrong, and what tpufit does about it

PyTorch's own tests have a table of its operations, with samples of their arguments (OpInfo). This page compares their
results and gradients on torch_xla {torch_xla} (XLA:CPU, one core, up to three samples of an operation), with and
without tpufit, with PyTorch {torch} on the CPU. A difference counts if it is more than rounding. Random operations
aren't compared. The last sections are about [TorchTPU](#torchtpu).

These commands print the verdict on an operation, first with torch_xla alone, then with tpufit:

```sh
python tests/operation_table.py --dtype float32 --plain nn.functional.elu
python tests/operation_table.py --dtype float32 nn.functional.elu
```

| verdict | meaning |
| --- | --- |
| right | equal to PyTorch, up to rounding |
| wrong | another result, without an error |
| error | an error that PyTorch doesn't raise |
| ends the process | the process ends; in a notebook, the kernel dies |
| refused | tpufit raises an error that names the operation and says what to write instead |
| not shown | on TorchTPU: the CPU plugin that replaces the TPU lacks something that the operation needs |

"""

MIXED = """\
## Beyond the table

Each sample of the table has a single dtype. torch_xla alone also differs from PyTorch in the following expressions,
where `x` is an `int64` tensor on the device, `m` a mask, and `f`, `a` and `b` are tensors of floats. With tpufit these
expressions are right.

| expression | torch_xla alone |
| --- | --- |
| `torch.where(m, x, 0.5 * x)` | the result is `int64`: 0.5 becomes 0 |
| `x.clamp(max=4.5)` | 4 instead of 4.5 |
| `x % 2.5` | computed in integers |
| `f // 0.3` | 20 for 6.0, PyTorch 19: the quotient is rounded before its floor |
| `-x >> 1` | zeros are shifted in |
| `m.cumsum(0)` | stays a mask, PyTorch counts |
| `x.mean(0, dtype=torch.float32)` | an error |
| `f.bfloat16().sum((0, 1))` | each addition is rounded: 256 + 1 = 256 |
| `f.index_select(0, f[:, 0].sort()[1])` | ends the process |
| `a / (a - b)`, then `b / (a - b)` | the second gets the program of the first |
"""


TORCHTPU = """
## TorchTPU

The same table on torch_tpu {torch_tpu} and PyTorch {torch}; an XLA:CPU plugin replaces the TPU.

"""


def record() -> None:
    """Run the table, and write the verdicts of operations that the runtime or tpufit computes wrongly."""
    runtime = "torch_xla" if find_spec("torch_xla") else "torch_tpu"
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for dtype in DTYPES:
        for side in ("plain", "tpufit"):
            command = [sys.executable, str(TABLE), "--dtype", dtype, *(["--plain"] if side == "plain" else [])]
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
            for line in map(json.loads, done.stdout.splitlines()):
                if line["samples"]:
                    row = rows.setdefault((dtype, line["operation"]), {"plain": [], "tpufit": []})
                    row[side] += line["faults"]
    versions = {name: metadata.version(name) for name in ("torch", runtime)}
    counts = dict(Counter(dtype for dtype, _ in rows))
    faulty = [{"dtype": dtype, "operation": name, **row} for (dtype, name), row in rows.items() if any(row.values())]
    found = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    found[runtime] = {"versions": versions, "operations": counts, "rows": faulty}
    RECORD.write_text(json.dumps(found, indent=1) + "\n")


def judge(faults: list[str]) -> str:
    """Return the worst verdict of an operation's faults."""
    if any(fault.startswith("ended") for fault in faults):
        return ENDED
    if any(fault.startswith("wrong") for fault in faults):
        return WRONG
    if any(text in fault for fault in faults for text in OF_THE_PLUGIN):
        return UNKNOWN
    return ERROR if faults else RIGHT


def describe(faults: list[str]) -> str:
    """Describe tpufit's verdict: right, or the error's sentence, or the difference."""
    verdict = judge(faults)
    if verdict in (RIGHT, UNKNOWN):
        return verdict
    text = faults[0].partition(": ")[2].replace("|", "\\|")
    return f"refused: {text}" if verdict is ERROR and "torch_xla" in text else f"{verdict}: {text or faults[0]}"


def write_counts(found: dict[str, Any], runtime: str) -> str:
    """Return the number of operations by verdict and dtype."""
    heads = ("dtype", "operations", f"{runtime} alone: right", "not shown", "wrong", "error", "ends the process")
    parts = [f"| {' | '.join(heads)} | with tpufit: right |\n| --- |{' ---: |' * len(heads)}\n"]
    for dtype, total in found["operations"].items():
        rows = [row for row in found["rows"] if row["dtype"] == dtype]
        alone = Counter(judge(row["plain"]) for row in rows)
        ours = sum(judge(row["tpufit"]) is RIGHT for row in rows)
        right = total - len(rows)
        numbers = (total, right + alone[RIGHT], *(alone[verdict] for verdict in (UNKNOWN, WRONG, ERROR, ENDED)))
        parts.append(f"| {dtype} | {' | '.join(map(str, numbers))} | {right + ours} |\n")
    return "".join(parts)


def write_rows(found: dict[str, Any], runtime: str, heading: str) -> str:
    """Return the operations with a verdict other than right, worst first, in a section for each dtype."""
    parts = []
    for dtype in found["operations"]:
        rows = [row for row in found["rows"] if row["dtype"] == dtype]
        parts.append(f"\n{heading} {dtype}\n\n| operation | {runtime} alone | with tpufit |\n| --- | --- | --- |\n")
        for row in sorted(rows, key=lambda row: (VERDICTS.index(judge(row["plain"])), row["operation"])):
            parts.append(f"| `{row['operation']}` | {judge(row['plain'])} | {describe(row['tpufit'])} |\n")
    return "".join(parts)


def write(found: dict[str, Any]) -> str:
    """Return the page for a record."""
    parts = []
    for runtime, name, head, heading in (
        ("torch_xla", "torch_xla", INTRODUCTION, "##"),
        ("torch_tpu", "TorchTPU", TORCHTPU, "### TorchTPU,"),
    ):
        record = found[runtime]
        parts += [head.format(**record["versions"]), write_counts(record, name), write_rows(record, name, heading)]
        if runtime == "torch_xla":
            parts.append("\n" + MIXED)
    return "".join(parts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--record", action="store_true", help="run the table first")
    if parser.parse_args().record:
        record()
    PAGE.write_text(write(json.loads(RECORD.read_text())))
