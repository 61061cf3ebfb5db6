"""Checkpoints: writes the state of training to disk, and reads it."""

from .directory import CheckpointDirectory
from .export import export
from .find_checkpoint import closing_new_runs, find_checkpoint, read_checkpoint_at
from .format import Checkpoint, Score, read, save
from .manager import CheckpointManager, make_state_outside_fit, restore, save_weights, take_checkpoint
from .state_json import Progress, extract_saved_state, read_progress
from .store import LocalStore
from .weight_files import read_weights, write_weights
from .writer import AsyncCheckpointWriter
