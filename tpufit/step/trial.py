"""`fault_of`: tries a batch on a module without values, to find what is wrong with it before anything is compiled."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..data import unpack
from ..errors import TpufitError
from ..losses import targets_of
from ..utils.compiling import compiling
from ..utils.copied import copied
from ..utils.random import RNGState
from . import precision
from .arguments import call
from .context import StepContext
from .engine import Engine
from .methods import is_usual

# What the user's forward may raise on tensors without values, and only there.
_OF_FORWARD = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def fault_of(engine: Engine, batch: Any, transform: Callable[[Any], Any] | None) -> TpufitError | None:
    """Find the error that an evaluation of a batch would raise: of its form, targets, shapes or labels.

    A copy of the module computes shapes only. A model whose own Python makes the evaluation isn't tried.
    """
    model = engine.model
    loss = engine.config.loss
    kind: Any = type(model)
    if not is_usual(model, "test_step", "compute_loss", "__call__") or loss is None:
        return None
    before = RNGState.now()
    try:
        with warnings.catch_warnings(), torch.no_grad(), compiling(True):
            warnings.simplefilter("ignore")
            x, y, _ = unpack(batch)
            context = StepContext(labels=loss.label_range(targets_of(x, y)))
            batch = tree_map(_without_values, batch)
            x, y, sample_weight = unpack(batch if transform is None else transform(batch))
            y_pred = call(_shapes_only(model.module), precision.inputs(engine.config.precision, x))
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


def _shapes_only(module: nn.Module) -> nn.Module:
    """A copy of a module without values, and without the hooks that are to see it run in earnest."""
    copy = copied(module, _without_values)
    for part in copy.modules():
        vars(part)["_forward_hooks"].clear()
        vars(part)["_forward_pre_hooks"].clear()
    return copy
