"""What goes in: one stream of global batches from whatever data a user has. Nothing here needs a device."""

from .batches import unpack
from .buckets import PadToBuckets
from .cache import CachedDataset
from .presize import ImageFolder, presize
from .stream import Stream, hold_out, stream

__all__ = ["CachedDataset", "ImageFolder", "PadToBuckets", "Stream", "hold_out", "presize", "stream", "unpack"]
