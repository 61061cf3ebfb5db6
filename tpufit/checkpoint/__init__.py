"""The state of training on disk, and back."""

from .directory import Checkpoint, CheckpointDirectory, LocalStore, Score, read, save
from .json_codec import is_plain
from .manager import CheckpointManager, Progress, find_checkpoint, named_checkpoint, outside_of_fit, progress_of
from .training_state import begin_anew, check_weights, put_back, take
from .weights import first_broken, match_weights, named_tensors, read_weights, write_weights
from .writer import AsyncCheckpointWriter

__all__ = [
    "AsyncCheckpointWriter",
    "Checkpoint",
    "CheckpointDirectory",
    "CheckpointManager",
    "LocalStore",
    "Progress",
    "Score",
    "begin_anew",
    "check_weights",
    "find_checkpoint",
    "first_broken",
    "is_plain",
    "match_weights",
    "named_checkpoint",
    "named_tensors",
    "outside_of_fit",
    "progress_of",
    "put_back",
    "read",
    "read_weights",
    "save",
    "take",
    "write_weights",
]
