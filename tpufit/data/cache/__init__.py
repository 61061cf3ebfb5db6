"""`CachedDataset`: samples computed once and kept in files."""

from .dataset import CachedDataset
from .fingerprint import describe

__all__ = ["CachedDataset", "describe"]
