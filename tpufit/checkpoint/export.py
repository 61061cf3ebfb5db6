"""`export`: a module as a program that plain PyTorch loads."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ..data.batches import as_tensors
from ..errors import ArgumentError
from ..hosts import is_first
from ..runtime import copies
from ..step import Engine
from ..step.arguments import arguments_of
from ..step.precision import inputs
from ..utils.copied import copied
from ..utils.files import replacing


def export(filepath: str | os.PathLike[str], engine: Engine, example: Any) -> None:
    """Write a program; see `Model.export`.

    Args:
        filepath: The path.
        engine: The engine of the model, whose module stays where and as it is.
        example: A batch of inputs.
    """
    target = Path(filepath)
    module = engine.model.module
    if target.suffix != ".pt2":
        raise ArgumentError(f"an exported program is a .pt2 file, got filepath={os.fspath(filepath)!r}")
    args, named = arguments_of(module, tree_map(_two_rows, inputs(engine.config.precision, as_tensors(example))))
    rows = torch.export.ShapesCollection()
    for leaf in tree_leaves((args, named)):
        if isinstance(leaf, Tensor) and leaf.dim():
            rows[leaf] = {0: torch.export.Dim("batch")}
    engine.state.write_back()
    own = list({id(t): t for t in (*module.parameters(), *module.buffers())}.values())
    with engine.noticing_loss():
        host = copies(own, "state")
    values = dict(zip(map(id, own), host, strict=True))
    try:
        net = copied(module, lambda tensor: values[id(tensor)])
        shapes = rows.dynamic_shapes(net, tuple(args), dict(named))
        program = torch.export.export(net, tuple(args), dict(named), dynamic_shapes=shapes)
    except (RuntimeError, ValueError, TypeError, AttributeError, AssertionError) as error:  # all that it raises
        raise ArgumentError(
            f"{type(module).__name__} can't be exported by torch.export, which takes no Python that depends on values, "
            f"and any number of rows. PyTorch says: {error}"
        ) from error
    if not is_first():  # of a pod only process 0 writes
        return
    with replacing(target) as draft, draft.open("wb") as file:
        torch.export.save(program, file)


def _two_rows(leaf: Any) -> Any:
    """Double a single row, which torch.export would take for the only size there is."""
    return torch.cat([leaf, leaf]) if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == 1 else leaf
