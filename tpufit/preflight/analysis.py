"""`analyse`: what a compiled program does on its TPU, read from the compiler's figures and from both texts of it."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ..errors import counted, few
from ..utils.out_of_memory import remedies, shortage
from ..utils.text import bytes_of, size
from .hlo import COLLECTIVES, Array, Operation, arguments_of, operations, products_of, scopes_of
from .loops import Loops
from .slices import Slice

_PRODUCTS = ("dot", "convolution")
_WIDE = ("f64", "s64", "u64", "c128")
_WITHOUT_WORK = ("parameter", "tuple", "get-tuple-element", "reshape")
_BY_SUMS = "all-gather by sums"
_GATHERS = ("all-gather", "all-to-all", "collective-permute", _BY_SUMS)
_WASTED = 1 << 24  # bytes of padding that are worth a word
# What the compiler says of one array that is larger than all memory.
_ONE_TOO_LARGE = re.compile(r"Allocation \(size=\d+\) would exceed memory .*?shape = '([^'{]*)")
_HLO_TEMP = re.compile(r"HLO temp\s+([\d.]+[KMGT]?)")
_ALLOCATION = re.compile(r"Size: ([\d.]+[KMGT]?)\s*\n(?:\s+Operator: (.*)\n)?\s+Shape: (\S+)")


@dataclass(frozen=True)
class Memory:
    """The memory of a core that a program needs, in bytes.

    Attributes:
        weights: The module's parameters and buffers.
        optimizer: The optimizer's state, and other state of training.
        batch: The core's rows of the batch.
        other: Sums, rates and constants.
        outputs: The results that are not written over an argument.
        temporaries: Activations, gradients and whatever else lives only in the step.
        code: The program itself.
        needed: The compiler's sum of all, if it ran out of memory; else 0, and the parts are the sum.
    """

    weights: int = 0
    optimizer: int = 0
    batch: int = 0
    other: int = 0
    outputs: int = 0
    temporaries: int = 0
    code: int = 0
    needed: int = 0

    @property
    def parts(self) -> dict[str, int]:
        """The parts by name, as far as the compiler tells."""
        return {name: value for name, value in vars(self).items() if name != "needed"}

    @property
    def total(self) -> int:
        """The sum."""
        return self.needed or sum(self.parts.values())


@dataclass(frozen=True)
class Cost:
    """The work of a core in a step, as the compiler counts it, and that of kernels, as tpufit does.

    Attributes:
        flops: The operations that it computes.
        nbytes: The bytes that it reads and writes in its memory.
        cycles: The estimate of its cycles, without the time on the links between chips.
        kernels: The number of kernels in it that the compiler counts nothing of, such as flash attention.
        of_kernels: The cycles among all that are theirs, an estimate of tpufit's own, see `TPU.cycles_of`.
        loops: The number of loops whose turns aren't known, so that what is in them counts once.
    """

    flops: float = 0.0
    nbytes: float = 0.0
    cycles: int = 0
    kernels: int = 0
    of_kernels: int = 0
    loops: int = 0


@dataclass(frozen=True)
class Collective:
    """Communication between cores, of one kind and layer.

    Attributes:
        kind: E.g. `"all-reduce"`; `"all-gather by sums"` if it adds up each core's rows among zeros for the others'.
        where: The layer, with the user's line.
        count: The number of them in a step.
        nbytes: The size of their results, in bytes.
        of_weights: True if it puts together weights that are split over the cores, or parts their gradients.
    """

    kind: str
    where: str
    count: int
    nbytes: int
    of_weights: bool = False

    @property
    def adds(self) -> bool:
        """True if it adds up, for which each byte is sent twice."""
        return self.kind not in (*_GATHERS, "reduce-scatter")

    @property
    def said_of(self) -> str:
        """What it is of, in words for people: split weights or their gradients; nothing if it is of something else."""
        return "" if not self.of_weights else " of gradients" if self.adds else " of weights"

    @property
    def gathers(self) -> bool:
        """True if it brings rows to other cores, where sums are enough to train."""
        return self.kind in _GATHERS and not self.of_weights


@dataclass(frozen=True)
class CompiledProgram:
    """A program that a `fit` needs, as a TPU's compiler sees it.

    Attributes:
        role: `"train"` or `"eval"`.
        cause: The reason why it is needed.
        rows: The rows of its batches, on all cores.
        steps: The number of steps that it joins.
        seconds: The seconds that it took to compile, here.
        fits: True if it fits into the memory of a core.
        memory: The memory of a core that it needs.
        cost: The work of a core; all zero if the program doesn't fit.
        layers: The estimated cycles by phase and layer of the user's, the most first.
        collectives: The communication between cores.
        warnings: What is wrong with it, in sentences, by its kind: `"memory"`, `"gathers"`, `"float32"`, `"64-bit"`,
            `"padding"`.
        text: The optimised program; without one the compiler's own words.
        attention: How each layer's attention is computed, by its name: `"flash"`, or `"plain"` with the reason.
    """

    role: str
    cause: str
    rows: int
    steps: int
    seconds: float
    fits: bool
    memory: Memory
    cost: Cost = Cost()
    layers: Mapping[tuple[str, str], int] = field(default_factory=dict)
    collectives: Sequence[Collective] = ()
    warnings: Mapping[str, str] = field(default_factory=dict)
    text: str = field(default="", repr=False)
    attention: Mapping[str, str] = field(default_factory=dict)


def analyse(
    traced: Mapping[str, Any], compiled: Mapping[str, Any], before: str, after: str, on: Slice
) -> CompiledProgram:
    """Analyse a program: what its trace and the compiler tell of it, and its text, as traced and as compiled.

    The trace's facts are role, cause, rows, arguments, lines and precision. The text `after` is empty if it wasn't
    compiled.

    Raises:
        ValueError: The compiler has refused it for another reason than memory; its words are the error's.
    """
    plain = {name: traced[name] for name in ("role", "cause", "rows", "steps")} | {"seconds": compiled["seconds"]}
    if "error" in compiled:
        words = compiled["error"]
        used = _used(words)
        if used is None:
            raise ValueError(words)
        held = _arguments(traced, [_of_a_core(argument, on.devices) for argument in traced["arguments"]])
        temporary = _HLO_TEMP.search(words)
        temporaries = bytes_of(temporary[1]) if temporary else 0
        memory = Memory(**held, temporaries=temporaries, needed=used[0])
        said = too_large(words, on, held["weights"] + held["optimizer"], traced)
        return CompiledProgram(**plain, fits=False, memory=memory, warnings={"memory": said}, text=words)
    own = list(operations(after))
    loops = Loops(after)
    layouts = arguments_of(after)
    stats = compiled["memory"]
    memory = Memory(
        **_arguments(traced, [array.padded for array in layouts]),
        outputs=stats["output"] - stats["alias"],
        temporaries=stats["temp"],
        code=stats["generated_code"],
    )
    layers: Counter[tuple[str, str]] = Counter()
    kernels = 0
    of_kernels = 0
    # The compiler's figures, which take the body of a loop once, and nothing of kernels.
    flops, nbytes = (compiled[name] + loops.beyond_once(compiled.get("loops", {}), name) for name in ("flops", "bytes"))
    for operation, _ in own:
        turns = loops.turns.get(operation.computation, 1)
        cycles = turns * operation.cycles
        if operation.kernel is not None:
            cycles = turns * on.chip.cycles_of(operation.kernel)
            kernels += turns
            of_kernels += cycles
            flops += turns * operation.kernel.operations
            nbytes += turns * operation.kernel.nbytes
        if cycles:
            layers[operation.phase, operation.layer] += cycles
    shapes = _split_shapes(traced, on.devices)
    collectives = _collectives([operation for operation, _ in own], traced["lines"], shapes, loops.turns)
    return CompiledProgram(
        **plain,
        fits=True,
        memory=memory,
        cost=Cost(flops, nbytes, sum(layers.values()), kernels, of_kernels, loops.unknown),
        attention=traced.get("attention", {}),
        layers=dict(layers.most_common()),
        collectives=collectives,
        warnings=_gathered(collectives)
        | _of_trace([operation for operation, _ in operations(before)], traced)
        | _padded(traced, own, layouts),
        text=after,
    )


def where(layer: str, line: int | None = None, lines: Sequence[str] = ()) -> str:
    """The place of an operation for people: the user's layer and, if its index is known, the user's line."""
    return " at ".join(part for part in (layer, "" if line is None else lines[line]) if part) or "the step"


def too_large(words: str, on: Slice, held: int, traced: Mapping[str, Any]) -> str:
    """The compiler's own account of too large a program, in sentences: how much, what is largest, and what to try.

    `held` are the bytes of weights and optimizer state on a core, whatever the batch.
    """
    used = _used(words)
    assert used is not None
    needs, has = used
    groups: Counter[str] = Counter()
    places: dict[str, list[str]] = {}  # the layers of each kind of array
    for nbytes, operator, shape in _ALLOCATION.findall(words):
        array = shape.partition("{")[0]
        groups[array] += bytes_of(nbytes)
        scopes = scopes_of(operator)
        places.setdefault(array, []).append(scopes[-1][1] if scopes else "the step")
    one = _ONE_TOO_LARGE.search(words)
    most = [f"{one[1]} alone"] if one else []
    most += [
        f"{len(places[array])} x {array} of {few(sorted(set(places[array])))} ({size(nbytes)})"
        for array, nbytes in groups.most_common(3)
    ]
    rows = -(-traced["rows"] // traced["steps"] // on.devices)
    split = any(one["source"] == "state" and one["axis"] is not None for one in traced["arguments"])
    training = traced["role"] == "train"
    cures = remedies(held, needs, rows, on.devices, split, traced["remat"]) if training else ["a smaller batch_size"]
    if held > has:
        # Fewer rows don't help.
        cures = cures[: not split and on.devices > 1]
        cures += ["a TPU with more memory a core", "an optimizer with less state (SGD)", "precision='bf16-true'"]
        cure = "The weights and the optimizer's state alone are too large, whatever the batch. "
    else:
        cure = ""
    cure += f"Try {', or '.join(cures or ['a TPU with more memory a core'])}"
    largest = f"The largest: {', '.join(most)}. " if most else ""
    return f"it needs {size(needs)} of a core's {size(has)}, {size(needs - has)} too much. {largest}{cure}"


def _used(words: str) -> tuple[int, int] | None:
    """The bytes that a program needs, and those that there are, by the compiler's error; None if it is another one."""
    said = shortage(words)
    return (bytes_of(said.needs), bytes_of(said.has)) if said.needs else None


