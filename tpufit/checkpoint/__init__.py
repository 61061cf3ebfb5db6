"""The state of training on disk, and back."""

from .directory import Checkpoint, CheckpointDirectory, LocalStore, Score, read, save
from .manager import CheckpointManager, Progress, outside_of_fit, progress_of, restore, saved_state, take
from .resume import find_checkpoint, named_checkpoint
from .weights import first_broken, read_weights, write_weights
from .writer import AsyncCheckpointWriter
