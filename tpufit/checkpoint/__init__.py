"""The state of training on disk, and back."""

from .directory import Checkpoint, CheckpointDirectory, LocalStore, Score, read, save
from .manager import CheckpointManager, Progress, outside_of_fit, progress_of, restore, saved_state, take
from .resume import find_checkpoint, named_checkpoint
from .weights import first_broken, read_weights, write_weights
from .writer import AsyncCheckpointWriter

__all__ = [
    "AsyncCheckpointWriter",
    "Checkpoint",
    "CheckpointDirectory",
    "CheckpointManager",
    "LocalStore",
    "Progress",
    "Score",
    "find_checkpoint",
    "first_broken",
    "named_checkpoint",
    "outside_of_fit",
    "progress_of",
    "read",
    "read_weights",
    "restore",
    "save",
    "saved_state",
    "take",
    "write_weights",
]
