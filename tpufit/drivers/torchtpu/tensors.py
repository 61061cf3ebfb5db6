"""The identity of a tensor's memory."""

from collections.abc import Hashable

from torch import Tensor

from ...runtime.aliases import storage_of


def handle_of(tensor: Tensor, storage: int | None = None) -> Hashable:
    """Return the identity of a tensor's memory, or of the same part of another storage."""
    base = storage_of(tensor) if storage is None else storage
    return base, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def on_tpu(tensor: Tensor) -> bool:
    """True for a tensor of TorchTPU's device."""
    return tensor.device.type == "tpu"