def _arguments(traced: Mapping[str, Any], nbytes: Sequence[int]) -> dict[str, int]:
    """The sizes of a program's arguments on a core, by their kind."""
    sizes = dict.fromkeys(("weights", "optimizer", "batch", "other"), 0)
    for argument, own in zip(traced["arguments"], nbytes, strict=True):
        kind = {"state": "weights" if argument["name"] else "optimizer", "input": "batch"}.get(
            argument["source"], "other"
        )
        sizes[kind] += own
    return sizes


def _of_a_core(argument: Mapping[str, Any], cores: int) -> int:
    """The bytes of an argument that one core holds, as far as they are known without the compiler's layout."""
    axis = argument["axis"]
    shape = argument["shape"]
    nbytes = int(argument["nbytes"])
    if axis is None or axis >= len(shape):  # whole on every core
        return nbytes
    rows = int(shape[axis])
    return nbytes // max(1, rows) * math.ceil(rows / cores)


def _split_shapes(traced: Mapping[str, Any], cores: int) -> set[tuple[int, ...]]:
    """The shapes in which weights that are split over the cores travel between them: whole, and one or two parts."""
    shapes = set()
    for argument in traced["arguments"]:
        axis = argument.get("axis")
        if argument["source"] == "state" and axis is not None:
            shape = list(argument["shape"])
            part = math.ceil(shape[axis] / cores)
            for size_of_axis in (shape[axis], part, 2 * part, part * cores):
                shapes.add(_in_any_order([*shape[:axis], size_of_axis, *shape[axis + 1 :]]))
    return shapes


