"""`lower`: turns a JAX function into an operation of torch_xla's graphs. JAX only lowers it, and doesn't run it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import Any

from torch import Tensor

from ...utils import releases
from ...utils.replacing_attributes import replacing_attributes
from .bindings import xla

_LIBTPU_0_0_17 = 4  # the latest version of kernels that libtpu 0.0.17 reads

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

    jax = import_module("jax")
    export = import_module("jax.export").export
    # An export writes kernels in a version that an older libtpu can read.
    with _without_devices(), _for_old_libtpu():
        exported = export(jax.jit(function, keep_unused=True), platforms=(platform,))(*arguments)
    module = xla_client._xla.mlir.mlir_module_to_xla_computation(exported.mlir_module(), False, True)
    computation = computation_from_module_proto(name, module.as_serialized_hlo_module_proto())

    def call(*tensors: Tensor) -> list[Tensor]:
        results = xla()._xla_user_computation(f"xla::{name}", list(tensors), computation)
        return results if isinstance(results, list) else [results]

    return call, [jax.ShapeDtypeStruct(result.shape, result.dtype) for result in exported.out_avals]


def _for_old_libtpu() -> AbstractContextManager[None]:
    """A context in which kernels are written for libtpu 0.0.17, the version for torch_xla 2.8.

    JAX 0.6 does so by default; later versions are used in preflights.
    """
    if releases.version("libtpu") != "0.0.17" or import_module("jax").__version_info__ < (0, 7):
        return nullcontext()
    from jax._src import tpu_custom_call

    return replacing_attributes(tpu_custom_call, get_ir_version=lambda _: _LIBTPU_0_0_17)


@contextmanager
def _without_devices() -> Iterator[None]:
    """A context in which JAX doesn't look for a TPU, because torch_xla uses it."""
    from jax._src.xla_bridge import backends_are_initialized

    jax = import_module("jax")
    if backends_are_initialized():
        yield
        return
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", "cpu")
    try:
        yield
    finally:
        jax.config.update("jax_platforms", before)
        import_module("jax.extend.backend").clear_backends()
