"""The table of a module's layers: their outputs, parameters, and memory."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_leaves

from ..errors import say_count
from ..utils.text import dtype_name, format_bytes, render

_WIDTH = 120  # columns
_NOTHING: Mapping[int, int | None] = {}


def _count_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.nbytes for t in tensors)


def format_table(
    module: nn.Module, outputs: Mapping[str, str] | None = None, split: Mapping[int, int | None] = _NOTHING
) -> str:
    """Format a table of the layers that have parameters or contain no other layer, and of the totals, as text.

    A tensor that several layers share is counted at the first. The output shapes come from `record_outputs`; `split`
    has the dimension along which a parameter is split over the cores, by its `id`.

    Example:
        >>> print(format_table(nn.Linear(2, 3), {"": "8x3"}))
         layer     type    output  parameters  bytes  dtype...
         (module)  Linear  8x3     9           36 B   float32...
        9 parameters (36 B), 9 of them trainable
    """
    rows = Table("layer", "type", "output", "parameters", "bytes", "dtype", "", box=None, header_style="bold")
    owners: dict[int, str] = {}
    for name, layer in module.named_modules():
        named = dict(layer.named_parameters(recurse=False, remove_duplicate=False))
        first = {n: p for n, p in layer.named_parameters(recurse=False) if id(p) not in owners}
        notes = _notes(name, named, owners)
        parts = [f"{n} split along {split[id(p)]}" for n, p in first.items() if id(p) in split]
        notes = ", ".join(filter(None, [notes, *parts]))
        if named or not any(True for _ in layer.children()):
            dtypes = ", ".join(sorted({dtype_name(p.dtype) for p in named.values()}))
            output = (outputs or {}).get(name, "?")
            takes = _size(first.values()) if first else ""
            rows.add_row(
                name or "(module)", type(layer).__name__, output, f"{_count(first.values()):,}", takes, dtypes, notes
            )
    parameters = list(module.parameters())
    trainable = [p for p in parameters if p.requires_grad]
    totals = (
        f"{say_count(_count(parameters), 'parameter')} ({_size(parameters)}), {_count(trainable):,} of them trainable"
    )
    return f"{render(rows, _WIDTH)}\n{totals}"


def describe_memory(
    module: nn.Module, state: Iterable[Tensor], bytes_per_core: Callable[[Iterable[Tensor]], int] = _count_bytes
) -> str:
    """Describe the memory that a training uses on each core, without the activations and batches of its steps.

    `state` is everything outside the module: optimizer state, accumulated gradients, averages; empty if not known yet.
    `bytes_per_core` counts the bytes of some tensors on each core.

    Example:
        >>> describe_memory(nn.Linear(2, 3), [])
        'memory per core: 72 B = 36 B weights + 36 B gradients + ? optimizer (known after a step); activations apart'
    """
    weights = list({id(t): t for t in (*module.parameters(), *module.buffers())}.values())
    gradients = [p for p in module.parameters() if p.requires_grad]
    rest = list(state)
    sizes = [bytes_per_core(tensors) for tensors in (weights, gradients, rest)]
    parts = [
        f"{format_bytes(sizes[0])} weights",
        f"{format_bytes(sizes[1])} gradients",
        f"{format_bytes(sizes[2])} optimizer" if rest else "? optimizer (known after a step)",
    ]
    return f"memory per core: {format_bytes(sum(sizes))} = {' + '.join(parts)}; activations apart"


@contextmanager
def record_outputs(module: nn.Module, found: dict[str, str]) -> Iterator[None]:
    """Return a context that records in `found` the output shapes of layers called in it, by name, at the first call.

    Example:
        >>> import torch
        >>> net, found = nn.Sequential(nn.Linear(2, 3), nn.ReLU()), {}
        >>> with record_outputs(net, found):
        ...     y = net(torch.zeros(8, 2))
        >>> found
        {'0': '8x3', '1': '8x3', '': '8x3'}
    """
    names = {id(layer): name for name, layer in module.named_modules()}

    def note(layer: nn.Module, _: object, output: object) -> None:
        if torch.compiler.is_dynamo_compiling():  # inside a function by `torch.compile`, on the host
            return
        name = names.get(id(layer))
        if name is not None:
            tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            found.setdefault(name, ", ".join(map(_name_shape, tensors)))

    # One global hook, which doesn't change the user's modules.
    handle = register_module_forward_hook(note)
    try:
        yield
    finally:
        handle.remove()


def _name_shape(tensor: Tensor) -> str:
    # PyTorch's encoder makes nested tensors of padded rows, and they have no shape.
    return "nested" if tensor.is_nested else "x".join(map(str, tensor.shape)) or "1"


def _notes(layer: str, named: Mapping[str, Tensor], owners: dict[int, str]) -> str:
    """Note a layer's shared and frozen parameters, and record it as the owner of the others."""
    notes = []
    for name, parameter in named.items():
        owner = owners.setdefault(id(parameter), f"{layer}.{name}".removeprefix("."))
        if owner != f"{layer}.{name}".removeprefix("."):
            notes.append(f"{name} is {owner}")
        elif not parameter.requires_grad:
            notes.append(f"{name} frozen")
    return "frozen" if named and notes == [f"{name} frozen" for name in named] else ", ".join(notes)


def _count(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() for t in tensors)


def _size(tensors: Iterable[Tensor]) -> str:
    return format_bytes(_count_bytes(tensors))
