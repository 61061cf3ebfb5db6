"""The identity of a tensor's memory."""

from collections.abc import Hashable

from torch import Tensor

from ...runtime.aliases import identify_storage


def handle_of(tensor: Tensor) -> Hashable:
    """Return the identity of a tensor's memory."""
    return identify_storage(tensor), place_of(tensor)


def place_of(tensor: Tensor) -> Hashable:
    """Return the identity of the part of its storage that a tensor shows."""
    return tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def on_tpu(tensor: Tensor) -> bool:
    """True for a tensor of TorchTPU's device."""
    return tensor.device.type == "tpu"
