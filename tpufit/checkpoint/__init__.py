"""Checkpoints: the state of training, written to disk and read back."""

from .directory import CheckpointDirectory
from .export import export
from .format import Checkpoint, Score, read, save
from .manager import (
    CheckpointManager,
    Progress,
    outside_of_fit,
    progress_of,
    restore,
    save_weights,
    saved_state,
    take_checkpoint,
)
from .resume import find_checkpoint, named_checkpoint
from .store import LocalStore
from .weight_files import read_weights, write_weights
from .writer import AsyncCheckpointWriter
