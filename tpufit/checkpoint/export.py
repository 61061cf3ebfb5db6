"""`export`: exports a module as a program for plain PyTorch or ONNX."""

import importlib.util
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_unflatten

from ..data.to_tensors import as_tensors
from ..errors import ArgumentError
from ..hosts import is_first
from ..runtime import copy_to_host
from ..step import Engine
from ..step.module_call import make_arguments
from ..step.precision import cast_inputs
from ..utils.copy_module import copy_module
from ..utils.files import replacing
from ..utils.text import format_bytes

# The largest protocol buffer message, less room for the program.
_ONNX_LIMIT = 2_000_000_000


def export(filepath: str | os.PathLike[str], engine: Engine, example: Any) -> None:
    """Write a program for batches like the example, see `Model.export`. The module doesn't change."""
    target = Path(filepath)
    module = engine.model.module
    if target.suffix == ".tflite":
        raise ArgumentError(
            "model.export writes no .tflite file, because LiteRT has its own converter: "
            "litert_torch.convert(model.to_cpu().eval(), (example,)).export(filepath)"
        )
    if target.suffix not in (".pt2", ".onnx"):
        raise ArgumentError(f"an exported program is a .pt2 or .onnx file, got filepath={os.fspath(filepath)!r}")
    if target.suffix == ".onnx":
        _require_onnx(module)
    batch = cast_inputs(engine.config.precision, as_tensors(example))
    args, named = make_arguments(module, tree_map(_double_single_row, batch))
    rows = torch.export.ShapesCollection()
    for leaf in tree_leaves((args, named)):
        if isinstance(leaf, Tensor) and leaf.dim():
            rows[leaf] = {0: torch.export.Dim("batch")}
    engine.state.write_back()
    tensors = list({id(t): t for t in (*module.parameters(), *module.buffers())}.values())
    with engine.translating_device_errors():
        host = copy_to_host(tensors, "state")
    values = dict(zip(map(id, tensors), host, strict=True))
    try:
        net = copy_module(module, lambda tensor: values[id(tensor)])
        shapes = rows.dynamic_shapes(net, tuple(args), dict(named))
        program = torch.export.export(net, tuple(args), dict(named), dynamic_shapes=shapes)
    except (RuntimeError, ValueError, TypeError, AttributeError, AssertionError) as error:  # all errors of torch.export
        raise ArgumentError(
            f"{type(module).__name__} can't be exported by torch.export, which traces for any number of rows, and "
            f"allows no Python that depends on values. PyTorch says: {error}"
        ) from error
    if not is_first():  # on a pod only process 0 writes
        return
    with replacing(target) as draft:
        if target.suffix == ".onnx":
            _write_onnx(program, draft)
            return
        with draft.open("wb") as file:
            torch.export.save(program, file)


def _require_onnx(module: nn.Module) -> None:
    """Raise an `ArgumentError` if ONNX isn't installed, or the module is too large for it."""
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise ArgumentError(f"an .onnx file needs {' and '.join(missing)}: pip install 'tpufit[onnx]'")
    weights = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    if weights >= _ONNX_LIMIT:
        raise ArgumentError(
            f"an .onnx file can't be larger than 2 GB, but the weights take {format_bytes(weights)}: export a .pt2 file"
        )


def _write_onnx(program: torch.export.ExportedProgram, path: Path) -> None:
    """Write a program in ONNX, with the number of rows named `batch`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the exporter's internals
            exported: Any = torch.onnx.export(program, (), dynamo=True, verbose=False)
    except (torch.onnx.OnnxExporterError, RuntimeError) as error:
        raise ArgumentError(
            f"the program has an operation that ONNX lacks; a .pt2 file has it. PyTorch says: {error}"
        ) from error
    graph = exported.model.graph
    rows = {str(value.shape[0]) for value in graph.inputs if value.shape is not None and len(value.shape)}
    for value in (*graph.inputs, *(output for node in graph for output in node.outputs)):
        for axis, length in enumerate(value.shape or ()):
            if not isinstance(length, int) and str(length) in rows:
                value.shape[axis] = "batch"
    names = _name_outputs(program)
    others = (*graph.inputs, *graph.initializers.values(), *(output for node in graph for output in node.outputs))
    if len(names) == len(graph.outputs) and not {value.name for value in others} & set(names):
        for value, name in zip(graph.outputs, names, strict=True):
            value.name = name
    exported.save(path)


def _name_outputs(program: torch.export.ExportedProgram) -> list[str]:
    """Return the keys of the dict that a program returns, in the order of its outputs; empty for another nest."""
    spec = program.call_spec.out_spec
    nest = None if spec is None else tree_unflatten(range(spec.num_leaves), spec)
    if not isinstance(nest, Mapping) or not all(isinstance(at, int) for at in nest.values()):
        return []
    return [str(name) for name in sorted(nest, key=lambda name: nest[name])]


def _double_single_row(leaf: Any) -> Any:
    """Double a single row, which torch.export would take for a fixed size."""
    return torch.cat([leaf, leaf]) if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == 1 else leaf
