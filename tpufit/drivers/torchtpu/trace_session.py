"""`Session`: a trace on TorchTPU. It tracks the trace's inputs, new tensors and changes.

TorchTPU computes immediately; in a session's mode it only records operations. In place of each value, an input or any
other tensor that it uses, the trace works with a stand-in, which is a pending copy. The user's tensor shows the
stand-in until the trace ends, so that the trace may change it, as a whole or by a view.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import TensorWeakRef

from ...errors import PreflightError
from ...runtime.aliases import identify_storage
from .compute_modes import computing, recording
from .jax_calls import JaxCalls
from .one_core import OneCore
from .private_names import names
from .programs import Built, keep_arguments, list_used, text_of
from .tensor_identity import handle_of, on_tpu, place_of

# Errors that a trace can't handle: reading a value, and operations that TorchTPU lacks.
_READS_A_VALUE = ("during an FX trace", "cannot Materialize() a placeholder")  # the latter for a stand-in itself
_LACKS_OPERATION = "is not implemented for TPU"


class Session(TorchDispatchMode):
    """A trace.

    Args:
        fallbacks: Called with the name of each operation that runs on the host, including reads of a value.
        cores: The cores, which have the values and compute.
        jax_calls: The JAX functions that the trace calls.

    Attributes:
        built: The last graph that was built.
    """

    def __init__(self, fallbacks: Callable[[str], None], cores: OneCore, jax_calls: JaxCalls) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fallbacks = fallbacks
        self._cores = cores
        self._jax_calls = jax_calls
        self._values: list[Tensor] = []  # the values that the graph may take
        self._arguments: list[Tensor] = []  # the placeholder of each value in the trace
        self._shown_values: dict[int, Tensor] = {}  # by the storage of the stand-in that shows the value
        self._stand_ins: dict[int, Tensor] = {}  # by the storage of the value
        self._user_tensors: list[tuple[TensorWeakRef, Tensor]] = []  # that show stand-ins, and their values
        self._direct_values: set[int] = set()  # the storages of values that the graph takes without a stand-in
        self._new_storages: set[int] = set()  # that the trace has created
        self._storages: list[Any] = []  # references to all these storages, so that no address is reused
        self._changed: set[int] = set()  # the storages of stand-ins that the trace has changed
        self._text: tuple[Sequence[Tensor], str] | None = None  # the text of the current graph of some tensors
        self.built: Built | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spare each operation the context in which torch.compile is off."""
        return False

    # Inputs

    def show(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Return stand-ins for values."""
        shown = []
        with recording(), torch.no_grad():
            for value in values:
                value = value.detach()
                argument = names().placeholder(list(value.shape), value.dtype, False)
                self._add(value, argument)
                stand_in = argument.clone()
                self._shown_values[identify_storage(stand_in)] = value
                if _is_whole(value):
                    self._stand_ins[identify_storage(value)] = stand_in
                self._storages.append(stand_in.untyped_storage())
                shown.append(stand_in)
        return shown

    def take(self, value: Tensor) -> None:
        """Add a value that the trace uses without a stand-in, and never changes."""
        self._direct_values.add(identify_storage(value))
        self._add(value, value)

    def _add(self, value: Tensor, argument: Tensor) -> None:
        self._text = None
        self._values.append(value)
        self._arguments.append(argument)

    # Operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._cores.draws and torch.Tag.nondeterministic_seeded in func.tags:
            raise PreflightError(
                f"the step draws random numbers by {func.name()}, which torch_tpu traces only where its device is. "
                "Draw them by F.dropout, or run the preflight with torch_xla: pip install 'tpufit[preflight]'"
            )
        inputs = list(_tensors_in(args, kwargs))
        self.note(inputs)
        for i, name in _written_arguments(func):
            for tensor in _tensors_in(args[i : i + 1] or (kwargs.get(name),), {}):
                self._note_change(tensor)
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            text = str(error)
            if not any(part in text for part in (*_READS_A_VALUE, _LACKS_OPERATION)):
                raise
            self._fallbacks(func.name())
            return self._compute(func, args, kwargs, on_host=_LACKS_OPERATION in text)
        results = _tensors_in((result,), {})
        if any(map(on_tpu, inputs)):  # the results have no value: asking TorchTPU would take longer than the operation
            for tensor in results:
                if on_tpu(tensor) and not self._knows(identify_storage(tensor)):
                    self._add_new(tensor)
        else:
            self.note(results)
        return result

    def note(self, tensors: Iterable[Tensor]) -> None:
        """Record the arguments or results of an operation, including operations that bypass the session."""
        self._text = None
        for tensor in tensors:
            self._note(tensor)

    def _note(self, tensor: Tensor) -> None:
        if tensor.is_cpu:  # a cheap test for most of the others
            return
        storage = identify_storage(tensor)
        if self._knows(storage) or not on_tpu(tensor):
            return
        base = tensor._base
        if base is not None and identify_storage(base) != storage:  # the view has other memory now
            base = None
        if storage in self._stand_ins or self._cores.has_value(tensor if base is None else base):
            self._show_stand_in(tensor)
            if base is not None:  # changes of a view must show in its base
                self._show_stand_in(base)
        else:  # a result, or a part of an operation that modes don't see, such as an LSTM
            self._add_new(tensor)

    def _knows(self, storage: int) -> bool:
        return storage in self._new_storages or storage in self._shown_values or storage in self._direct_values

    def _add_new(self, tensor: Tensor) -> None:
        """Add a tensor that the trace has created."""
        self._new_storages.add(identify_storage(tensor))
        self._storages.append(tensor.untyped_storage())

    def _show_stand_in(self, tensor: Tensor) -> None:
        """Let a tensor with a value show a stand-in until the trace ends; tensors with shared memory share it."""
        value = tensor.detach()
        storage = identify_storage(value)
        stand_in = self._stand_ins.get(storage)
        if stand_in is None or stand_in.dtype is not value.dtype:
            with computing(), torch.no_grad():
                whole = value if _is_whole(value) else _whole_of(value)
            self._cores.compute([whole])
            (stand_in,) = self.show([whole])
            self._stand_ins[storage] = stand_in
        if place_of(value) != place_of(stand_in):
            with recording(), torch.no_grad():
                stand_in = stand_in.as_strided(value.shape, value.stride(), value.storage_offset())
        self._user_tensors.append((TensorWeakRef(tensor), value))
        tensor.data = stand_in

    def _note_change(self, tensor: Tensor) -> None:
        if not tensor.is_cpu and identify_storage(tensor) in self._shown_values:
            self._changed.add(identify_storage(tensor))

    def _compute(self, func: Any, args: Any, kwargs: Any, on_host: bool) -> Any:
        """Compute an operation that needs values, in the middle of the trace."""
        needed = [t for t in _tensors_in(args, kwargs) if on_tpu(t)]
        values = iter(self.evaluate(needed))
        with computing():
            real = tree_map_only(Tensor, lambda t: next(values) if on_tpu(t) else t, (args, kwargs))
            if on_host:
                real = tree_map_only(Tensor, lambda t: t.cpu(), real)
            result = func(*real[0], **real[1])
            if on_host:
                result = tree_map_only(Tensor, lambda t: t.to("tpu"), result)
            names().synchronize_list([tensor for tensor in _tensors_in((result,), {}) if on_tpu(tensor)], False)
        self.note(_tensors_in((result,), {}))
        return result

    # State

    def is_pending(self, tensor: Tensor) -> bool:
        """True if the graph has yet to compute a tensor."""
        storage = identify_storage(tensor)
        value = self._shown_values.get(storage)
        if value is not None:
            return storage in self._changed or place_of(tensor) != place_of(value)
        return storage in self._new_storages

    def find_written(self) -> list[Tensor]:
        """Return the tensors created before the trace that it has changed, or given another value by `data`."""
        alive = [(tensor, identify_storage(tensor)) for weak, _ in self._user_tensors if (tensor := weak()) is not None]
        return [tensor for tensor, storage in alive if storage in self._changed or storage not in self._shown_values]

    def list_kept(self) -> list[Tensor]:
        """Return the tensors that the session itself keeps."""
        values = (value for _, value in self._user_tensors)
        return [*self._arguments, *self._shown_values.values(), *self._stand_ins.values(), *values]

    def end(self) -> None:
        """Restore the values of the user's tensors that still show stand-ins."""
        for weak, value in self._user_tensors:
            tensor = weak()
            if tensor is not None and identify_storage(tensor) in self._shown_values:
                tensor.data = value

    def handle(self, tensor: Tensor) -> Hashable:
        """Return the identity of the memory of a tensor's value."""
        value = self._shown_values.get(identify_storage(tensor))
        return handle_of(tensor) if value is None else handle_of(value)

    def find_value(self, tensor: Tensor) -> Tensor | None:
        """Return the value behind a stand-in; None if the tensor is pending or isn't a stand-in."""
        value = self._shown_values.get(identify_storage(tensor))
        return None if value is None or self.is_pending(tensor) else value

    def evaluate(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Compute tensors of the trace now, and return their values."""
        waiting = [t for t in tensors if self.is_pending(t)]
        computed = iter(self._compute_now(waiting) if waiting else [])
        return [
            next(computed) if self.is_pending(t) else self._shown_values.get(identify_storage(t), t) for t in tensors
        ]

    def _compute_now(self, roots: Sequence[Tensor]) -> list[Tensor]:
        text = text_of(roots, self._arguments)
        taken = list_used(text, len(self._arguments))
        inputs = [self._values[i] for i in taken]
        with computing():
            text = self._jax_calls.insert(keep_arguments(text, taken, len(self._arguments)))
            return list(self._cores.compile(text, inputs)(inputs))

    def inputs_of(self, roots: Sequence[Tensor]) -> list[Tensor]:
        """Return the values that the graph of some tensors takes."""
        return [self._values[i] for i in list_used(self.text_of(roots), len(self._arguments))]

    def build(self, roots: Sequence[Tensor], values: Sequence[Tensor]) -> Built:
        """Build the graph of tensors with these inputs, in this order."""
        numbers = {id(value): i for i, value in enumerate(self._values)}
        text = self.text_of(roots)
        self.built = Built(keep_arguments(text, [numbers[id(value)] for value in values], len(self._values)))
        return self.built

    def text_of(self, roots: Sequence[Tensor]) -> str:
        """Return the text of the graph of some tensors; cached, because building it takes long.

        It has all arguments, which TorchTPU needs. Unused arguments are removed afterwards.
        """
        if self._text is None or self._text[0] is not roots:
            self._text = roots, text_of(roots, self._arguments)
        return self._text[1]


def _tensors_in(args: Iterable[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, (list, tuple)):
            yield from (one for one in arg if isinstance(one, Tensor))


def _is_whole(tensor: Tensor) -> bool:
    """True if a tensor covers all of its memory, in order."""
    return tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()


def _whole_of(tensor: Tensor) -> Tensor:
    """Return all of a tensor's memory, as one row."""
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)


@cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Return the positions and names of the arguments that an operation writes to."""
    return tuple(
        (i, argument.name)
        for i, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
