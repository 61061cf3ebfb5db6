"""Losses: one for a model, or one for each output."""

from .class_weight import ClassWeight
from .loss import NAMES, Loss, LossArgument, LossByOutput, LossWeightsArgument, build, required, spread, weight_of
from .outputs import Output, check_form, described, output_name, part

__all__ = [
    "NAMES",
    "ClassWeight",
    "Loss",
    "LossArgument",
    "LossByOutput",
    "LossWeightsArgument",
    "Output",
    "build",
    "check_form",
    "described",
    "output_name",
    "part",
    "required",
    "spread",
    "weight_of",
]
