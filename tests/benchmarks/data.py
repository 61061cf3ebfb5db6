"""Measures the input pipeline: shuffled batches from a cache, an epoch of a training, and a warm-up.

    python tests/benchmarks/data.py [--quick] [--rounds 5] [--out DIR]

All rows are measured once in each round, one after the other. A complete run writes `results/data.json`; `--quick`
only prints, unless `--out` is given. README.md in this folder explains the rows.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import re
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine import HERE, ROOT, machine, versions
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tpufit.data import CachedDataset, ImageFolder, presize, stream
from tpufit.data.sampling import permute_rows

EXAMPLE = ROOT / "examples" / "cached_images.py"
SIDE = 96
BATCH = 512
PROCESSES = len(os.sched_getaffinity(0))
# How often a round reads the cached rows; its result is the median. One pass takes a twentieth of a second.
PASSES = 5


@dataclass(frozen=True)
class Sizes:
    """The amount of data: rows of the cache of noise, JPEGs, and epochs of the example."""

    rows: int
    photos: int
    epochs: int


COMPLETE, QUICK = Sizes(20_000, 4096, 4), Sizes(2048, 256, 2)


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        group: Its table.
        name: Its name in the JSON.
        label: Its name in the table.
        measure: Gets the number of the round, and returns the samples per second of one or more passes.
    """

    group: str
    name: str
    label: str
    measure: Callable[[int], list[float]]


@dataclass(frozen=True)
class Target:
    """A ratio of two rows' samples per second, taken within a round, and its target."""

    row: str
    other: str
    at_least: float = 0.0
    at_most: float = float("inf")


TARGETS = [
    Target("cached-mmap", "memcpy", at_least=0.45),
    Target("cached-ram", "memcpy", at_least=0.45),
    Target("cached-mmap-unordered", "memcpy", at_least=0.6),
    Target("cached-ram-unordered", "memcpy", at_least=0.6),
    Target("cached-mmap", "naive-0", at_least=100),
    Target("cached-mmap", "naive-2", at_least=100),
    Target("epoch-cached", "epoch-decoded", at_least=4),
    Target("decode", "warm-up", at_most=1.3),
    Target(f"decode-{PROCESSES}", f"warm-up-{PROCESSES}", at_most=1.3),
]


