"""What a `tpufit.Model` has in the place of a method, attribute or argument of `nn.Module`, Keras and others."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from torch import nn

_MOVES = "fit, evaluate and predict move the module to the cores, and model.to_cpu() brings it back"
_MODES = "fit, evaluate and predict set the mode; within a step model(x, training=False) does for one call"
_PRECISION = "model.compile(..., precision='bf16') chooses the precision"
_LAYERS = "the layers are in model.module: list(model.module.children())"
_WEIGHTS = "model.parameters() are the weights, and model.get_weights() gives arrays of them"
_INSTEAD = {
    **dict.fromkeys(("to", "cuda", "cpu", "xpu"), _MOVES),
    **dict.fromkeys(("train", "eval", "training"), _MODES),
    **dict.fromkeys(("half", "bfloat16", "double", "float"), _PRECISION),
    **dict.fromkeys(("layers", "get_layer"), _LAYERS),
    **dict.fromkeys(("weights", "variables", "trainable_variables"), _WEIGHTS),
    "trainable_weights": "[p for p in model.parameters() if p.requires_grad] are the weights that learn",
    "non_trainable_weights": "[p for p in model.parameters() if not p.requires_grad] are the weights that don't learn",
    "trainable": "model.module.requires_grad_(False) freezes the weights",
    "zero_grad": "model.apply_gradients(loss) sets the gradients to zero, computes them, and takes a step",
    "step": "model.apply_gradients(loss) takes a step of the optimizer, and fit calls train_step",
    "forward": "model(x) or model.module(x) computes the outputs",
    "loss": "the loss is that of compile, and model.compute_loss(x, y, y_pred) computes it",
    **dict.fromkeys(
        ("get_config", "from_config", "to_json"), "a net is built by your own code, and model.save keeps its state"
    ),
    **dict.fromkeys(
        ("call", "build", "add_weight", "add_variable"), "layers are nn.Modules: parameters are made in __init__"
    ),
    "non_trainable_variables": _WEIGHTS,
    "make_train_function": "override train_step: fit traces and compiles it",
    "add_metric": "compile(metrics=...) takes metrics, also functions and torchmetrics objects",
    "losses": "return every term of the loss from compute_loss",
    "add_loss": "return it from compute_loss: override that, and add to super().compute_loss(...)",
}
_SCHEDULE = "a schedule is a callback: fit(callbacks=[tpufit.callbacks.LRScheduler('cosine', warmup=0.05)])"
_OPTIMIZERS = (
    "it is the optimizer's: compile(lambda parameters: torch.optim.AdamW(parameters, lr=0.001, weight_decay=0.1))"
)
_WORKERS = "a torch.utils.data.DataLoader has workers: fit(DataLoader(data, batch_size=32, num_workers=4))"
_ARGUMENTS = {
    **dict.fromkeys(("lr_schedule", "lr_scheduler", "scheduler", "warmup", "warmup_steps"), _SCHEDULE),
    **dict.fromkeys(("lr", "learning_rate", "weight_decay", "momentum"), _OPTIMIZERS),
    **dict.fromkeys(("workers", "num_workers", "use_multiprocessing", "max_queue_size"), _WORKERS),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulate_grad_batches"), "compile(accumulate_steps=4) does it"),
    **dict.fromkeys(("mixed_precision", "dtype", "amp"), "compile(precision='bf16') chooses the precision"),
    "auto_scale_loss": "bfloat16 has the range of float32, so that no loss needs to be scaled",
    "clipnorm": "compile(clip_norm=1.0) does it",
    "clipvalue": "compile(clip_value=1.0) does it",
    "global_clipnorm": "compile(global_clip_norm=1.0) does it",
    "max_epochs": "fit(epochs=10) trains for 10 epochs",
}
_F = TypeVar("_F", bound=Callable[..., Any])


def explaining(method: _F) -> _F:
    """Say what to use instead of an argument that others have, when a method is given it: a `TypeError`, as Python's.

    Any other argument that the method doesn't have is Python's own error.

    Example:
        >>> @explaining
        ... def compile(loss): ...
        >>> compile("mse", clipnorm=1.0)
        Traceback (most recent call last):
        TypeError: compile() has no argument 'clipnorm': compile(clip_norm=1.0) does it
    """

    @wraps(method)
    def explained(*args: Any, **named: Any) -> Any:
        for name in named:
            if name in _ARGUMENTS:
                raise TypeError(f"{method.__name__}() has no argument {name!r}: {_ARGUMENTS[name]}")
        return method(*args, **named)

    return cast(_F, explained)


def suggestion_for(name: str) -> str | None:
    """Return the sentence that says what to use instead of a method or attribute; None if nobody would look for it.

    Example:
        >>> suggestion_for("children")
        'a tpufit.Model is no nn.Module but has one: model.module.children'
    """
    if name in _INSTEAD:
        return _INSTEAD[name]
    known = not name.startswith("_") and hasattr(nn.Module, name)
    return f"a tpufit.Model is no nn.Module but has one: model.module.{name}" if known else None
