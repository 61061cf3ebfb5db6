"""Losses: PyTorch's, by name or as objects, one for a model or one for each output."""

from .build import LossArgument, build, required
from .by_output import LossByOutput, LossWeightsArgument
from .class_weight import ClassWeight
from .loss import NAMES, Loss
from .outputs import Output, check_form, described, output_name, part
from .weights import spread, weight_of
