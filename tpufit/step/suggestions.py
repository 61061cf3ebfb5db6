"""`instead`: what a `tpufit.Model` has in the place of a method or attribute of `nn.Module` or `keras.Model`."""

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
    "add_loss": "return it from compute_loss: override that, and add to super().compute_loss(...)",
}


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
