"""PyTorch's losses, by name or as objects: one for a model, or one for each output."""

from .averages import NOTHING, Averages, LossWatch, Mean, Weight, weighted_mean
from .build import AnyLoss, LossArgument, build, require_loss
from .by_output import LossByOutput, LossWeightsArgument, SharedLoss
from .class_weight import ClassWeight, make_class_weight
from .elementwise import log_cosh, percentage_error, squared_log_error
from .loss import NAMES, Loss
from .module_loss import ModuleLoss
from .outputs import (
    Output,
    align,
    check_form,
    count_targets,
    describe_nest,
    extract_logits,
    find_targets,
    output_name,
    pick,
    to_path,
)
from .sample_weights import pick_weight, spread_weights
