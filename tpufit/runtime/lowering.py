"""What torch_xla reads only while it lowers a graph, made a part of the graph's identity.

torch_xla finds a compiled program by the hash of its graph, which knows nothing of these: with another precision it
would find the program that it compiled with the first one, in silence.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from .bindings import xla

# torch_xla's hash does contain the value of this variable, which it reads each time. It means something to
# auto-sharding only, which is never on here.
_IN_THE_HASH = "XLA_AUTO_SPMD_MESH"

# The variables of the environment that torch_xla reads anew for each graph that it compiles. All others it reads once.
_VARIABLES = ("CONVERT_SHLO_TO_SHARDY", "XLA_STABLEHLO_COMPILE")

_DEFAULT = "default"  # the precision that adds nothing to the hash


def set_matmul_precision(name: str) -> None:
    """Set the precision of float32 matrix products in graphs lowered from now on. Only on a TPU does it matter."""
    if xla()._xla_get_mat_mul_precision() != name:
        xla()._xla_set_mat_mul_precision(name)
    distinct = " ".join(["" if name == _DEFAULT else f"matmul_precision={name}", *variables()]).strip()
    if distinct == os.environ.get(_IN_THE_HASH, ""):
        return
    if distinct:
        os.environ[_IN_THE_HASH] = distinct
    else:
        del os.environ[_IN_THE_HASH]


def variables() -> tuple[str, ...]:
    """The variables of the environment that the next compilation reads, with their values."""
    return tuple(f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ)


@contextmanager
def lowering(matmul_precision: str) -> Iterator[None]:
    """A context in which graphs are hashed and lowered with a precision, whatever another model has set."""
    before = xla()._xla_get_mat_mul_precision()
    set_matmul_precision(matmul_precision)
    try:
        yield
    finally:
        set_matmul_precision(before)
