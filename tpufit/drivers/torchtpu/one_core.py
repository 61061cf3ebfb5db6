"""`OneCore`: tensors and programs on a single core."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .compute_modes import computing
from .private_names import names
from .programs import Runner, compile_text


@dataclass(frozen=True)
class Program:
    """A compiled program of one core.

    Attributes:
        run: Starts the program.
        loaded: True if an earlier process compiled the program.
    """

    run: Runner
    loaded: bool

    def prepare_start(self, inputs: list[Tensor]) -> Iterator[list[Tensor]]:
        """Prepare a start. The returned iterator has one item, the outputs; `next` starts the program, in C."""
        return map(self.run, [inputs])

    def note_start(self, outputs: Sequence[list[Tensor]]) -> None:
        """Note the outputs of a start, or none after a failed start."""

    def __call__(self, inputs: list[Tensor]) -> list[Tensor]:
        """Run the program."""
        outputs: list[list[Tensor]] = []
        starting = self.prepare_start(inputs)
        try:
            outputs.extend(starting)
        finally:
            self.note_start(outputs)
        return outputs[0]


class OneCore:
    """One core. `CoreGroup` is the subclass for several cores.

    Attributes:
        count: The number of cores of all hosts.
        hosts: The number of hosts.
        own: The numbers of this host's cores.
        draws: True if operations may draw random numbers from the device's generator.
    """

    count = 1
    hosts = 1
    own = range(1)
    draws = True

    def send(self, tensors: Sequence[Tensor], axes: Sequence[int | None]) -> list[Tensor]:
        """Copy host tensors to the cores, split along these dimensions (None: whole to each core)."""
        with computing(), torch.no_grad():
            return [tensor.detach().contiguous().to("tpu") for tensor in tensors]

    def compile(
        self, text: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor] = (), axes: Sequence[int | None] = ()
    ) -> Program:
        """Compile a program for all cores.

        Args:
            text: The program's StableHLO.
            inputs: Inputs that are split over the cores like all later inputs.
            outputs: Tensors with the shapes of the program's outputs; only needed with `axes`.
            axes: The dimension along which each output is split over the cores, or None (default: all are whole).
        """
        return Program(*compile_text(text))

    def read(self, tensors: Sequence[Tensor], collective: bool = False) -> list[Tensor]:
        """Copy computed tensors to the host. **This waits**. If `collective`, all hosts read the same tensors."""
        with computing():
            names().synchronize_list(list(tensors), False)
            return [tensor.detach().cpu() for tensor in tensors]

    def prepare_read(self, tensor: Tensor) -> Tensor | None:
        """Wait until user code can read a tensor. Return the value if the tensor itself doesn't have it, else None."""
        return None

    def wait_for(self, tensor: Tensor) -> None:
        """Wait until a tensor is computed. **This waits**."""
        self.read([tensor])

    def has_value(self, tensor: Tensor) -> bool:
        """True if a tensor is computed or being computed; False if it is only recorded by a trace."""
        return bool(names().is_materializing(tensor))

    def compute(self, tensors: Sequence[Tensor], wait: bool = False) -> None:
        """Start to compute tensors; if `wait`, wait for them."""
        with computing():
            names().synchronize_list(list(tensors), wait)

    def compute_all(self) -> None:
        """Start to compute all pending tensors."""
        with computing():
            names().synchronize_device(0, False)

    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors with the same values, which don't show later changes of the originals."""
        with torch.no_grad():
            return [tensor.detach().clone() for tensor in tensors]

    def copy_apart(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy tensors into memory that no other copy shares; `clone` and `copy_` share memory until a change."""
        if not tensors:
            return []
        with computing(), torch.no_grad():
            copies: list[Tensor] = names().barrier([tensor.detach() for tensor in tensors])
            names().synchronize_list(copies, False)
        return copies

    def wait(self) -> None:
        """Wait until the device has done all started work."""
        with computing():
            names().synchronize_device(0, True)

    def axis_of(self, tensor: Tensor) -> int | None:
        """Return the dimension along which a tensor is split over the cores; None if each core has the whole tensor."""
        return None

    def forget(self, tensors: Sequence[Tensor]) -> None:
        """Note that user code may have changed these tensors in this process only."""
