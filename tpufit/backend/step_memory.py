"""`StepMemory`: the memory that a step needs on the device."""

from dataclasses import dataclass


@dataclass(frozen=True)
class StepMemory:
    """The memory that a step needs on the device. Sizes are in bytes on each core."""

    role: str
    rows: int  # over all cores
    cores: int
    weights: int  # parameters and buffers
    learns: int  # the parameters that get a gradient
    optimizer: int  # the optimizer's state, accumulated gradients and averages
    batch: int
    precision: str  # of `compile`
    split: bool = False  # True if weights and optimizer state are split over the cores
    remat: bool = False  # True if blocks keep only their inputs for the backward pass
