"""Preconditions of training and evaluation: a compiled model, gradients, weights that learn, a single schedule."""

from collections.abc import Sequence

import torch

from .. import losses
from ..errors import ArgumentError, NotCompiledError, join_few
from ..step import Engine
from ..step.step_methods import uses_default


def require_compiled(engine: Engine, method: str) -> None:
    """Check that the model has the optimizer and the loss that a method needs; the error names the method.

    Raises:
        NotCompiledError: `compile` wasn't called; or it got no loss, and the model overrides neither the method's step
            nor `compute_loss`.
    """
    if not engine.compiled:
        raise NotCompiledError(
            f"{method} needs a compiled model: call model.compile(optimizer='adamw', loss='cross_entropy') first"
        )
    step = "test_step" if method in ("evaluate", "test_on_batch") else "train_step"
    if uses_default(engine.model, step, "compute_loss"):
        losses.require_loss(engine.config.loss, method)


def require_gradients(method: str) -> None:
    """Check that PyTorch computes gradients, which a method needs; the error names the method.

    Raises:
        ArgumentError: Gradients are switched off.
    """
    if not torch.is_grad_enabled():
        raise ArgumentError(f"{method} was called under torch.no_grad() or torch.inference_mode(): call it outside")


def require_learning(engine: Engine) -> None:
    """Check that an optimizer has the module's new parameters, and that a peft model has adapters that learn.

    Any other module may have no weights that learn, as in Keras.

    Raises:
        ArgumentError: A layer was added after `compile`, and no optimizer has its parameters; or all weights of a peft
            model are frozen.
    """
    module = engine.model.module
    added = engine.state.untrained.find_added(engine.state.list_every_optimizer())
    if added:
        layer = added[0].rpartition(".")[0] or "..."
        raise ArgumentError(
            f"{join_few(added)} were added to the module after compile, and no optimizer has them: they would not "
            "learn. Call compile again, or model.optimizer.add_param_group({'params': "
            f"model.module.get_submodule({layer!r}).parameters()}}); or freeze them with requires_grad_(False)"
        )
    if any(p.requires_grad for p in module.parameters()) or not any(
        hasattr(m, "peft_config") for m in module.modules()
    ):
        return
    raise ArgumentError(
        "this peft model has no weight that learns: load adapters with PeftModel.from_pretrained(..., "
        "is_trainable=True), or add adapters with get_peft_model(...), and freeze nothing afterwards"
    )


def require_one_schedule(callbacks: Sequence[object]) -> None:
    """Check that at most one callback sets the rate of each step.

    Raises:
        ArgumentError: Two callbacks do, so the later would silently win.
    """
    names = [type(callback).__name__ for callback in callbacks if getattr(callback, "sets_each_step", False)]
    if len(names) > 1:
        raise ArgumentError(
            f"{' and '.join(names)} each set the rate of every step, and the last would win: pass one of them"
        )
