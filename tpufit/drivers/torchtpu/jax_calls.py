"""`JaxCalls`: JAX functions as parts of a graph, such as the kernel of flash attention.

A trace only marks a call, see `graph_marks`. TorchTPU's own call of a JAX function isn't used, because it needs a TPU.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ...runtime.jax_export import export
from ...runtime.kernel_work import find_mark
from .graph_marks import Kind, Marked, Replacement, mark_of, replace_marked

_DEFINED = re.compile(r"func\.func (?:public |private )?@(\w+)")
_RESULT_NAME = re.compile(r' \{jax\.result_info = "[^"]*"\}')
_KERNEL = "custom_call @tpu_custom_call("


@dataclass(frozen=True)
class _Function:
    """A JAX function as text.

    Attributes:
        name: The name of its main function.
        text: Its functions.
        types: The types of its results.
    """

    name: str
    text: str
    types: Sequence[str]


class JaxCalls:
    """The JAX functions that traces call, by number.

    Args:
        put_behind: Puts traced tensors behind a barrier.
    """

    def __init__(self, put_behind: Callable[[Sequence[Tensor]], list[Tensor]]) -> None:
        self._put_behind = put_behind
        self._functions: list[_Function] = []

    def lower(
        self, function: Callable[..., Any], arguments: Sequence[Any], platform: str, name: str
    ) -> tuple[Callable[..., list[Tensor]], list[Any]]:
        """See `Driver.jax_call`."""
        exported = export(function, arguments, platform)
        number = len(self._functions)
        self._functions.append(_as_function(exported.mlir_module(), name))
        jax = import_module("jax")
        results = [jax.ShapeDtypeStruct(result.shape, result.dtype) for result in exported.out_avals]
        return partial(self._call, number, [(one.shape, getattr(torch, one.dtype.name)) for one in results]), results

    def _call(
        self, number: int, results: Sequence[tuple[tuple[int, ...], torch.dtype]], *tensors: Tensor
    ) -> list[Tensor]:
        with torch.no_grad():
            like = [torch.zeros(shape, dtype=dtype, device="tpu") for shape, dtype in results]
            return self._put_behind([*tensors, *like, mark_of(Kind.CALL, number)])[len(tensors) : -1]

    def insert(self, text: str) -> str:
        """Return a graph's text with calls in place of their marks, and with the functions."""
        called: dict[str, _Function] = {}
        text = replace_marked(text, "called", partial(self._write, called))
        if not called:
            return text
        end = text.rindex("}")
        functions = "\n".join(function.text for function in called.values())
        return f"{text[:end]}{functions}\n{text[end:]}"

    def _write(self, called: dict[str, _Function], marked: Marked) -> Replacement | None:
        if marked.kind is not Kind.CALL:
            return None
        function = self._functions[marked.number]
        called[function.name] = function
        count = len(function.types)
        given = len(marked.operands) - count
        operands, types = ", ".join(marked.operands[:given]), ", ".join(marked.types[:given])
        name = marked.new if count == 1 else f"{marked.new}:{count}"
        results = [marked.new] if count == 1 else [f"{marked.new}#{i}" for i in range(count)]
        line = f"{name} = func.call @{function.name}({operands}) : ({types}) -> ({', '.join(function.types)})"
        return [line], [*marked.operands[:given], *results]


def _as_function(module: str, name: str) -> _Function:
    """Turn the text of a JAX module into functions whose names begin with a name.

    The names also contain a hash of the text, not a number, so that a later process finds the step in the cache of
    programs even if it calls other functions before.
    """
    mlir = import_module("jax._src.interpreters.mlir")
    with mlir.make_ir_context():
        operation = mlir.ir.Module.parse(module).operation
        text = operation.get_asm(enable_debug_info=True, use_local_scope=True)
        main = next(op for op in operation.regions[0].blocks[0].operations if op.name.value == "main")
        types = [str(result) for result in main.type.results]
    scope = find_mark(text)  # newer JAX writes the mark only at the call of the kernel's function
    lines = [_RESULT_NAME.sub("", _shorten_locations(line, scope)) for line in text.strip().split("\n")[1:-1]]
    body = "\n".join(lines)
    name = f"{name}_{hashlib.blake2b(body.encode(), digest_size=8).hexdigest()}"
    for defined in set(_DEFINED.findall(body)):
        new = name if defined == "main" else f"{name}_{defined}"
        body = re.sub(rf"((?:call|func\.func|public|private) )@{defined}\b", rf"\1@{new}", body)
    return _Function(name, body.replace("func.func public ", "func.func private "), types)


def _shorten_locations(line: str, scope: str) -> str:
    """Remove the places in the source from a line, which differ between machines; keep a kernel's name, after a scope.

    Example:
        >>> _shorten_locations('%0 = stablehlo.sine %1 : tensor<8xf32> loc("sin"("f"("/a.py":1:2)))', "")
        '%0 = stablehlo.sine %1 : tensor<8xf32>'
        >>> _shorten_locations('%0 = stablehlo.custom_call @tpu_custom_call() : () -> () loc("a"("/a.py":1:2))', "s")
        '%0 = stablehlo.custom_call @tpu_custom_call() : () -> () loc("s/a")'
    """
    kept = []
    rest = line
    while (at := rest.find(" loc(")) >= 0:
        kept.append(rest[:at])
        end = _end_of_parentheses(rest, at + len(" loc("))
        name = re.match(r' loc\("([^"]*)"', rest[at:end])
        if _KERNEL in line and name:
            kept.append(f' loc("{scope}/{name[1]}")')
        rest = rest[end:]
    return "".join([*kept, rest])


def _end_of_parentheses(text: str, begin: int) -> int:
    """Return where parentheses end that were opened before `begin`, outside of quotes."""
    depth = 1
    quoted = False
    for i in range(begin, len(text)):
        if text[i] == '"':
            quoted = not quoted
        elif not quoted:
            depth += (text[i] == "(") - (text[i] == ")")
            if not depth:
                return i + 1
    return len(text)
