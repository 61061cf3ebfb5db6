"""Losses: PyTorch's, by name or as objects, one for a model or one for each output."""

from .averages import NOTHING, Averages, LossWatch, Mean, Weight, mean_of
from .build import AnyLoss, LossArgument, build, required
from .by_output import LossByOutput, LossWeightsArgument, SharedLoss
from .class_weight import ClassWeight
from .loss import NAMES, Loss
from .module_loss import ModuleLoss
from .outputs import Output, aligned, check_form, count_targets, described, logits_of, output_name, pick, targets_of
from .sample_weights import spread, weight_of
