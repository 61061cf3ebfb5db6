"""The share of a chip's peak that large transformers reach, by remat policy and batch, from the TPU's compiler.

    python tests/benchmarks/limits.py [--only PART]     # rows with this in their name; minutes each
    python tests/benchmarks/limits.py --only PART --out tests/benchmarks/results/limits_torchtpu.json   # with TorchTPU

The installed runtime's libtpu compiles; only TorchTPU's knows v7x.

GPT-2 small and GPT-2 XL have 50,257 words and no dropout. Llama is transformers' unchanged LlamaForCausalLM, with the
sizes of Llama 3.2 1B. The weights of GPT-2 XL and Llama are split over the cores. tpufit estimates the time of flash
attention, see `TPU.estimate_cycles`; all other figures are the compiler's. Compiling 16 or 48 blocks takes more memory
than a common machine has, so deep networks are compiled with 2 and with 4 blocks, and each figure is extrapolated
linearly. Each row is written to results/limits.json as soon as it is known.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from networks import GPT2, of_words
from torch import nn
from transformers_networks import huggingface

import tpufit

RESULTS = Path(__file__).with_name("results") / "limits.json"
FEW = (2, 4)  # the numbers of blocks that are compiled, for the extrapolation
USABLE = {"v5e-8": 15.75, "v6e-8": 31.25, "v7x-8": 94.74}  # the GiB of a core that a program may use
_LLAMA = {
    "vocab_size": 128256, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "intermediate_size": 8192, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "tie_word_embeddings": True, "use_cache": False,
}  # fmt: skip


def _gpt2(blocks: int, length: int, width: int = 768) -> nn.Module:
    return GPT2(length=length, width=width, depth=blocks, dropout=0.0)


def _llama(blocks: int, length: int) -> nn.Module:
    return huggingface("LlamaForCausalLM", num_hidden_layers=blocks, **_LLAMA)


NETWORKS: dict[str, Any] = {"GPT-2 small": _gpt2, "GPT-2 XL": partial(_gpt2, width=1600), "Llama 1B": _llama}
BLOCKS = {"GPT-2 small": 12, "GPT-2 XL": 48, "Llama 1B": 16}


@dataclass(frozen=True)
class Row:
    """A training: a network, its rows on each core and their length, and the TPU.

    Attributes:
        network: One of `NETWORKS`.
        tpu: The TPU.
        length: The words of a row.
        rows: The rows on a core.
        remat: As in `Model.compile`.
        extrapolated: True if only networks with few blocks are compiled.
    """

    network: str
    tpu: str
    length: int
    rows: int
    remat: str | None = None
    extrapolated: bool = True

    @property
    def name(self) -> str:
        """The text that `--only` searches."""
        how = ", extrapolated" * self.extrapolated
        return f"{self.network}, {self.rows} x {self.length}, remat={self.remat}, {self.tpu}{how}"

    def found(self) -> dict[str, Any]:
        """Return the figures of a step."""
        if not self.extrapolated:
            return asdict(self) | self._compiled(BLOCKS[self.network])
        own = [self._compiled(blocks) for blocks in FEW]
        return asdict(self) | extrapolated(own, BLOCKS[self.network], USABLE[self.tpu]) | {"compiled": own}

    def _model(self, blocks: int) -> tpufit.Model:
        """Return the compiled model, whose weights have no values."""
        with torch.device("meta"):
            net: nn.Module = NETWORKS[self.network](blocks, self.length)
        model = tpufit.Model(net)
        options: dict[str, Any] = {"remat": self.remat, "precision": "bf16", "attention": "auto"}
        options["shard"] = None if self.network == "GPT-2 small" else "fsdp"
        if self.network == "Llama 1B":
            model.compile(torch.optim.AdamW(net.parameters()), "module", **options)
        else:
            model.compile(torch.optim.AdamW(net.parameters()), of_words, metrics=["accuracy"], **options)
        return model

    def _compiled(self, blocks: int) -> dict[str, Any]:
        words = torch.zeros(self.rows * 8, self.length, dtype=torch.long)
        x, y = ({"input_ids": words, "labels": words}, None) if self.network == "Llama 1B" else (words, words)
        report = self._model(blocks).preflight(x, y, batch_size=self.rows, tpu=self.tpu, verbose=0, timeout=3600.0)
        step = report.step
        found = {
            "blocks": blocks,
            "fits": report.fits,
            "GiB": step.memory.total / 2**30,
            "temporaries_GiB": step.memory.temporaries / 2**30,
            "state_GiB": (step.memory.weights + step.memory.optimizer) / 2**30,
            "compiled_in_s": step.seconds,
            "compiler": dict(report.compiler),
        }
        if report.fits:
            found |= {
                "million_cycles": step.cost.cycles / 1e6,
                "of_kernels": step.cost.of_kernels / step.cost.cycles,
                "kernels": step.cost.kernels,
                "GFLOP": step.cost.flops / 1e9,
                "GB": step.cost.nbytes / 1e9,
                "ms": 1000 * report.seconds,
                "ms_of_links": 1000 * report.bounds["links"],
                "bound_by": report.bound,
                "tokens_per_second": report.rows_per_second * self.length,
                "share_of_peak": report.share_of_peak,
                "attention": sorted({how.partition(":")[0] for how in step.attention.values()}),
            }
        return found


def extrapolated(own: Sequence[Mapping[str, Any]], blocks: int, unwrap_module: float) -> dict[str, Any]:
    """Return the figures of a network with a number of blocks, if each adds as much as in networks with few blocks."""
    few, more = own
    turns = (blocks - more["blocks"]) / (more["blocks"] - few["blocks"])

    def of(figure: Callable[[Mapping[str, Any]], float]) -> float:
        return figure(more) + turns * (figure(more) - figure(few))

    found: dict[str, Any] = {"blocks": blocks, "extrapolated_from": [few["blocks"], more["blocks"]]}
    found |= {name: of(itemgetter(name)) for name in ("GiB", "temporaries_GiB", "state_GiB")}
    found["fits"] = found["GiB"] <= unwrap_module
    if not (few["fits"] and more["fits"]):
        return found | {"fits": False}
    found |= {name: of(itemgetter(name)) for name in ("million_cycles", "kernels", "GFLOP", "GB", "ms", "ms_of_links")}
    found["of_kernels"] = of(lambda one: one["of_kernels"] * one["million_cycles"]) / found["million_cycles"]
    # A step has the same words and the same chip for any number of blocks.
    found["tokens_per_second"] = more["tokens_per_second"] * more["ms"] / found["ms"]
    found["share_of_peak"] = of(lambda one: one["share_of_peak"] * one["ms"]) / found["ms"]
    return found | {"attention": more["attention"], "compiler": more["compiler"]}


POLICIES = (None, "attention", "dots", "nothing")
ROWS = [
    *(Row("GPT-2 small", "v5e-8", 1024, 8, remat, extrapolated=False) for remat in POLICIES),
    *(Row("GPT-2 small", tpu, 1024, 8, extrapolated=False) for tpu in ("v6e-8", "v7x-8")),
    *(Row("GPT-2 small", tpu, 4096, 2, extrapolated=False) for tpu in ("v5e-8", "v6e-8", "v7x-8")),
    # Compared with compiled networks, to show the accuracy of the extrapolation.
    Row("GPT-2 small", "v5e-8", 1024, 8),
    Row("GPT-2 small", "v5e-8", 1024, 8, "nothing"),
    Row("Llama 1B", "v5e-8", 2048, 2),
    Row("Llama 1B", "v5e-8", 2048, 4, "nothing"),
    Row("Llama 1B", "v6e-8", 2048, 4),
    Row("Llama 1B", "v6e-8", 2048, 8, "nothing"),
    Row("Llama 1B", "v7x-8", 2048, 4),
    Row("GPT-2 XL", "v5e-8", 1024, 1),
    *(Row("GPT-2 XL", "v5e-8", 1024, 8, remat) for remat in (None, "dots", "nothing")),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a part of the names of rows")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where they are kept (default: results/limits.json)")
    args = parser.parse_args()
    kept = {_row_of(one): one for one in json.loads(args.out.read_text())} if args.out.exists() else {}
    for row in ROWS:
        if args.only in row.name:
            kept[row] = row.found()
            print(f"{row.name}: {json.dumps(kept[row])}", flush=True)
            args.out.write_text(json.dumps([kept[each] for each in ROWS if each in kept], indent=1) + "\n")


def _row_of(kept: Mapping[str, Any]) -> Row:
    return Row(**{each.name: kept[each.name] for each in fields(Row)})


if __name__ == "__main__":
    main()
