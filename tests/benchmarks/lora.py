"""A Llama of 1.2 billion weights with LoRA on one core of a v5e, by the length of its texts.

The net is transformers' Llama 3.2 1B, in bfloat16, on the meta device, with peft's adapters of rank 16 on all
projections of a block. AdamW, bf16, one row per core; the longest texts also with `remat`. Compiling all 16 blocks
takes more than 22 GB of the host's memory, so networks of 2 and of 4 blocks are compiled, and the figures of 16 equal
blocks are extrapolated.

    nice python tests/benchmarks/lora.py          # prints a line for each compilation, one to three minutes each

results/lora.json contains the printed lines.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import nn

import tpufit

SLICE, WORDS = "v5e-1", 128256
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapted(length: int, blocks: int) -> nn.Module:
    """Some blocks of Llama 3.2 1B with adapters, without values."""
    import peft
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=blocks,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=length,
        tie_word_embeddings=True,
        use_cache=False,
    )
    lora = peft.LoraConfig(r=16, target_modules=PROJECTIONS, task_type="CAUSAL_LM")
    with torch.device("meta"):
        return peft.get_peft_model(transformers.LlamaForCausalLM(config).to(torch.bfloat16), lora)


def compiled(length: int, blocks: int, remat: str | None) -> dict[str, Any]:
    """Return the figures of a training step."""
    model = tpufit.Model(adapted(length, blocks))
    model.compile("adamw", "module", precision="bf16", remat=remat)
    words = torch.zeros(2, length, dtype=torch.long)
    report = model.preflight({"input_ids": words, "labels": words}, batch_size=1, tpu=SLICE, verbose=0)
    memory = report.step.memory.total / 2**30
    cycles = report.step.cost.cycles / 1e6
    return {"length": length, "remat": remat, "blocks": blocks, "GiB": memory, "million_cycles": cycles}


if __name__ == "__main__":
    plain = [(length, None) for length in (1024, 2048, 4096, 8192)]
    for length, remat in [*plain, (8192, "dots"), (8192, "nothing"), (16384, "dots"), (16384, "nothing")]:
        two, four = compiled(length, 2, remat), compiled(length, 4, remat)
        sixteen = {key: four[key] + 6 * (four[key] - two[key]) for key in ("GiB", "million_cycles")}
        for row in (two, four, two | {"blocks": 16} | sixteen | {"extrapolated": True}):
            print(json.dumps(row), flush=True)
