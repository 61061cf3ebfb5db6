"""Adds to torch_xla's hash of a graph what the hash omits.

torch_xla finds a compiled program by the hash of its graph. The hash omits settings that are read only during lowering,
such as the precision, and which of several inputs of one shape an operation takes: two nets that use the same layers in
a different order have the same hash. torch_xla would silently run the program that it compiled first.
"""

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from .bindings import xla

# torch_xla's hash includes the value of this variable, which it reads each time. The variable affects only
# auto-sharding, which tpufit never enables.
_IN_THE_HASH = "XLA_AUTO_SPMD_MESH"

# The environment variables that torch_xla reads for each compilation. It reads all others once.
_VARIABLES = ("CONVERT_SHLO_TO_SHARDY", "XLA_STABLEHLO_COMPILE")

_OPERANDS = re.compile(r"%[\d.]+")  # the numbers of operations in a graph's text

_DEFAULT = "default"  # the precision that adds nothing to the hash


def set_matmul_precision(name: str) -> None:
    """Set the precision of float32 matrix products in graphs that are lowered later. It matters only on a TPU."""
    if xla()._xla_get_mat_mul_precision() != name:
        xla()._xla_set_mat_mul_precision(name)
    exclude_operands()


def exclude_operands() -> None:
    """Let the hash ignore which tensors each operation takes."""
    _set_hash_words(*_lowering_settings())


def include_operands(roots: Sequence[Tensor]) -> None:
    """Let the hash depend on which tensors each operation of a graph takes, until the end of `lowering`.

    This takes up to 0.1 ms per operation, a hundred times as long as the hash.
    """
    operands = " ".join(_OPERANDS.findall(xla()._get_xla_tensors_text(list(roots))))
    wiring = hashlib.blake2b(operands.encode(), digest_size=8).hexdigest()
    _set_hash_words(*_lowering_settings(), f"operands={wiring}")


def _lowering_settings() -> list[str]:
    name = xla()._xla_get_mat_mul_precision()
    return ["" if name == _DEFAULT else f"matmul_precision={name}", *variables()]


def _set_hash_words(*words: str) -> None:
    value = " ".join(filter(None, words))
    if value == os.environ.get(_IN_THE_HASH, ""):
        return
    if value:
        os.environ[_IN_THE_HASH] = value
    else:
        del os.environ[_IN_THE_HASH]


def variables() -> tuple[str, ...]:
    """Return the environment variables that the next compilation reads, with their values."""
    return tuple(f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ)


@contextmanager
def lowering(matmul_precision: str) -> Iterator[None]:
    """A context in which graphs are hashed and lowered with this precision, even if another model has set its own."""
    before = xla()._xla_get_mat_mul_precision()
    set_matmul_precision(matmul_precision)
    try:
        yield
    finally:
        set_matmul_precision(before)
