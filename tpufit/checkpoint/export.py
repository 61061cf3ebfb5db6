"""`export`: a module as a program that plain PyTorch loads, or as one of ONNX."""

import importlib.util
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_unflatten

from ..data.batches import as_tensors
from ..errors import ArgumentError
from ..hosts import is_first
from ..runtime import copies
from ..step import Engine
from ..step.arguments import arguments_of
from ..step.precision import inputs
from ..utils.copied import copied
from ..utils.files import replacing
from ..utils.text import size

# The largest message of protocol buffers, less room for the program itself.
_ONNX_HOLDS = 2_000_000_000


def export(filepath: str | os.PathLike[str], engine: Engine, example: Any) -> None:
    """Write a program for batches like the example, see `Model.export`. The module stays where and as it is."""
    target = Path(filepath)
    module = engine.model.module
    if target.suffix == ".tflite":
        raise ArgumentError(
            "LiteRT has a converter of its own, for the module on the host: "
            "litert_torch.convert(model.to_cpu().eval(), (example,)).export(filepath)"
        )
    if target.suffix not in (".pt2", ".onnx"):
        raise ArgumentError(f"an exported program is a .pt2 or .onnx file, got filepath={os.fspath(filepath)!r}")
    if target.suffix == ".onnx":
        _require_onnx(module)
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
    with replacing(target) as draft:
        if target.suffix == ".onnx":
            _write_onnx(program, draft)
            return
        with draft.open("wb") as file:
            torch.export.save(program, file)


def _require_onnx(module: nn.Module) -> None:
    """Raise an `ArgumentError` if ONNX can't be written here, or can't hold the module."""
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise ArgumentError(f"an .onnx file needs {' and '.join(missing)}: pip install 'tpufit[onnx]'")
    weights = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    if weights >= _ONNX_HOLDS:
        raise ArgumentError(
            f"an .onnx file holds less than 2 GB, and the weights are {size(weights)}: export a .pt2 file"
        )


def _write_onnx(program: torch.export.ExportedProgram, path: Path) -> None:
    """Write a program as one of ONNX, whose number of rows is called `batch`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the exporter's own making
            found: Any = torch.onnx.export(program, (), dynamo=True, verbose=False)
    except (torch.onnx.OnnxExporterError, RuntimeError) as error:
        raise ArgumentError(
            f"the program has an operation that ONNX lacks; a .pt2 file has it. PyTorch says: {error}"
        ) from error
    graph = found.model.graph
    rows = {str(value.shape[0]) for value in graph.inputs if value.shape is not None and len(value.shape)}
    for value in (*graph.inputs, *(output for node in graph for output in node.outputs)):
        for axis, length in enumerate(value.shape or ()):
            if not isinstance(length, int) and str(length) in rows:
                value.shape[axis] = "batch"
    names = _names_of_outputs(program)
    others = (*graph.inputs, *graph.initializers.values(), *(output for node in graph for output in node.outputs))
    if len(names) == len(graph.outputs) and not {value.name for value in others} & set(names):
        for value, name in zip(graph.outputs, names, strict=True):
            value.name = name
    found.save(path)


def _names_of_outputs(program: torch.export.ExportedProgram) -> list[str]:
    """The keys of the dict that a program returns, in the order of its outputs; none if it returns another nest."""
    spec = program.call_spec.out_spec
    nest = None if spec is None else tree_unflatten(range(spec.num_leaves), spec)
    if not isinstance(nest, Mapping) or not all(isinstance(at, int) for at in nest.values()):
        return []
    return [str(name) for name in sorted(nest, key=lambda name: nest[name])]


def _two_rows(leaf: Any) -> Any:
    """Double a single row, which torch.export would take for the only size there is."""
    return torch.cat([leaf, leaf]) if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == 1 else leaf
