"""Checkpoints: the state of training, written to disk and read back."""

from .directory import CheckpointDirectory
from .export import export
from .format import Checkpoint, Score, read, save
from .manager import CheckpointManager, outside_of_fit, restore, save_weights, take_checkpoint
from .resume import closing_runs, find_checkpoint, named_checkpoint
from .state import Progress, progress_of, saved_state
from .store import LocalStore
from .weight_files import read_weights, write_weights
from .writer import AsyncCheckpointWriter
