"""`export`: lowers a JAX function to StableHLO for the graph of a step. JAX doesn't run it, and starts no device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import Any

from ..utils import releases
from ..utils.replacing_attributes import replacing_attributes

_LIBTPU_0_0_17 = 4  # the latest version of kernels that libtpu 0.0.17 reads


def export(function: Callable[..., Any], arguments: Sequence[Any], platform: str) -> Any:
    """Lower a JAX function.

    Args:
        function: The function of JAX arrays.
        arguments: The shapes and dtypes of its arguments.
        platform: `"tpu"` or `"cpu"`; the device needn't be present.

    Returns:
        JAX's `Exported`, with the module's text, and the shapes and dtypes of the results.
    """
    jax = import_module("jax")
    # An export writes kernels in a version that an older libtpu can read.
    with _without_devices(), _for_old_libtpu():
        return import_module("jax.export").export(jax.jit(function, keep_unused=True), platforms=(platform,))(
            *arguments
        )


def _for_old_libtpu() -> AbstractContextManager[None]:
    """A context in which kernels are written for libtpu 0.0.17, the version for torch_xla 2.8.

    JAX 0.6 does so by default; later versions are used in preflights.
    """
    if releases.find_version("libtpu") != "0.0.17" or import_module("jax").__version_info__ < (0, 7):
        return nullcontext()
    from jax._src import tpu_custom_call

    return replacing_attributes(tpu_custom_call, get_ir_version=lambda _: _LIBTPU_0_0_17)


@contextmanager
def _without_devices() -> Iterator[None]:
    """A context in which JAX doesn't look for a TPU, because the runtime uses it."""
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
