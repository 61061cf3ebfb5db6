"""How near to the limit of a chip large transformers come, with which remat policy and batch, by the TPU's compiler.

    python tests/benchmarks/limits.py [--only PART]     # rows with this in their name; minutes each

GPT-2 small has 50,257 words and no dropout. Llama is LlamaForCausalLM of transformers, as it comes, of the sizes of
Llama 3.2 1B, its weights split over the cores. Attention is flash attention, whose time is an estimate of tpufit's own,
see `TPU.cycles_of`; the rest is the compiler's. Each row is kept in results/limits.json when it is known.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from networks import GPT2, of_words
from torch import nn
from transformers_networks import huggingface

import tpufit

RESULTS = Path(__file__).with_name("results") / "limits.json"
_LLAMA = {
    "vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True, "use_cache": False,
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A training: a network, its rows on each core and their length, and where.

    Attributes:
        network: `"GPT-2 small"` or `"Llama 1B"`.
        tpu: The TPU.
        length: The words of a row.
        rows: The rows on a core.
        remat: As in `Model.compile`.
    """

    network: str
    tpu: str
    length: int
    rows: int
    remat: str | None = None

    @property
    def name(self) -> str:
        """What `--only` looks in."""
        return f"{self.network}, {self.rows} x {self.length}, remat={self.remat}, {self.tpu}"

    def model(self) -> tpufit.Model:
        """The compiled model, whose weights have no values."""
        llama = self.network == "Llama 1B"
        with torch.device("meta"):
            net: nn.Module = (
                huggingface("LlamaForCausalLM", **_LLAMA) if llama else GPT2(length=self.length, dropout=0.0)
            )
        model = tpufit.Model(net)
        options: dict[str, Any] = {"remat": self.remat, "precision": "bf16", "attention": "auto"}
        if llama:
            model.compile(torch.optim.AdamW(net.parameters()), "module", shard="fsdp", **options)
        else:
            model.compile(torch.optim.AdamW(net.parameters()), of_words, metrics=["accuracy"], **options)
        return model

    def compiled(self) -> dict[str, Any]:
        """The figures of a step."""
        words = torch.zeros(self.rows * 8, self.length, dtype=torch.long)
        x, y = ({"input_ids": words, "labels": words}, None) if self.network == "Llama 1B" else (words, words)
        report = self.model().preflight(x, y, batch_size=self.rows, tpu=self.tpu, verbose=0, timeout=3600.0)
        step = report.step
        found = {
            "fits": report.fits,
            "GiB": step.memory.total / 2**30,
            "temporaries_GiB": step.memory.temporaries / 2**30,
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
                "bound_by": report.bound,
                "tokens_per_second": report.rows_per_second * self.length,
                "share_of_peak": report.share_of_peak,
                "attention": sorted({how.partition(":")[0] for how in step.attention.values()}),
            }
        return asdict(self) | found


ROWS = [
    *(Row("GPT-2 small", "v5e-8", 1024, 8, remat) for remat in (None, "attention", "dots", "nothing")),
    Row("GPT-2 small", "v5e-8", 4096, 2),
    Row("Llama 1B", "v5e-8", 2048, 2, "dots"),
    Row("Llama 1B", "v5e-8", 2048, 4, "nothing"),
    Row("Llama 1B", "v6e-8", 2048, 4, "dots"),
    Row("Llama 1B", "v6e-8", 2048, 8, "nothing"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a part of the names of rows")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where they are kept (default: results/limits.json)")
    args = parser.parse_args()
    for row in ROWS:
        if args.only not in row.name:
            continue
        found = row.compiled()
        print(f"{row.name}: {json.dumps(found)}", flush=True)
        kept = json.loads(args.out.read_text()) if args.out.exists() else []
        others = [one for one in kept if {name: one[name] for name in asdict(row)} != asdict(row)]
        order = [asdict(each) for each in ROWS]
        args.out.write_text(
            json.dumps(
                sorted([*others, found], key=lambda one: order.index({name: one[name] for name in order[0]})), indent=1
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
