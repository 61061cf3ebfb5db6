"""The figures in the README and on the pages equal the saved results of the benchmarks."""

import json
import re

import pytest
from pages import ROOT, SITE

RESULTS = ROOT / "tests" / "benchmarks" / "results"

# The rows of the host's table on the page, by their rows in host.json; the first cell of each, and its ratio if any.
HOST = {
    "lightning": ("Lightning on torch_xla", "tpufit / lightning, ms_per_step"),
    "hand": ("torch_xla, a hand-written loop", "tpufit / hand, ms_per_step"),
    "accelerate": ("Accelerate on torch_xla", None),
    "eager": ("PyTorch on the CPU, without XLA", None),
    "keras": ("Keras 3 on JAX", "tpufit / keras, ms_per_step"),
    "tpufit": ("**tpufit**", None),
    "replay": ("the compiled step, called in a bare loop", "tpufit / replay, ms_per_step"),
    "keras-10": ("Keras 3 on JAX, `steps_per_execution=10`", "tpufit-10 / keras-10, ms_per_step"),
    "tpufit-10": ("**tpufit, `steps_per_execution=10`**", None),
}
# The rows of TorchTPU's table on the page, by their rows in host_torchtpu.json.
TORCHTPU = {
    "tpufit on torch_xla": ("tpufit", "long-tpufit", "tpufit-10"),
    "tpufit on TorchTPU": ("torchtpu", "long-torchtpu", "torchtpu-10"),
    "Keras 3 on JAX": ("keras", "long-keras", "keras-10"),
}
# The rows of the table of cycles, by their networks in the results.
CYCLES = {
    "GPT 4 x 512": "GPT, 4 layers of width 512",
    "GPT 4 x 512 in float32": "the GPT in float32",
    "ResNet-50": "ResNet-50",
    "ViT-S/16": "ViT-S/16",
    "ViT of 2 blocks": "ViT of 2 blocks",
    "Llama 8 x 512": "Llama, 8 layers of width 512, 8 query heads on 2, 1,024 tokens",
    "MLP 2 x 2048": "MLP of width 2,048",
    "LSTM 2 x 256": "LSTM, 2 layers of width 256",
}
FIRST_STEPS = {
    "tpufit, first step": "tpufit",
    "tpufit, first two steps": "tpufit, both traces",
    "Keras 3 on JAX, first step": "Keras",
    "hand-written loop, first step": "by hand",
}


