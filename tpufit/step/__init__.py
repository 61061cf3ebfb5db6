"""One step of training, testing or predicting: its Python, its state, and how it is run."""

from .recompiles import ShapeWatch
from .runner import DeviceBatch, StepRunner, Steps, copies, fetch
from .snapshot import Snapshot

__all__ = ["DeviceBatch", "ShapeWatch", "Snapshot", "StepRunner", "Steps", "copies", "fetch"]
