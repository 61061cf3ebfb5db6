"""What to use in a `tpufit.Model` instead of a method, attribute or argument of `nn.Module`, Keras and others."""

from collections.abc import Callable, Mapping
from functools import wraps
from types import CodeType
from typing import Any, TypeVar, cast

from torch import nn

from ..errors import ArgumentError, join_few
from ..utils.user_code import warn

_MOVES = "fit, evaluate and predict move the module to the cores, and model.to_cpu() brings it back"
_MODES = "fit, evaluate and predict set the mode; within a step model(x, training=False) sets it for one call"
_PRECISION = "model.compile(..., precision='bf16') chooses the precision"
_LAYERS = "the layers are in model.module: list(model.module.children())"
_WEIGHTS = "model.parameters() are the weights, and model.get_weights() returns them as arrays"
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
    "loss": "compile sets the loss, and model.compute_loss(x, y, y_pred) computes it",
    **dict.fromkeys(
        ("get_config", "from_config", "to_json"), "a net is built by your own code, and model.save keeps its state"
    ),
    **dict.fromkeys(
        ("call", "build", "add_weight", "add_variable"), "layers are nn.Modules: parameters are made in __init__"
    ),
    "non_trainable_variables": _WEIGHTS,
    "make_train_function": "override train_step: fit traces and compiles it",
    "add_metric": "compile(metrics=...) takes metrics: names, functions and torchmetrics objects",
    "show_batch": "tpufit.show_batch(data) draws a batch of images",
    "show_top_losses": "tpufit.show_top_losses(model, data) draws the images with the largest losses",
    "losses": "compute_loss returns the sum of all terms of the loss",
    "add_loss": "override compute_loss, and return super().compute_loss(...) plus the term",
}
_SCHEDULE = "a schedule is a callback: fit(callbacks=[tpufit.callbacks.LRScheduler('cosine', warmup=0.05)])"
_OPTIMIZERS = (
    "pass it to the optimizer, compile(lambda parameters: torch.optim.AdamW(parameters, lr=0.001, weight_decay=0.1))"
)
_WORKERS = "a torch.utils.data.DataLoader has workers: fit(DataLoader(data, batch_size=32, num_workers=4))"
_ARGUMENTS = {
    **dict.fromkeys(("lr_schedule", "lr_scheduler", "scheduler", "warmup", "warmup_steps"), _SCHEDULE),
    **dict.fromkeys(("lr", "learning_rate", "weight_decay", "momentum"), _OPTIMIZERS),
    **dict.fromkeys(("workers", "num_workers", "use_multiprocessing", "max_queue_size"), _WORKERS),
    **dict.fromkeys(("gradient_accumulation_steps", "accumulate_grad_batches"), "compile(accumulate_steps=4) does it"),
    **dict.fromkeys(("mixed_precision", "dtype", "amp"), "compile(precision='bf16') chooses the precision"),
    "auto_scale_loss": "bfloat16 has the range of float32, so no loss needs scaling",
    "clipnorm": "compile(clip_norm=1.0) does it",
    "clipvalue": "compile(clip_value=1.0) does it",
    "global_clipnorm": "compile(global_clip_norm=1.0) does it",
    "max_epochs": "fit(epochs=10) trains for 10 epochs",
    # of callbacks
    "dirpath": "filepath is the path: ModelCheckpoint('runs/a') keeps a folder of checkpoints",
    "filename": "filepath is the path: ModelCheckpoint('runs/a/{epoch:02d}-{val_loss:.2f}.safetensors')",
    "save_top_k": "keep_best=3 keeps the three best checkpoints of a folder",
    "save_last": "a folder keeps the newest checkpoints: keep_last=3 says how many",
    **dict.fromkeys(
        ("every_n_epochs", "every_n_train_steps", "train_time_interval", "period", "save_every"),
        "save_freq is 'epoch', a number of training steps or a timedelta",
    ),
    "stopping_threshold": "a callback of your own can set self.model.stop_training = True in on_epoch_end",
    "check_finite": "TerminateOnNaN() ends training when the loss isn't finite",
}
# Hooks of Lightning and of transformers' callbacks that are never called here, and the hook to use instead.
_HOOKS = {
    "on_fit_start": "on_train_begin",
    "on_fit_end": "on_train_end",
    "on_train_start": "on_train_begin",
    "on_train_epoch_start": "on_epoch_begin",
    "on_train_epoch_end": "on_epoch_end",
    "on_epoch_start": "on_epoch_begin",
    "on_train_batch_start": "on_train_batch_begin",
    "on_batch_start": "on_train_batch_begin",
    "on_step_begin": "on_train_batch_begin",
    "on_step_end": "on_train_batch_end",
    "training_epoch_end": "on_epoch_end",
    "on_training_epoch_end": "on_epoch_end",
    "validation_epoch_end": "on_test_end",
    "test_epoch_end": "on_test_end",
    "on_evaluate": "on_test_end",
    "on_save_checkpoint": "state_dict",
    "on_load_checkpoint": "load_state_dict",
    **{
        f"on_{role}_{moment}": f"on_{'predict' if role == 'predict' else 'test'}_{hook}"
        for role in ("validation", "test", "predict")
        for moment, hook in (
            ("start", "begin"),
            ("end", "end"),
            ("epoch_start", "begin"),
            ("epoch_end", "end"),
            ("batch_start", "batch_begin"),
            ("batch_end", "batch_end"),
        )
    },
}
_CALLED = {"on_test_end", "on_predict_end", "on_test_batch_end", "on_predict_batch_end"}  # these exist here, too
_HOOKS = {name: hook for name, hook in _HOOKS.items() if name not in _CALLED}
_OF_STEPS = dict.fromkeys(
    ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step", "optimizer_step"),
    "Model.train_step, which does the whole update",
)
_METHODS = {
    "training_step": "train_step(self, batch)",
    "validation_step": "test_step(self, batch)",
    "configure_optimizers": "compile(optimizer=...)",
    "train_dataloader": "fit(data)",
    "val_dataloader": "fit(validation_data=...)",
    "forward": "the forward of the module that the model is made of",
    "call": "the forward of the module that the model is made of",
}
_STEPS = ("train_step", "test_step", "predict_step")
_F = TypeVar("_F", bound=Callable[..., Any])


