"""Callbacks: Keras's, working on any number of cores at no cost per step."""

from .base import Callback
from .diagnostics import Diagnostics
from .dispatch import CallbackList
from .early_stopping import EarlyStopping
from .history import History
from .learning_rate_scheduler import LearningRateScheduler
from .model_checkpoint import ModelCheckpoint
from .one_cycle import OneCycle
from .profiler import Profiler
from .progress import ProgbarLogger
from .reduce_lr_on_plateau import ReduceLROnPlateau
from .swap_ema_weights import SwapEMAWeights
from .tensorboard import TensorBoard
from .torch_scheduler import TorchScheduler

__all__ = [
    "Callback",
    "CallbackList",
    "Diagnostics",
    "EarlyStopping",
    "History",
    "LearningRateScheduler",
    "ModelCheckpoint",
    "OneCycle",
    "Profiler",
    "ProgbarLogger",
    "ReduceLROnPlateau",
    "SwapEMAWeights",
    "TensorBoard",
    "TorchScheduler",
]
