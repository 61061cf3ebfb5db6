"""`analyze`: memory, cost and communication of a compiled program, from the compiler's figures and the HLO texts."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from ..errors import join_few, say_count
from ..utils.out_of_memory import list_remedies, parse_shortage
from ..utils.text import format_bytes, parse_bytes
from .hlo import COLLECTIVES, Array, Operation, find_products, parse_arguments, parse_operations, parse_scopes
from .loop_counts import Loops
from .tpu_slices import Slice

_PRODUCTS = ("dot", "convolution")
_WIDE = ("f64", "s64", "u64", "c128")
_WITHOUT_WORK = ("parameter", "tuple", "get-tuple-element", "reshape")
_BY_SUMS = "all-gather by sums"
_GATHERS = ("all-gather", "all-to-all", "collective-permute", _BY_SUMS)
_WASTED = 1 << 24  # bytes of padding from which a warning is given
_NO_SCAN = (
    "TorchTPU writes a cumulative operation, such as torch.cummax, as an operation that jax 0.10.2 can't pass to the "
    "compiler; only torch.cumsum and torch.cumprod are rewritten. Run this preflight in an environment without TorchTPU"
)
# The compiler's message about a single array that is larger than the memory.
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
        outputs: The results that don't overwrite an argument.
        temporaries: Activations, gradients and other values that exist only within the step.
        code: The program itself.
        needed: The compiler's total, if the program ran out of memory; else 0, and the total is the sum of the parts.
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
        """The parts by name, as far as the compiler reports them."""
        return {name: value for name, value in vars(self).items() if name != "needed"}

    @property
    def total(self) -> int:
        """The total, in bytes."""
        return self.needed or sum(self.parts.values())


@dataclass(frozen=True)
class Cost:
    """The work of a core in a step: the compiler's counts, plus tpufit's counts for kernels.

    Attributes:
        flops: The number of operations.
        nbytes: The bytes that the core reads and writes in its memory.
        cycles: The estimated cycles, without the time on the links between chips.
        kernels: The number of kernels for which the compiler has no counts, such as flash attention.
        of_kernels: The part of `cycles` for kernels, estimated by tpufit, see `TPU.estimate_cycles`.
        loops: The number of loops whose number of iterations is unknown, so that their bodies count once.
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
        kind: E.g. `"all-reduce"`; `"all-gather by sums"` for a sum of arrays in which each core has set only its rows.
        where: The layer, with the user's line.
        count: The number of these operations in a step.
        nbytes: The total size of their results, in bytes.
        of_weights: True if it gathers weights that are split over the cores, or scatters their gradients.
    """

    kind: str
    where: str
    count: int
    nbytes: int
    of_weights: bool = False

    @property
    def adds(self) -> bool:
        """True if the operation sums, for which each byte is sent twice."""
        return self.kind not in (*_GATHERS, "reduce-scatter")

    @property
    def content_phrase(self) -> str:
        """A phrase for reports: " of weights", " of gradients", or "" for other data."""
        return "" if not self.of_weights else " of gradients" if self.adds else " of weights"

    @property
    def gathers(self) -> bool:
        """True if it moves rows to other cores, though training needs only sums."""
        return self.kind in _GATHERS and not self.of_weights


@dataclass(frozen=True)
class CompiledProgram:
    """A program that a `fit` needs, as compiled for a TPU.

    Attributes:
        role: `"train"` or `"eval"`.
        cause: The reason why it is needed.
        rows: The rows of its batches, on all cores.
        steps: The number of steps that it joins.
        seconds: The duration of its compilation on this machine, in seconds.
        fits: True if it fits into the memory of a core.
        memory: The memory of a core that it needs.
        cost: The work of a core; all zero if the program doesn't fit.
        layers: The estimated cycles by phase and user's layer, in descending order.
        collectives: The communication between cores.
        warnings: Problems, in sentences, by kind: `"memory"`, `"gathers"`, `"float32"`, `"64-bit"`, `"padding"`.
        text: The optimized program; the compiler's error if there is none.
        attention: The form of each layer's attention, by the layer's name: `"flash"`, or `"plain"` with the reason.
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


