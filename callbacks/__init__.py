"""Keras's callbacks, on any number of cores, at no cost per step."""

from .backup_and_restore import BackupAndRestore
from .base import Callback
from .callback_list import CallbackList
from .comet_logger import CometLogger
from .confusion_matrix import ConfusionMatrix
from .csv_logger import CSVLogger
from .diagnostics import Diagnostics
from .early_stopping import EarlyStopping
from .freeze import Freeze
from .history import History
from .lambda_callback import LambdaCallback
from .learning_rate_scheduler import LearningRateScheduler
from .lr_scheduler import LRScheduler
from .mlflow_logger import MLflowLogger
from .model_checkpoint import ModelCheckpoint
from .monitor_callback import MonitorCallback
from .one_cycle import OneCycle
from .progbar_logger import ProgbarLogger
from .reduce_lr_on_plateau import ReduceLROnPlateau
from .remote_monitor import RemoteMonitor
from .swap_ema_weights import SwapEMAWeights
from .tensorboard import TensorBoard
from .terminate_on_nan import TerminateOnNaN
from .trackio_logger import TrackioLogger
from .wandb_logger import WandbLogger

__all__ = [
    "BackupAndRestore",
    "CSVLogger",
    "Callback",
    "CallbackList",
    "CometLogger",
    "ConfusionMatrix",
    "Diagnostics",
    "EarlyStopping",
    "Freeze",
    "History",
    "LRScheduler",
    "LambdaCallback",
    "LearningRateScheduler",
    "MLflowLogger",
    "ModelCheckpoint",
    "MonitorCallback",
    "OneCycle",
    "ProgbarLogger",
    "ReduceLROnPlateau",
    "RemoteMonitor",
    "SwapEMAWeights",
    "TensorBoard",
    "TerminateOnNaN",
    "TrackioLogger",
    "WandbLogger",
]
