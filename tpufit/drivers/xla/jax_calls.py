"""`lower`: turns a JAX function into an operation of torch_xla's graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from torch import Tensor

from ...runtime.jax_export import export
from .cpp_bindings import xla

Computation = Callable[..., list[Tensor]]


def lower(
    function: Callable[..., Any], arguments: Sequence[Any], platform: str, name: str
) -> tuple[Computation, list[Any]]:
    """Lower a JAX function to a function of lazy tensors.

    Args:
        function: The function of JAX arrays.
        arguments: The shapes and dtypes of its arguments.
        platform: `"tpu"` or `"cpu"`; the device needn't be present.
        name: The name of the operation.

    Returns:
        The function of lazy tensors, which returns a list, and the shapes and dtypes of this list.
    """
    from jax._src.lib import xla_client
    from torch_xla.core.xla_builder import computation_from_module_proto

    exported = export(function, arguments, platform)
    module = xla_client._xla.mlir.mlir_module_to_xla_computation(exported.mlir_module(), False, True)
    computation = computation_from_module_proto(name, module.as_serialized_hlo_module_proto())

    def call(*tensors: Tensor) -> list[Tensor]:
        results = xla()._xla_user_computation(f"xla::{name}", list(tensors), computation)
        return results if isinstance(results, list) else [results]

    of = import_module("jax").ShapeDtypeStruct
    return call, [of(result.shape, result.dtype) for result in exported.out_avals]
