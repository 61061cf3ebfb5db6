"""`nn.TransformerEncoder` with padding, in evaluation.

On the host, PyTorch computes it on nested tensors, so the last layer's output is zero at padded positions. XLA has no
nested tensors, and PyTorch's check of the mask would read values from the device.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def replace_encoder() -> Iterator[None]:
    """A context in which `nn.TransformerEncoder` sets padded positions to zero where PyTorch does so on the host."""
    native = nn.TransformerEncoder.forward

    def forward(
        self: nn.TransformerEncoder,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        if src_key_padding_mask is None or mask is not None or not _would_nest(self, src):
            layers = copy.copy(self)
            layers.use_nested_tensor = False
            return native(layers, src, mask, src_key_padding_mask, is_causal)
        padded = src_key_padding_mask != 0
        if getattr(self, "mask_check", True):  # modules saved by an old PyTorch lack it
            # With gaps, PyTorch uses no nested tensors.
            padded = padded & ~(padded[:, :-1] & ~padded[:, 1:]).any()
        if src_key_padding_mask.is_floating_point():
            src_key_padding_mask = src_key_padding_mask.masked_fill(padded, float("-inf"))
        output = src
        for layer in self.layers:
            output = layer(output, src_key_padding_mask=src_key_padding_mask)
        output = torch.where(padded[..., None], torch.zeros_like(output), output)
        return output if self.norm is None else self.norm(output)

    nn.TransformerEncoder.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.TransformerEncoder.forward = native  # type: ignore[method-assign]


def _would_nest(encoder: nn.TransformerEncoder, src: Tensor) -> bool:
    """True if PyTorch would use nested tensors on the host for padding without gaps. The conditions are its own."""
    first = encoder.layers[0]
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (src, *first.parameters()))
    usable = torch.backends.mha.get_fastpath_enabled() and not torch.is_autocast_enabled()
    nests = getattr(encoder, "use_nested_tensor", False)
    return usable and nests and not first.training and src.dim() == 3 and not learns
