"""What goes in: one stream of global batches from whatever data a user has. Nothing here needs a device."""

from .batches import Stream, hold_out, stream, unpack

__all__ = ["Stream", "hold_out", "stream", "unpack"]
