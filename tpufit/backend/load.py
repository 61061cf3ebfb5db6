"""`Load`: what a step needs of the device."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Load:
    """The load of a step on the device. Sizes are in bytes on each core.

    Attributes:
        role: `"train"`, `"eval"` or `"predict"`.
        rows: The number of its rows, over all cores.
        cores: The number of cores that shared them.
        weights: The size of parameters and buffers.
        learns: The size of the parameters that get a gradient.
        optimizer: The size of the optimizer's state, accumulated gradients and averages.
        batch: The size of the batches.
        precision: The `precision` of `compile`.
        split: True if weights and optimizer state are split over the cores (default False).
        remat: True if blocks keep their inputs alone for the backward pass (default False).
    """

    role: str
    rows: int
    cores: int
    weights: int
    learns: int
    optimizer: int
    batch: int
    precision: str
    split: bool = False
    remat: bool = False