def analyze(
    traced: Mapping[str, Any], compiled: Mapping[str, Any], before: str, after: str, tpu: Slice
) -> CompiledProgram:
    """Analyze a program.

    Args:
        traced: The facts of its trace, such as role, cause, rows, arguments, lines and precision.
        compiled: The compiler's figures, or its error.
        before: The text of the program as traced.
        after: The text of the program as compiled; "" if it wasn't compiled.
        tpu: The slice.

    Raises:
        ValueError: The compiler has refused the program for a reason other than memory; the message is the compiler's.
    """
    plain = {name: traced[name] for name in ("role", "cause", "rows", "steps")} | {"seconds": compiled["seconds"]}
    if "error" in compiled:
        error = compiled["error"]
        used = _parse_memory(error)
        if used is None:
            raise ValueError(_NO_SCAN if "vhlo.composite_v2" in error else error)
        arguments = _sum_arguments(
            traced, [_count_bytes_per_core(argument, tpu.devices) for argument in traced["arguments"]]
        )
        temporary = _HLO_TEMP.search(error)
        temporaries = parse_bytes(temporary[1]) if temporary else 0
        memory = Memory(**arguments, temporaries=temporaries, needed=used[0])
        message = explain_too_large(error, tpu, arguments["weights"] + arguments["optimizer"], traced)
        return CompiledProgram(**plain, fits=False, memory=memory, warnings={"memory": message}, text=error)
    compiled_operations = list(parse_operations(after))
    loops = Loops(after)
    layouts = parse_arguments(after)
    stats = compiled["memory"]
    memory = Memory(
        **_sum_arguments(traced, [array.padded for array in layouts]),
        outputs=stats["output"] - stats["alias"],
        temporaries=stats["temp"],
        code=stats["generated_code"],
    )
    layers: Counter[tuple[str, str]] = Counter()
    kernels = 0
    of_kernels = 0
    # The compiler's figures count the body of a loop once, and omit kernels.
    flops, nbytes = (
        compiled[name] + loops.count_repeats(compiled.get("loops", {}), name) for name in ("flops", "bytes")
    )
    for operation, _ in compiled_operations:
        runs = loops.run_counts.get(operation.computation, 1)
        cycles = runs * operation.cycles
        if operation.kernel is not None:
            cycles = runs * tpu.chip.estimate_cycles(operation.kernel)
            kernels += runs
            of_kernels += cycles
            flops += runs * operation.kernel.operations
            nbytes += runs * operation.kernel.nbytes
        if cycles:
            layers[operation.phase, operation.layer] += cycles
    shapes = _split_shapes(traced, tpu.devices)
    collectives = _list_collectives(
        [operation for operation, _ in compiled_operations], traced["lines"], shapes, loops.run_counts
    )
    return CompiledProgram(
        **plain,
        fits=True,
        memory=memory,
        cost=Cost(flops, nbytes, sum(layers.values()), kernels, of_kernels, loops.unknown),
        attention=traced.get("attention", {}),
        layers=dict(layers.most_common()),
        collectives=collectives,
        warnings=_warn_of_gathers(collectives)
        | _warn_of_dtypes([operation for operation, _ in parse_operations(before)], traced)
        | _warn_of_padding(traced, compiled_operations, layouts),
        text=after,
    )


def describe_place(layer: str, line: int | None = None, lines: Sequence[str] = ()) -> str:
    """Return the place of an operation for reports: the user's layer and, if its index is known, the user's line."""
    return " at ".join(part for part in (layer, "" if line is None else lines[line]) if part) or "the step"