def _in_any_order(shape: Sequence[int]) -> tuple[int, ...]:
    """A shape as it is for any order of its dimensions, as compilers transpose."""
    return tuple(sorted(size for size in shape if size > 1))


def _collectives(
    own: Sequence[Operation],
    lines: Sequence[str],
    split: Collection[tuple[int, ...]] = (),
    turns: Mapping[str, int] = MappingProxyType({}),
) -> list[Collective]:
    """The communication between cores. One may stand in several parts of the text, with one number."""
    made = {operation.name: operation for operation in own}
    found: dict[tuple[str, int | str], Operation] = {}
    for operation in own:
        for kind in COLLECTIVES:
            if operation.kind in (kind, f"{kind}-start"):
                kind = _BY_SUMS if kind == "all-reduce" and _adds_rows(operation, made) else kind
                found.setdefault((kind, operation.channel or operation.name), operation)
    counts: Counter[tuple[str, str, bool]] = Counter()
    sizes: Counter[tuple[str, str, bool]] = Counter()
    for (kind, _), operation in found.items():
        layer = f"{operation.layer} ({operation.phase})" if operation.phase == "backward" else operation.layer
        of_weights = all(_in_any_order(a.shape) in split for a in operation.arrays if math.prod(a.shape) > 1)
        place = kind, where(layer, operation.line, lines), bool(split) and of_weights
        times = turns.get(operation.computation, 1)
        counts[place] += times
        sizes[place] += times * operation.nbytes
    return [
        Collective(kind, place, counts[kind, place, of_weights], nbytes, of_weights)
        for (kind, place, of_weights), nbytes in sizes.most_common()
    ]