class Noise(Dataset[tuple[Tensor, int]]):
    """Rows of noise, each a different part of the same array: quick to create, and small to send to a worker."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        size = 3 * SIDE * SIDE
        return _noise(self.rows + size)[index : index + size].view(3, SIDE, SIDE), index


_made: dict[int, Tensor] = {}


def _noise(size: int) -> Tensor:
    if size not in _made:
        _made[size] = torch.from_numpy(np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8))
    return _made[size]


class Naive(Dataset[tuple[Tensor, int]]):
    """A folder of JPEGs as in tutorials."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.rglob("*.jpg"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = Image.open(self.paths[index]).convert("RGB").resize((SIDE, SIDE))
        return torch.from_numpy(np.array(image)).permute(2, 0, 1), index


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one round of little data: that it runs, not how fast")
    parser.add_argument("--rounds", type=int, help="how often each row is measured (default 5; quick 1)")
    parser.add_argument("--out", type=Path, help="where to write (default, for a complete run: results/)")
    args = parser.parse_args()
    if os.getloadavg()[0] > 0.5:
        print(f"the machine is busy (load {os.getloadavg()[0]:.1f}): expect smaller numbers", flush=True)
    torch.set_num_threads(1)  # a second thread that has to wait for its core would make any copy here ten times slower
    sizes, rounds = (QUICK, args.rounds or 1) if args.quick else (COMPLETE, args.rounds or 5)
    report = {"date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(), "quick": args.quick}
    more = {package: metadata.version(package) for package in ("pillow", "safetensors", "scikit-learn")}
    found = {name: version for name, version in (versions() | more).items() if version != "not installed"}
    report |= {"machine": machine(), "versions": found, "sizes": asdict(sizes)}
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runpy.run_path(str(EXAMPLE))["make_photos"](_photos(sizes, folder), sizes.photos)
        rows = [*batches(sizes, folder), *epochs(sizes, folder), *warm_ups(sizes, folder)]
        report |= measure(rows, rounds)
    print_tables(report)
    print(f"\n{time.monotonic() - begun:.0f} s")
    if args.out or not args.quick:
        write(report, args.out or HERE / "results")


def batches(sizes: Sizes, folder: Path) -> list[Row]:
    """Measure shuffled batches: from the cache, copied without lookups, and decoded one by one."""
    caches = {}
    for mode in ("mmap", "ram"):
        for suffix, ordered in (("", True), ("-unordered", False)):
            cache = CachedDataset(Noise(sizes.rows), folder / "noise", mode=mode, ordered=ordered)
            cache.warm_up(progress=False)
            caches[f"cached-{mode}{suffix}"] = cache
    images = np.stack([image.numpy() for image, _ in (Noise(sizes.rows)[i] for i in range(sizes.rows))])
    buffer = np.empty((BATCH, *images.shape[1:]), np.uint8)

    def memcpy(number: int) -> list[float]:
        arranged = images[permute_rows(sizes.rows, 0, number)]
        return _rates(sizes.rows, lambda: _copy_all(arranged, buffer), PASSES)

    def gather(number: int) -> list[float]:
        shuffled = permute_rows(sizes.rows, 0, number)
        return _rates(sizes.rows, lambda: _gather_all(images, shuffled, buffer), PASSES)

    def cached(cache: CachedDataset) -> Callable[[int], list[float]]:
        data = stream(cache, batch_size=BATCH, shuffle=True)
        return lambda number: _rates(sizes.rows, lambda: _exhaust(data.epoch(number)), PASSES)

    for cache in caches.values():
        _check(cache, images)
    labels = {
        "cached-mmap": "cache",
        "cached-mmap-unordered": "cache, ordered=False",
        "cached-ram": 'cache, mode="ram"',
        "cached-ram-unordered": 'cache, mode="ram", ordered=False',
    }
    photos = _photos(sizes, folder)
    loaders = {
        f"naive-{workers}": DataLoader(
            Naive(photos), BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0
        )
        for workers in (0, 2)
    }

    def naive(loader: DataLoader[Any]) -> Callable[[int], list[float]]:
        return lambda number: _rates(sizes.photos, lambda: _exhaust(loader), 1)

    return [
        Row("batches", "memcpy", "memcpy of the same bytes, in the order they are to come", memcpy),
        Row("batches", "gather", "numpy.take from RAM, into a buffer used again", gather),
        *(Row("batches", name, labels[name], cached(cache)) for name, cache in caches.items()),
        *(
            Row("batches", name, f"DataLoader over JPEGs, {loader.num_workers} workers", naive(loader))
            for name, loader in loaders.items()
        ),
    ]


def epochs(sizes: Sizes, folder: Path) -> list[Row]:
    """An epoch of the example, which is run once in each round for both of its rates."""
    arguments = [f"--count={sizes.photos}", f"--epochs={sizes.epochs}", f"--run-dir={folder}"]
    command = [sys.executable, str(EXAMPLE), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PJRT_DEVICE": "CPU", "TF_CPP_MIN_LOG_LEVEL": "2"}
    environment.pop("CPU_NUM_DEVICES", None)
    with_cache: dict[int, float] = {}

    def decoded(number: int) -> list[float]:
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the example failed:\n{done.stdout}\n{done.stderr}")
        rates = re.findall(r"^with(?:out)? the cache: ([\d,]+) samples/s", done.stdout, re.M)
        without, with_cache[number] = (float(rate.replace(",", "")) for rate in rates)
        return [without]

    return [
        Row("epoch", "epoch-decoded", "DataLoader over JPEGs", decoded),
        Row("epoch", "epoch-cached", "cache", lambda number: [with_cache.pop(number)]),
    ]


def warm_ups(sizes: Sizes, folder: Path) -> list[Row]:
    """Measure decoding and resizing alone, and filling a cache, in the same number of processes."""
    photos = _photos(sizes, folder)

    def decode(processes: int) -> Callable[[int], list[float]]:
        images = ImageFolder(photos, SIDE)
        parts = [range(i, min(i + 64, len(images))) for i in range(0, len(images), 64)]

        def run() -> int:
            if processes == 1:
                return sum(_decode(images, part) for part in parts)
            with multiprocessing.get_context("spawn").Pool(processes, _begin, (images,)) as pool:
                return sum(pool.imap_unordered(_decode_part, parts))

        return lambda number: _rates(len(images), run, 1)

    def warm_up(processes: int) -> Callable[[int], list[float]]:
        def run() -> int:
            with tempfile.TemporaryDirectory(dir=folder) as cache:
                return len(presize(photos, SIDE, Path(cache), workers=processes, progress=False))

        return lambda number: _rates(len(ImageFolder(photos, SIDE)), run, 1)

    return [
        Row("warm-up", "decode", "decode and resize, in this process", decode(1)),
        Row("warm-up", "warm-up", "warm_up(), workers=0", warm_up(0)),
        Row("warm-up", f"decode-{PROCESSES}", f"decode and resize, {PROCESSES} processes", decode(PROCESSES)),
        Row("warm-up", f"warm-up-{PROCESSES}", f"warm_up(), workers={PROCESSES}", warm_up(PROCESSES)),
    ]


def measure(rows: list[Row], rounds: int) -> dict[str, Any]:
    """Measure all rows once in each round. A first round that doesn't count loads the files into memory."""
    results: dict[str, list[float]] = {row.name: [] for row in rows}
    loads = []
    for number in range(0 if rounds > 1 else 1, rounds + 1):
        loads.append(round(os.getloadavg()[0], 2))
        for row in rows:
            rate = statistics.median(row.measure(number))
            results[row.name].append(round(rate, 1))
            print(f"round {number}: {row.name}: {rate:,.0f} samples/s", flush=True)
    measured = [
        {
            "group": row.group,
            "name": row.name,
            "label": row.label,
            "samples_per_s": statistics.median(results[row.name][-rounds:]),
            "rounds": results[row.name][-rounds:],
        }
        for row in rows
    ]
    return {"rounds": rounds, "load_before": loads[-rounds:], "rows": measured, "ratios": ratios(measured)}


def ratios(measured: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the ratios in `TARGETS`, each taken within a round, as medians over the rounds."""
    rates = {row["name"]: row["rounds"] for row in measured}
    found = []
    for target in TARGETS:
        if target.row in rates and target.other in rates:
            pairs = zip(rates[target.row], rates[target.other], strict=True)
            ratio = statistics.median(row / other for row, other in pairs)
            wanted = f"at least {target.at_least}" if target.at_least else f"at most {target.at_most}"
            reached = target.at_least <= ratio <= target.at_most
            name = f"{target.row} / {target.other}"
            found.append({"name": name, "ratio": round(ratio, 3), "target": wanted, "reached": reached})
    return found


def print_tables(report: dict[str, Any]) -> None:
    """Return a Markdown table for each group, of the medians, and the ratios."""
    for group in dict.fromkeys(row["group"] for row in report["rows"]):
        print(f"\n| {group} | samples per s |\n| --- | ---: |")
        for row in report["rows"]:
            if row["group"] == group:
                print(f"| {row['label']} | {row['samples_per_s']:,.0f} |")
    print()
    for ratio in report["ratios"]:
        verdict = "" if report["quick"] else ": reached" if ratio["reached"] else ": MISSED"
        print(f"{ratio['name']}: {ratio['ratio']} (is to be {ratio['target']}{verdict})")


def write(report: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "data.json").write_text(json.dumps(report, indent=1) + "\n")


def _photos(sizes: Sizes, folder: Path) -> Path:
    """The folder in which the example stores its JPEGs."""
    return folder / f"photos-{sizes.photos}"


def _rates(samples: int, run: Callable[[], int], passes: int) -> list[float]:
    """Return the samples per second of each pass."""
    found = []
    for _ in range(passes):
        begun = time.perf_counter()
        done = run()
        found.append(samples / (time.perf_counter() - begun))
        if done != samples:
            raise RuntimeError(f"{done} samples came, of {samples}")
    return found


def _exhaust(batches: Iterable[Any]) -> int:
    # A loop's variable would keep a batch while the next is created. `fit` has sent it by then.
    return sum(map(_count, batches))


def _count(batch: tuple[Tensor, Tensor]) -> int:
    return len(batch[1])


def _copy_all(arranged: np.ndarray[Any, Any], buffer: np.ndarray[Any, Any]) -> int:
    for start in range(0, len(arranged), BATCH):
        batch = arranged[start : start + BATCH]
        np.copyto(buffer[: len(batch)], batch)
    return len(arranged)


def _gather_all(images: np.ndarray[Any, Any], shuffled: np.ndarray[Any, Any], buffer: np.ndarray[Any, Any]) -> int:
    for start in range(0, len(shuffled), BATCH):
        rows = shuffled[start : start + BATCH]
        np.take(images, rows, axis=0, out=buffer[: len(rows)], mode="clip")  # the default mode copies twice
    return len(shuffled)


def _decode(images: ImageFolder, part: range) -> int:
    return sum(len(images[i][0]) == 3 for i in part)


_worker: dict[str, ImageFolder] = {}


def _begin(images: ImageFolder) -> None:
    torch.set_num_threads(1)
    _worker["images"] = images


def _decode_part(part: range) -> int:
    return _decode(_worker["images"], part)


def _check(cache: CachedDataset, images: np.ndarray[Any, Any]) -> None:
    """Check that each row occurs once, with the right values."""
    seen = []
    for batch, labels in stream(cache, batch_size=BATCH, shuffle=True).epoch(0):
        if not np.array_equal(batch.numpy(), images[labels.numpy()]):
            raise RuntimeError("the cache gave other rows than its source")
        seen += labels.tolist()
    if sorted(seen) != list(range(len(images))):
        raise RuntimeError("the cache didn't give every row once")


if __name__ == "__main__":
    main()
