"""`load`: a model as `Model.save` or a `ModelCheckpoint` left it, around a net that you have built anew."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from .checkpoint import check_weights, named_checkpoint, named_tensors, put_back
from .errors import CheckpointMismatchError
from .model import Model
from .optimizers import NAMES


def load(path: str | os.PathLike[str], net: nn.Module, compile: bool = True) -> Model:
    """A model with the weights, the optimizer and the arguments of `compile` that it was saved with.

    A checkpoint holds no code: the net is yours. Arguments of `compile` that are objects, such as a loss module or a
    metric, can't be in it either. The model is then not compiled: call `compile` as before, and `fit(resume=path)`
    goes on with the optimizer's state too.

    Args:
        path: What `Model.save` wrote, or a `ModelCheckpoint`'s folder, of which the newest is taken.
        net: A module of the same architecture; its weights are overwritten.
        compile: Whether to compile the model if that is possible (default True).

    Returns:
        The model, on the host.

    Raises:
        CheckpointMissingError, CheckpointDamagedError: There is nothing to load, or a file isn't what was written.
        CheckpointMismatchError: It is of another net; the message names what differs. The net is as it was.

    Example:
        >>> import tempfile, torch, tpufit
        >>> from torch import nn
        >>> model = tpufit.Model(nn.Linear(2, 1))
        >>> model.compile("adamw", "mse")
        >>> history = model.fit(torch.ones(4, 2), torch.ones(4, 1), verbose=0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model.save(f"{folder}/model")
        ...     again = tpufit.load(f"{folder}/model", nn.Linear(2, 1))
        >>> bool((again.predict(torch.ones(1, 2), verbose=0) == model.predict(torch.ones(1, 2), verbose=0)).all())
        True

    Source: `keras.saving.load_model`.
    """
    checkpoint = named_checkpoint(path)
    model = Model(net)
    recipe = checkpoint.state.get("compile") if compile else None
    if recipe is not None:
        if recipe["precision"] != "bf16-true":  # which changes the net's dtypes first
            check_weights(named_tensors(net), checkpoint.weights)
        model.compile(optimizer=lambda parameters: _rebuilt(net, checkpoint.state["optimizers"]["optimizer"]), **recipe)
        model.to_cpu()
        put_back(model, checkpoint)
    else:
        check_weights(named_tensors(net), checkpoint.weights, dtypes=False)
        model.load_state_dict(checkpoint.weights)
    return model


def _rebuilt(net: nn.Module, options: Mapping[str, Any]) -> Optimizer:
    """An optimizer of PyTorch's with the same groups and options."""
    parameters = dict(net.named_parameters())
    unknown = [name for group in options["groups"] for name in group["params"] if name not in parameters]
    if unknown:
        raise CheckpointMismatchError(f"the checkpoint's optimizer has parameters that the net lacks: {unknown[:8]}")
    groups = [{**group, "params": [parameters[name] for name in group["params"]]} for group in options["groups"]]
    kind: Any = NAMES[options["class"].lower()]
    optimizer: Optimizer = kind(groups)
    return optimizer
