"""`CachedDataset`: samples computed once and stored in files."""

from .dataset import CachedDataset
from .fingerprint import fingerprint

__all__ = ["CachedDataset", "fingerprint"]
