"""Callbacks: Keras's, working on any number of cores at no cost per step."""

from .base import Callback
from .dispatch import CallbackList
from .early_stopping import EarlyStopping
from .history import History
from .model_checkpoint import ModelCheckpoint
from .progress import ProgbarLogger
from .tensorboard import TensorBoard

__all__ = [
    "Callback",
    "CallbackList",
    "EarlyStopping",
    "History",
    "ModelCheckpoint",
    "ProgbarLogger",
    "TensorBoard",
]
