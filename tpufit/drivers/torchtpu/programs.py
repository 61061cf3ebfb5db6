"""The graph of a trace as StableHLO text: identify it, prepare it for several cores, and compile it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from .compile_cache import compile_or_load
from .compute_modes import recording
from .core_layouts import layout_of, write_layouts
from .private_names import names
from .rewrite_indices import narrow_indices
from .rewrite_products import unflatten_products
from .rewrite_slices import slice_before_merging

_HEAD = re.compile(r"func\.func @main\((.*?)\) -> ", re.DOTALL)
_ARGUMENT = re.compile(r"%arg(\d+)\b")
# Angle brackets are nested in the types of complex tensors: tensor<3xcomplex<f32>>.
_TENSOR = r"tensor<(?:[^<>]|<[^<>]*>)*>"
_TYPED = re.compile(rf"%arg(\d+): ({_TENSOR})")
_TYPED_WITH_ATTRIBUTES = re.compile(rf"%arg(\d+): ({_TENSOR})(?: \{{([^}}]*)\}})?")

Runner = Callable[[list[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class Built:
    """A graph as text.

    Attributes:
        text: The graph's StableHLO.
    """

    text: str

    def digest(self, donated: Sequence[int]) -> str:
        """Return the identity of the graph. It ignores the first line, whose line of Python may differ each time."""
        body = self.text.partition("\n")[2]
        return hashlib.blake2b(f"{list(donated)}\n{body}".encode(), digest_size=16).hexdigest()

    def donate(self, outputs: Mapping[int, int]) -> str:
        """Return the text to compile, which writes outputs over inputs: output numbers by input numbers."""
        replaced = {i: f"tf.aliasing_output = {output} : i32" for i, output in outputs.items()}
        return _annotate_arguments(slice_before_merging(unflatten_products(self.text)), replaced)


def shard_text(text: str, axes: Sequence[int | None], cores: int, results: Sequence[int | None] = ()) -> str:
    """Return the text of a graph for several cores.

    Args:
        text: The text for one core.
        axes: The dimension along which each argument is split over the cores; None: each core has the whole argument.
        cores: The number of cores.
        results: The dimensions of the first results (default: none); each core has every other result as a whole.
    """
    head = _HEAD.search(text)
    assert head is not None
    kinds = dict(_TYPED.findall(head[1]))
    text = _annotate_arguments(text, {i: layout_of(kinds[str(i)], axis, cores) for i, axis in enumerate(axes)})
    head = _HEAD.search(text)
    assert head is not None
    end = text.index(" {\n", head.end())
    rest = iter(results)
    given = re.sub(_TENSOR, lambda m: f"{m[0]} {{{layout_of(m[0], next(rest, None), cores)}}}", text[head.end() : end])
    given = given if given.startswith("(") else f"({given})"
    counts = f"mhlo.num_partitions = {cores} : i32, mhlo.num_replicas = 1 : i32"
    name, _, body = f"{text[: head.end()]}{given}{text[end:]}".partition(" {\n")
    return narrow_indices(write_layouts(f"{name} attributes {{{counts}}} {{\n{body}", cores))


def _annotate_arguments(text: str, attributes: Mapping[int, str]) -> str:
    """Return the text with more attributes of its arguments, by the argument's number."""
    head = _HEAD.search(text)
    if not attributes or head is None:
        return text

    def noted(match: re.Match[str]) -> str:
        number = int(match[1])
        if number not in attributes:
            return match[0]
        others = f", {match[3]}" if match[3] else ""
        return f"%arg{number}: {match[2]} {{{attributes[number]}{others}}}"

    arguments = _TYPED_WITH_ATTRIBUTES.sub(noted, head[1])
    return f"{text[: head.start(1)]}{arguments}{text[head.end(1) :]}"


def list_used(text: str, count: int) -> list[int]:
    """Return the numbers of the arguments that the main function uses; the graph has `count` arguments."""
    head, end = _main(text)
    # Higher numbers are arguments of operations' regions, such as a reduction's.
    return sorted({i for i in map(int, _ARGUMENT.findall(text, head.end(), end)) if i < count})


def keep_arguments(text: str, order: Sequence[int], count: int) -> str:
    """Return the text with only the arguments in `order`, instead of all `count`. The graph must use no others."""
    head, end = _main(text)
    kinds = {int(m[1]): m[2] for m in _TYPED.finditer(head[1])}
    new = {old: i for i, old in enumerate(order)}
    arguments = ", ".join(f"%arg{i}: {kinds[old]}" for i, old in enumerate(order))
    body = _ARGUMENT.sub(lambda m: f"%arg{new.get(int(m[1]), int(m[1]) - count + len(order))}", text[head.end(1) : end])
    return f"{text[: head.start(1)]}{arguments}{body}{text[end:]}"


def _main(text: str) -> tuple[re.Match[str], int]:
    """Return the main function's head and the end of its body. Other functions number their arguments from 0 again."""
    head = _HEAD.search(text)
    assert head is not None
    after = text.find("\n  func.func ", head.end())
    return head, len(text) if after < 0 else after


def text_of(roots: Sequence[Tensor], arguments: Sequence[Tensor]) -> str:
    """Return the text of the graph that computes `roots` from `arguments`."""
    with recording():
        text: str = names().serialize_text(names().build_mlir(list(roots), list(arguments)))
    return text


def compile_text(text: str, core: int = 0, cores: int = 1) -> tuple[Runner, bool]:
    """Compile a text for one of several cores, or load its program if an earlier process has stored it.

    Returns:
        The function that starts the program, and True if the program was loaded.
    """
    executable, loaded = compile_or_load(text, core, cores)
    return names().make_runner(executable, (), None, False), loaded
