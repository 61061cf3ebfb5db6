"""Draws the report of a real preflight, of a small GPT for a v5e-8: `python docs/pictures/preflight.py`."""

from __future__ import annotations

import torch
from looks import save
from torch import nn

import tpufit


class GPT(nn.Module):
    """A decoder of four layers that predicts the next of 8,192 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(8192, 512), nn.Embedding(256, 512)
        layer = nn.TransformerEncoderLayer(512, 8, 2048, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(512, 8192, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        h = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        return self.head(self.layers(h, mask, is_causal=True)).movedim(-1, 1)


if __name__ == "__main__":
    model = tpufit.Model(GPT())
    model.compile("adamw", "cross_entropy", precision="bf16")
    x = torch.zeros(2048, 256, dtype=torch.long)
    report = model.preflight(x, x, batch_size=256, tpu="v5e-8")
    print(report)
    save("preflight-{}.png", lambda look: report.plot())
