"""`Load`: what a step needs of the device."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Load:
    """The load of a step on the device. Sizes are in bytes on each core."""

    role: str
    rows: int  # over all cores
    cores: int
    weights: int  # parameters and buffers
    learns: int  # the parameters that get a gradient
    optimizer: int  # its state, accumulated gradients and averages
    batch: int
    precision: str  # of `compile`
    split: bool = False  # are weights and optimizer state split over the cores?
    remat: bool = False  # do blocks keep their inputs alone for the backward pass?
