"""`find_fault`: tries a batch on a module without values, to find errors before anything is compiled."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..data import unpack
from ..errors import TpufitError
from ..losses import find_targets
from ..utils.copy_module import copy_module
from ..utils.is_compiling import compiling
from ..utils.random import RNGState
from . import precision
from .engine import Engine
from .module_call import call
from .step_context import StepContext
from .step_methods import uses_default

# What the user's forward may raise only because tensors have no values.
_OF_FORWARD = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def find_fault(engine: Engine, batch: Any, transform: Callable[[Any], Any] | None) -> TpufitError | None:
    """Find the error that the evaluation of a batch would raise for its form, targets, shapes or labels.

    A copy of the module computes only shapes. A model that overrides the evaluation isn't tried.
    """
    model = engine.model
    loss = engine.config.loss
    kind: Any = type(model)
    if not uses_default(model, "test_step", "compute_loss", "__call__") or loss is None:
        return None
    before = RNGState.now()
    try:
        with warnings.catch_warnings(), torch.no_grad(), compiling(True):
            warnings.simplefilter("ignore")
            x, y, _ = unpack(batch)
            context = StepContext(labels=loss.label_range(find_targets(x, y)))
            batch = tree_map(_without_values, batch)
            x, y, sample_weight = unpack(batch if transform is None else transform(batch))
            y_pred = call(_copy_for_shapes(model.module), precision.cast_inputs(engine.config.precision, x))
            with engine.tracing(context):
                kind.compute_loss(model, x, y, y_pred, sample_weight)
    except TpufitError as error:
        return error
    except _OF_FORWARD:
        return None
    finally:
        before.restore()
    return None


def _without_values(leaf: Any) -> Any:
    return torch.empty_like(leaf, device="meta") if isinstance(leaf, Tensor) else leaf


def _copy_for_shapes(module: nn.Module) -> nn.Module:
    """Copy a module without values, and without hooks, which expect real steps."""
    copy = copy_module(module, _without_values)
    for part in copy.modules():
        vars(part)["_forward_hooks"].clear()
        vars(part)["_forward_pre_hooks"].clear()
    return copy
