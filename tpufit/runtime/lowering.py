"""What torch_xla's hash of a graph leaves out, made a part of the graph's identity.

torch_xla finds a compiled program by the hash of its graph. That knows nothing of what is read only while the graph is
lowered, such as the precision; nor of which of several inputs of one shape an operation takes: two nets that use the
same layers in another order have one hash. In silence it would run the program that it compiled first.
"""

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from .bindings import xla

# torch_xla's hash does contain the value of this variable, which it reads each time. It means something to
# auto-sharding only, which is never on here.
_IN_THE_HASH = "XLA_AUTO_SPMD_MESH"

# The variables of the environment that torch_xla reads anew for each graph that it compiles. All others it reads once.
_VARIABLES = ("CONVERT_SHLO_TO_SHARDY", "XLA_STABLEHLO_COMPILE")

_OPERANDS = re.compile(r"%[\d.]+")  # the numbers of operations in a graph's text

_DEFAULT = "default"  # the precision that adds nothing to the hash


def set_matmul_precision(name: str) -> None:
    """Set the precision of float32 matrix products in graphs lowered from now on. Only on a TPU does it matter."""
    if xla()._xla_get_mat_mul_precision() != name:
        xla()._xla_set_mat_mul_precision(name)
    _put_into_the_hash(*_read_while_lowered())


def tell_apart(roots: Sequence[Tensor]) -> None:
    """Let the hash say which tensors each operation of a graph takes, until the end of `lowering`."""
    operands = " ".join(_OPERANDS.findall(xla()._get_xla_tensors_text(list(roots))))
    wiring = hashlib.blake2b(operands.encode(), digest_size=8).hexdigest()
    _put_into_the_hash(*_read_while_lowered(), f"operands={wiring}")


def _read_while_lowered() -> list[str]:
    name = xla()._xla_get_mat_mul_precision()
    return ["" if name == _DEFAULT else f"matmul_precision={name}", *variables()]


def _put_into_the_hash(*words: str) -> None:
    distinct = " ".join(filter(None, words))
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