def saved(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def tables(text):
    """The tables of a page: each a list of rows, and each of them a list of cells."""
    found = [[]]
    for line in text.splitlines():
        if line.startswith("|"):
            found[-1].append([cell.strip() for cell in line.strip("|").split("|")])
        elif found[-1]:
            found.append([])
    return found


def table(path, *columns):
    """The rows of the only table with such columns, without its head."""
    (rows,) = [rows for rows in tables(path.read_text()) if rows and [*columns] == rows[0][: len(columns)]]
    return rows[2:]


def agrees(cell, value):
    """True if a cell gives a value, rounded to the cell's digits."""
    text = re.sub(r"[*,]|\[\^\d\]", "", cell).strip()
    digits = len(text.partition(".")[2])
    return abs(float(text) - value) <= 0.5001 * 10**-digits


BENCHMARKS = SITE / "benchmarks.md"


def test_times_of_a_step_on_the_host():
    report = saved("host")
    times = {row["name"]: row["medians"]["ms_per_step"] for row in report["rows"]}
    shown = {cells[0]: cells[1:] for cells in table(BENCHMARKS, "", "ms per step")}
    assert shown.keys() == {label for label, _ in HOST.values()}
    for name, (label, ratio) in HOST.items():
        assert agrees(shown[label][0], times[name]), label
        assert ratio is None or agrees(shown[label][1], report["ratios"][ratio]), label
    for name in ("accelerate", "eager"):  # ratios of the medians, as the page says
        assert agrees(shown[HOST[name][0]][1], times["tpufit"] / times[name])


def test_times_of_a_step_on_torchtpu():
    medians = {row["name"]: row["medians"] for row in saved("host_torchtpu")["rows"]}
    shown = {cells[0]: cells[1:] for cells in table(BENCHMARKS, "", "an epoch of 300 steps")}
    assert shown.keys() == TORCHTPU.keys()
    for label, names in TORCHTPU.items():
        for cell, name in zip(shown[label], names, strict=True):
            wall, host = re.fullmatch(r"([\d.]+) \(([\d.]+)\)", cell).groups()
            assert agrees(wall, medians[name]["ms_per_step"]), name
            assert agrees(host, medians[name]["host_ms_per_step"]), name
    beside = medians["long-torchtpu-beside"]
    *times, ratio = re.search(
        r"took ([\d.]+) \(([\d.]+)\)\s+ms per step, and `fit` ([\d.]+) times", BENCHMARKS.read_text()
    ).groups()
    assert all(map(agrees, times, [beside["own_replay_ms_per_step"], beside["own_replay_host_ms_per_step"]]))
    assert agrees(ratio, beside["to_own_replay"])


def test_start_and_memory_of_several_cores():
    medians = {(row["runtime"], row["cores"]): row["medians"] for row in saved("cores")["rows"]}
    shown = table(BENCHMARKS, "cores", "first step on TorchTPU, s")
    assert [int(cells[0]) for cells in shown] == [1, 4, 8]
    for count, first, first_xla, host, host_xla, *memory in shown:
        ours, other = medians["torch_tpu", int(count)], medians["torch_xla", int(count)]
        assert agrees(first, ours["first_step_s"]) and agrees(first_xla, other["first_step_s"])
        assert agrees(host, ours["host_ms_per_step"]) and agrees(host_xla, other["host_ms_per_step"])
        for cell, name in zip(memory, ("core_peak_mb", "core_own_mb"), strict=True):
            assert agrees(cell, ours[name]) if count != "1" else not cell


def test_times_and_cycles_in_the_readme():
    columns = "", "Lightning", "Accelerate", "Keras 3 on JAX", "a torch_xla loop", "TorchTPU's trainer", "tpufit"
    one, ten, gpt, resnet, *_ = table(ROOT / "README.md", *columns)
    times = {row["name"]: row["medians"]["ms_per_step"] for row in saved("host")["rows"]}
    peers = [cell for cell in one[1:] if cell]  # TorchTPU runs on no CPU
    assert all(map(agrees, peers, [times[n] for n in ("lightning", "accelerate", "keras", "hand", "tpufit")]))
    assert agrees(ten[3], times["keras-10"]) and agrees(ten[-1], times["tpufit-10"])
    for cells, network in ((gpt, "GPT 4 x 512"), (resnet, "ResNet-50")):
        counted = [cycles(name)[network, "v5e-8"] / 1e6 for name in ("tpu_keras", "tpu_by_hand", "tpu_programs")]
        assert all(map(agrees, [*cells[3:5], cells[-1]], counted)), network
    engines = saved("tpu_engines")["networks"]
    assert agrees(gpt[5], engines["GPT 4 x 512"]["alone"]["cycles"] / 1e6)
    assert agrees(gpt[6], engines["GPT 4 x 512"]["torch_tpu"]["cycles"] / 1e6)  # as the footnote says
    assert resnet[5].startswith("fails") and "failed" in engines["ResNet of 4 blocks"]["alone"]


def test_times_in_the_guide_to_speed():
    times = {row["name"]: row["medians"]["ms_per_step"] for row in saved("host")["rows"]}
    text = (SITE / "guides" / "speed.md").read_text()
    ours, by_hand = re.search(r"takes ([\d.]+) ms in `fit`, and ([\d.]+) ms in a hand-written", text).groups()
    assert agrees(ours, times["tpufit"]) and agrees(by_hand, times["hand"])


def test_seconds_of_the_first_step():
    seconds = {(row["network"], row["contender"]): row["own_s"] for row in saved("first_step")["rows"]}
    networks = ["MLP 2 x 2048", "LSTM 2 x 256", "GPT 4 x 512", "ResNet-50", "ViT-S/16"]
    for label, *shown in table(BENCHMARKS, "", "MLP", "LSTM", "GPT"):
        assert all(map(agrees, shown, [seconds[network, FIRST_STEPS[label]] for network in networks])), label


def cycles(name):
    return {(row["network"], row["slice"]): row["cycles"] for row in saved(name)["programs"] if "cycles" in row}


@pytest.mark.parametrize("network", CYCLES)
def test_cycles_of_a_step(network):
    programs = [cycles(name) for name in ("tpu_programs", "tpu_keras", "tpu_by_hand")]
    label = ""
    shown = []
    for first, *rest in table(BENCHMARKS, "network", "TPU", "tpufit", "Keras on JAX"):
        label = first or label
        if label == CYCLES[network]:
            shown.append(rest)
    assert shown
    for tpu, *cells, ratio in shown:
        counted = [program.get((network, tpu)) for program in programs]
        for cell, value in zip(cells, counted, strict=True):
            assert cell == "not compiled" if value is None else agrees(cell, value / 1e6), (tpu, cell, value)
        assert agrees(ratio, counted[0] / counted[1])


def test_the_table_of_cycles_has_no_other_rows():
    labels = {first for first, *_ in table(BENCHMARKS, "network", "TPU", "tpufit", "Keras on JAX") if first}
    assert labels == {*CYCLES.values()}


def test_figures_of_both_engines():
    networks = saved("tpu_engines")["networks"]
    both = {name: one for name, one in networks.items() if {"torch_xla", "torch_tpu"} <= one.keys()}
    shown = {cells[0]: cells[1:] for cells in table(BENCHMARKS, "network", "torch_xla", "TorchTPU")}
    assert shown.keys() == both.keys()
    for name, (before, here, *ratios, alone) in shown.items():
        of_xla, of_tpu = both[name]["torch_xla"], both[name]["torch_tpu"]
        assert agrees(before, of_xla["cycles"] / 1e6) and agrees(here, of_tpu["cycles"] / 1e6), name
        for cell, figure in zip(ratios, ("cycles", "bytes", "temporaries"), strict=True):
            assert agrees(cell, of_tpu[figure] / of_xla[figure]), (name, figure)
        of_torchtpu = both[name].get("alone", {})
        assert agrees(alone, of_torchtpu["cycles"] / 1e6) if "cycles" in of_torchtpu else alone in ("", "fails"), name