def _adds_rows(operation: Operation, made: Mapping[str, Operation]) -> bool:
    """True if what is added up between cores was first put among zeros, at a place of each core's own.

    The partitioner makes such sums by itself, so that they come from no line of the user's. Those whose rows are put in
    place inside of a fusion are not known from others.
    """
    if operation.phase:
        return False
    for name in operation.operands:
        while name in made and made[name].kind == "bitcast":
            name = made[name].operands[0]
        if "dynamic-update-slice" in name:
            return True
    return False


def _gathered(collectives: Sequence[Collective]) -> dict[str, str]:
    gathers = [one for one in collectives if one.gathers]
    if not gathers:
        return {}
    total = sum(one.nbytes for one in gathers)
    count = sum(one.count for one in gathers)
    most = "; ".join(f"{one.where} ({one.kind}, {size(one.nbytes)})" for one in gathers[:3])
    times = counted(count, "time")
    return {"gathers": f"rows travel between cores, {times} and {size(total)} a step, where sums would do: {most}"}


def _of_trace(traced_operations: Sequence[Operation], traced: Mapping[str, Any]) -> dict[str, str]:
    """What the trace itself has: products in float32 where bfloat16 was meant, and types that a TPU emulates."""
    found: dict[str, str] = {}
    lines = traced["lines"]
    products = [o for o, multiplied in products_of(traced_operations) if multiplied == "f32"]
    if traced["precision"] != "fp32" and products:
        places = Counter(where(o.layer, o.line, lines) for o in products)
        most = ", ".join(place for place, _ in places.most_common(3))
        found["float32"] = (
            f"{counted(len(products), 'matrix product')} in float32, with precision={traced['precision']!r}: {most}"
        )
    wide = {
        o.name: (array, where(o.layer, o.line, lines))
        for o in traced_operations
        for array in o.arrays
        if array.dtype in _WIDE and math.prod(array.shape) > 1 and o.kind not in _WITHOUT_WORK
    }
    largest = sorted(wide.values(), key=lambda pair: pair[0].nbytes, reverse=True)
    if largest:
        most = ", ".join(f"{array} of {place}" for array, place in list(dict.fromkeys(largest))[:3])
        found["64-bit"] = f"{counted(len(wide), 'array')} of 64-bit types, which a TPU emulates: {most}"
    return found


def _padded(
    traced: Mapping[str, Any], own: Sequence[tuple[Operation, bool]], layouts: Sequence[Array]
) -> dict[str, str]:
    """Arrays that are much larger in the TPU's memory than their values, because their dimensions fill no tile."""
    named = [
        (array.padded - array.nbytes, f"{argument['name'] or argument['source']} {array}")
        for argument, array in zip(traced["arguments"], layouts, strict=True)
    ]
    made = [
        (array.padded - array.nbytes, f"{array} of {where(operation.layer)}")
        for operation, entry in own
        if entry and operation.kind in ("fusion", *_PRODUCTS)
        for array in operation.arrays
    ]
    largest = sorted(dict.fromkeys(waste for waste in (*named, *made) if waste[0] >= _WASTED), reverse=True)
    if not largest:
        return {}
    most = ", ".join(f"{what} ({size(waste)})" for waste, what in largest[:3])
    said = f"arrays are filled up to whole tiles of (8, 128) with unused memory: {most}. Choose widths of whole 128s"
    return {"padding": said}