def explain_too_large(error: str, tpu: Slice, state: int, traced: Mapping[str, Any]) -> str:
    """Explain the compiler's error about too large a program: how much it needs, the largest arrays, and what to try.

    `state` is the number of bytes of weights and optimizer state on a core, which doesn't depend on the batch.
    """
    used = _parse_memory(error)
    assert used is not None
    needed, available = used
    groups: Counter[str] = Counter()
    places: dict[str, list[str]] = {}  # the layers of each kind of array
    for nbytes, operator, shape in _ALLOCATION.findall(error):
        array = shape.partition("{")[0]
        groups[array] += parse_bytes(nbytes)
        scopes = parse_scopes(operator)
        places.setdefault(array, []).append(scopes[-1][1] if scopes else "the step")
    single = _ONE_TOO_LARGE.search(error)
    most = [f"{single[1]} alone"] if single else []
    most += [
        f"{len(places[array])} x {array} of {join_few(sorted(set(places[array])))} ({format_bytes(nbytes)})"
        for array, nbytes in groups.most_common(3)
    ]
    rows = -(-traced["rows"] // traced["steps"] // tpu.devices)
    split = any(one["source"] == "state" and one["axis"] is not None for one in traced["arguments"])
    training = traced["role"] == "train"
    cures = (
        list_remedies(state, needed, rows, tpu.devices, split, traced["remat"])
        if training
        else ["a smaller batch_size"]
    )
    if state > available:
        # Fewer rows don't help.
        cures = cures[: not split and tpu.devices > 1]
        cures += ["a TPU with more memory per core", "an optimizer with less state (SGD)", "precision='bf16-true'"]
        cure = "The weights and the optimizer's state alone are too large, with any batch. "
    else:
        cure = ""
    cure += f"Try {', or '.join(cures or ['a TPU with more memory per core'])}"
    largest = f"The largest: {', '.join(most)}. " if most else ""
    excess = format_bytes(needed - available)
    return f"it needs {format_bytes(needed)} of a core's {format_bytes(available)}, {excess} too much. {largest}{cure}"


def _parse_memory(error: str) -> tuple[int, int] | None:
    """Return the needed and the available bytes from the compiler's error; None for an error of another kind."""
    found = parse_shortage(error)
    return (parse_bytes(found.needed), parse_bytes(found.available)) if found.needed else None


def _sum_arguments(traced: Mapping[str, Any], nbytes: Sequence[int]) -> dict[str, int]:
    """Return the sizes of a program's arguments on a core, by their kind."""
    sizes = dict.fromkeys(("weights", "optimizer", "batch", "other"), 0)
    for argument, argument_bytes in zip(traced["arguments"], nbytes, strict=True):
        kind = {"state": "weights" if argument["name"] else "optimizer", "input": "batch"}.get(
            argument["source"], "other"
        )
        sizes[kind] += argument_bytes
    return sizes


def _count_bytes_per_core(argument: Mapping[str, Any], cores: int) -> int:
    """Return the bytes of an argument on one core, as far as they are known without the compiler's layout."""
    axis = argument["axis"]
    shape = argument["shape"]
    nbytes = int(argument["nbytes"])
    if axis is None or axis >= len(shape):  # whole on every core
        return nbytes
    rows = int(shape[axis])
    return nbytes // max(1, rows) * math.ceil(rows / cores)


def _split_shapes(traced: Mapping[str, Any], cores: int) -> set[tuple[int, ...]]:
    """Return the shapes in which split weights travel between cores: whole, and one or two parts."""
    shapes = set()
    for argument in traced["arguments"]:
        axis = argument.get("axis")
        if argument["source"] == "state" and axis is not None:
            shape = list(argument["shape"])
            part = math.ceil(shape[axis] / cores)
            for size_of_axis in (shape[axis], part, 2 * part, part * cores):
                shapes.add(_ignore_order([*shape[:axis], size_of_axis, *shape[axis + 1 :]]))
    return shapes


def _ignore_order(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape independent of the order of its dimensions, because compilers transpose."""
    return tuple(sorted(size for size in shape if size > 1))


def _list_collectives(
    compiled: Sequence[Operation],
    lines: Sequence[str],
    split: Collection[tuple[int, ...]] = (),
    run_counts: Mapping[str, int] = MappingProxyType({}),
) -> list[Collective]:
    """Return the communication between cores. One operation may occur several times in the text, with one channel."""
    by_name = {operation.name: operation for operation in compiled}
    unique: dict[tuple[str, int | str], Operation] = {}
    for operation in compiled:
        for kind in COLLECTIVES:
            if operation.kind in (kind, f"{kind}-start"):
                kind = _BY_SUMS if kind == "all-reduce" and _adds_rows(operation, by_name) else kind
                unique.setdefault((kind, operation.channel or operation.name), operation)
    counts: Counter[tuple[str, str, bool]] = Counter()
    sizes: Counter[tuple[str, str, bool]] = Counter()
    for (kind, _), operation in unique.items():
        layer = f"{operation.layer} ({operation.phase})" if operation.phase == "backward" else operation.layer
        of_weights = all(_ignore_order(a.shape) in split for a in operation.arrays if math.prod(a.shape) > 1)
        place = kind, describe_place(layer, operation.line, lines), bool(split) and of_weights
        runs = run_counts.get(operation.computation, 1)
        counts[place] += runs
        sizes[place] += runs * operation.nbytes
    return [
        Collective(kind, place, counts[kind, place, of_weights], nbytes, of_weights)
        for (kind, place, of_weights), nbytes in sizes.most_common()
    ]


def _adds_rows(operation: Operation, by_name: Mapping[str, Operation]) -> bool:
    """True if the operands of a sum over cores are zeros except for each core's own rows.

    The partitioner inserts such sums itself, so they have no user's line. They aren't recognized if a fusion inserts
    the rows.
    """
    if operation.phase:
        return False
    for name in operation.operands:
        while name in by_name and by_name[name].kind == "bitcast":
            name = by_name[name].operands[0]
        if "dynamic-update-slice" in name:
            return True
    return False


def _warn_of_gathers(collectives: Sequence[Collective]) -> dict[str, str]:
    gathers = [one for one in collectives if one.gathers]
    if not gathers:
        return {}
    total = sum(one.nbytes for one in gathers)
    count = sum(one.count for one in gathers)
    most = "; ".join(f"{one.where} ({one.kind}, {format_bytes(one.nbytes)})" for one in gathers[:3])
    times = say_count(count, "time")
    message = f"rows travel between cores, {times} and {format_bytes(total)} per step, where sums would do: {most}"
    return {"gathers": f"{message}. Reduce over the rows of each core first"}


def _warn_of_dtypes(traced_operations: Sequence[Operation], traced: Mapping[str, Any]) -> dict[str, str]:
    """Warn of float32 products in a bfloat16 precision, and of types that a TPU emulates."""
    found: dict[str, str] = {}
    lines = traced["lines"]
    products = [o for o, multiplied in find_products(traced_operations) if multiplied == "f32"]
    if traced["precision"] != "fp32" and products:
        places = Counter(describe_place(o.layer, o.line, lines) for o in products)
        most = ", ".join(place for place, _ in places.most_common(3))
        found["float32"] = (
            f"{say_count(len(products), 'matrix product')} in float32, with precision={traced['precision']!r}: {most}. "
            "Call them inside autocast, or cast their inputs"
        )
    wide = {
        o.name: (array, describe_place(o.layer, o.line, lines))
        for o in traced_operations
        for array in o.arrays
        if array.dtype in _WIDE and math.prod(array.shape) > 1 and o.kind not in _WITHOUT_WORK
    }
    largest = sorted(wide.values(), key=lambda pair: pair[0].nbytes, reverse=True)
    if largest:
        most = ", ".join(f"{array} of {place}" for array, place in list(dict.fromkeys(largest))[:3])
        found["64-bit"] = (
            f"{say_count(len(wide), 'array')} of 64-bit types, which a TPU emulates: {most}. Use float32 and int32"
        )
    return found


def _warn_of_padding(
    traced: Mapping[str, Any], compiled: Sequence[tuple[Operation, bool]], layouts: Sequence[Array]
) -> dict[str, str]:
    """Warn of arrays that are much larger in the TPU's memory than their values, because they are padded to tiles."""
    named = [
        (array.padded - array.nbytes, f"{argument['name'] or argument['source']} {array}")
        for argument, array in zip(traced["arguments"], layouts, strict=True)
    ]
    made = [
        (array.padded - array.nbytes, f"{array} of {describe_place(operation.layer)}")
        for operation, entry in compiled
        if entry and operation.kind in ("fusion", *_PRODUCTS)
        for array in operation.arrays
    ]
    largest = sorted(dict.fromkeys(waste for waste in (*named, *made) if waste[0] >= _WASTED), reverse=True)
    if not largest:
        return {}
    most = ", ".join(f"{name} ({format_bytes(waste)})" for waste, name in largest[:3])
    message = (
        f"arrays are padded to whole tiles of (8, 128): {most} are unused. Choose widths that are multiples of 128"
    )
    return {"padding": message}
