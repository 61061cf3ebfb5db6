"""Makes one stream of global batches from any form of data. Nothing here needs a device."""

from .batches import unpack
from .cache import CachedDataset
from .images import ImageFolder, presize
from .pad_to_buckets import PadToBuckets
from .per_host import PerHost
from .sources import Compose, Transform
from .stream import Stream, stream, train_validation_split
from .texts import PackedDataset, TokenFile

__all__ = [
    "CachedDataset",
    "ImageFolder",
    "PackedDataset",
    "PadToBuckets",
    "PerHost",
    "Stream",
    "TokenFile",
    "presize",
    "stream",
    "train_validation_split",
    "unpack",
]