def explain_arguments(method: _F) -> _F:
    """Decorate a method: an argument with another library's name raises a `TypeError` that says what to use instead.

    Any other unknown argument raises Python's error.

    Example:
        >>> @explain_arguments
        ... def compile(loss): ...
        >>> compile("mse", clipnorm=1.0)
        Traceback (most recent call last):
        TypeError: compile() has no argument 'clipnorm': compile(clip_norm=1.0) does it
    """

    @wraps(method)
    def explained(*args: Any, **named: Any) -> Any:
        for name in named:
            if name in _ARGUMENTS:
                called = method.__qualname__.split(".")[-2] if method.__name__ == "__init__" else method.__name__
                raise TypeError(f"{called}() has no argument {name!r}: {_ARGUMENTS[name]}")
        return method(*args, **named)

    return cast(_F, explained)


def warn_of_uncalled_methods(model: type, base: type) -> None:
    """Warn of methods with Lightning's names in a subclass of `Model`, which tpufit never calls.

    Raises:
        ArgumentError: A step takes more than a batch, as Lightning's steps do.
    """
    functions = _find_functions(model, base)
    for name in _STEPS:
        code = _code_of(functions.get(name))
        if code is not None and code.co_argcount - len(functions[name].__defaults__ or ()) > 2:
            raise ArgumentError(
                f"{model.__name__}.{name} must take (self, batch), got {code.co_varnames[: code.co_argcount]}: leave "
                "out the other arguments, such as the batch's number"
            )
    hooks = {name: f"a Callback with {hook}" for name, hook in _HOOKS.items()}
    _warn(model, functions, _METHODS | hooks | _OF_STEPS, "Model")


def warn_of_uncalled_hooks(callback: type, base: type) -> None:
    """Warn of hooks with other libraries' names in a class of callbacks, which tpufit never calls."""
    _warn(callback, _find_functions(callback, base), _HOOKS | _OF_STEPS, "Callback")


def _warn(kind: type, functions: Mapping[str, Any], instead: Mapping[str, str], base_name: str) -> None:
    # A method whose name occurs in the code of other methods of the class is called there.
    called = {name for function in functions.values() if (code := _code_of(function)) for name in code.co_names}
    uncalled = [f"{name} (use {instead[name]})" for name in functions if name in instead and name not in called]
    if uncalled:
        warn(f"tpufit never calls these methods of the {base_name} {kind.__name__}: {join_few(uncalled)}")


def _find_functions(kind: type, base: type) -> dict[str, Any]:
    """Return the functions that the classes below a base define, by name."""
    between = kind.__mro__[: kind.__mro__.index(base)] if base in kind.__mro__ else [kind]
    return {
        name: value for cls in reversed(between) for name, value in vars(cls).items() if _code_of(value) is not None
    }


def _code_of(function: Any) -> CodeType | None:
    code = getattr(function, "__code__", None)
    return code if isinstance(code, CodeType) else None


def suggestion_for(name: str) -> str | None:
    """Return a sentence that says what to use instead of a missing method or attribute, or None.

    Example:
        >>> print(suggestion_for("children"))
        a tpufit.Model isn't an nn.Module, but has one: use model.module.children
    """
    if name in _INSTEAD:
        return _INSTEAD[name]
    known = not name.startswith("_") and hasattr(nn.Module, name)
    return f"a tpufit.Model isn't an nn.Module, but has one: use model.module.{name}" if known else None
