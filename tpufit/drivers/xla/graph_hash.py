"""Adds to torch_xla's hash of a graph what the hash omits.

torch_xla finds a compiled program by the hash of its graph. The hash omits settings that are read only during lowering,
such as the precision, and which of several inputs of one shape an operation takes: two nets that use the same layers in
a different order have the same hash. torch_xla would silently run the program that it compiled first. So all functions
that look for a program are called inside `distinguishing_inputs`.
"""

import hashlib
import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import compress, count

from torch import Tensor

from ...utils.counters import waiting
from .cpp_bindings import xla

# torch_xla's hash includes the value of this variable, which it reads each time. The variable affects only
# auto-sharding, which tpufit never enables.
_IN_THE_HASH = "XLA_AUTO_SPMD_MESH"

# The environment variables that torch_xla reads for each compilation. It reads all others once.
_VARIABLES = ("CONVERT_SHLO_TO_SHARDY", "XLA_STABLEHLO_COMPILE")

_DEFAULT = "default"  # the precision that adds nothing to the hash

_one_at_a_time = threading.RLock()  # the variable is the process's

_OPERATION = re.compile(r"^ *(%\d+) = (.*)$", re.M)
_OPERAND = re.compile(r"%\d+")
_known: dict[bytes, str] = {}  # the result of `_hash_operands` by the hash of the lowered graph


def set_matmul_precision(name: str) -> None:
    """Set the precision of float32 matrix products in graphs that are lowered later. It matters only on a TPU."""
    if xla()._xla_get_mat_mul_precision() != name:
        xla()._xla_set_mat_mul_precision(name)
    _set_hash_words(*_lowering_settings())


@contextmanager
def distinguishing_inputs(tensors: Sequence[Tensor], reason: str = "") -> Iterator[None]:
    """A context in which torch_xla finds the program of pending tensors by the operands of their operations, too.

    **This waits** for the device if a tensor is pending: a graph whose inputs have no memory yet can't be lowered.

    Args:
        tensors: The tensors.
        reason: The reason for which the wait is counted (default: not counted, because the caller counts its own wait).
    """
    # Several objects may have the same value, which is one output of the graph.
    values = list({xla()._xla_get_tensor_id(tensor): tensor for tensor in tensors}.values())
    is_pending = xla()._check_tensor_need_materialization(values) if values else []
    pending = list(compress(values, is_pending))
    if not pending:
        yield
        return
    with _one_at_a_time:
        with waiting(reason) if reason else nullcontext():
            xla()._xla_wait_device_ops([])
        before = os.environ.get(_IN_THE_HASH, "")
        _set_hash_words(*_lowering_settings(), f"operands={_identify_operands(pending)}")
        try:
            yield
        finally:
            _set_hash_words(before)


def _identify_operands(pending: Sequence[Tensor]) -> str:
    """Return a hash of the operands that a graph's operations take.

    A graph that is lowered to a known program has the hash of the graph that was first lowered to it. Graphs that are
    lowered to different programs, e.g. because an input has another layout, may have the same hash.
    """
    # Lowering takes a few microseconds per operation, and the text several times as long.
    proto = hashlib.blake2b(xla()._get_xla_tensors_hlo_proto(pending), digest_size=16).digest()
    found = _known.get(proto)
    if found is None:
        found = _known[proto] = _hash_operands(xla()._get_xla_tensors_text(pending))
    return found


def _hash_operands(text: str) -> str:
    """Hash the operands in a graph's text: each operation by the hashes of its operands, each input by its position.

    The rest of the text is in torch_xla's hash. Like that hash, this one ignores whether a result is computed once or
    twice, e.g. a view after its base changed.
    """
    hashes: dict[str, str] = {}
    inputs = count()
    outputs = []
    for name, operation in _OPERATION.findall(text):
        operands = [hashes[operand] for operand in _OPERAND.findall(operation)]
        if "xla::device_data" in operation:
            operands.append(str(next(inputs)))
        hashes[name] = hashlib.blake2b(" ".join(operands).encode(), digest_size=8).hexdigest()
        if "ROOT=" in operation:
            outputs.append(hashes[name])
    return hashlib.blake2b(" ".join(outputs).encode(), digest_size=8).hexdigest()


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
