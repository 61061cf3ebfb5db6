"""`Backend`: the functions that the rest of tpufit calls, besides the methods of the classes in this package.

A module implements the protocol; `runtime/interface_check.py` lets mypy compare them. The docstrings of the
functions in that module describe the arguments.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..utils.counters import Counts
from .attention import AttentionForms
from .cores import Cores, CoresArgument
from .device_state import DeviceState, Slot
from .placement import Names, Placement, Sharding, Shardings
from .program import Program, Sums
from .step_memory import StepMemory


class Backend(Protocol):
    """A device and its runtime.

    Attributes:
        Recorder: Stands in for an absent device, and keeps the programs of steps, for a preflight.
        Recorded: A program that a recorder keeps.
        KernelWork: The operations and bytes of a kernel in a program.
        COUNTS: The dtype for the classes and the counts of one batch: integers that the device computes at full speed.
    """

    Recorder: Any
    Recorded: Any
    KernelWork: Any
    COUNTS: torch.dtype

    # Cores

    def init(self, cores: CoresArgument = ...) -> None:
        """Settle the cores of the process, before any step."""

    def start(self, cores: CoresArgument, asked_by: str, eager: bool = ...) -> Cores:
        """Start the runtime, or check that it already runs on these cores."""

    def start_absent(self, count: int, asked_by: str) -> Cores:
        """Start the runtime for tracing only, with this number of absent cores, for a preflight."""

    def get_settled_cores(self) -> Cores | None:
        """Return the cores of the process; None before they are settled."""

    def platform(self) -> str:
        """Return the kind of device that `"auto"` chooses."""

    def count_available_cores(self, used: int) -> int:
        """Return the number of cores of this host's device."""

    def device_memory(self) -> int | None:
        """Return a core's memory in bytes; None if unknown."""

    def memory_used(self) -> int | None:
        """Return the bytes of a core's memory that are in use; None if unknown."""

    def set_matmul_precision(self, name: str) -> None:
        """Set the precision of float32 matrix products."""

    def versions(self) -> dict[str, str]:
        """Return the installed versions that the last digits of a training depend on."""

    def extract_message(self, error: BaseException) -> str:
        """Return the text of a runtime's error for users."""

    # Hosts

    def process_index(self) -> int:
        """Return the index of this host, from 0."""

    def process_count(self) -> int:
        """Return the number of hosts."""

    def may_have_hosts(self) -> bool:
        """Return False if it is certain, before the start too, that no other host computes with this one."""

    # Tensors

    def send_rows(self, tensors: Sequence[Tensor], rows: int, placement: Placement, axis: int = ...) -> list[Tensor]:
        """Send this host's rows of a global batch, without waiting."""

    def gather_rows(self, nest: Any, placement: Placement) -> Any:
        """Return the same values whole on every core, so that each host can read them."""

    def read_value(self, tensor: Tensor, placement: Placement) -> Tensor | None:
        """Return the value of a computed tensor on the host; None for a pending tensor, as in a step's trace."""

    def fetch_rows(self, nest: Any, mine: Sequence[int], reason: str) -> Any:
        """Copy this host's rows of a step's outputs to the host. **This waits**."""

    def to_device(
        self, tensors: Sequence[Tensor], placement: Placement, sharding: Sharding | Sequence[Sharding] = ...
    ) -> list[Tensor]:
        """Copy host tensors to the device, without waiting."""

    def to_host(self, tensors: Sequence[Tensor], reason: str, collective: bool = ...) -> list[Tensor]:
        """Copy tensors to the host. **This waits**."""

    def fetch(self, nest: Any, reason: str) -> Any:
        """Copy the tensors of a nest to the host. **This waits**, once for all tensors."""

    def fetch_each(self, tensors: Iterable[Tensor], reason: str) -> Iterator[Tensor]:
        """Copy tensors to the host one after the other. **This waits**."""

    def copy_to_host(self, tensors: Sequence[Tensor], reason: str) -> list[Tensor]:
        """Copy tensors to separate host memory. **This waits**, once for all tensors."""

    def move(
        self, tensors: Iterable[Tensor], placement: Placement, names: Names = ..., shardings: Shardings = ...
    ) -> None:
        """Move tensors in place."""

    def swap_value(self, tensor: Tensor, value: Tensor, requires_grad: bool | None = ...) -> Tensor:
        """Give a tensor object a new value."""

    def reshard(self, tensors: Iterable[Tensor], placement: Placement, shardings: Shardings) -> None:
        """Change the shardings of tensors. **This waits** for each tensor whose sharding differs."""

    def assuming_finite(self) -> AbstractContextManager[None]:
        """A context in which extremes and sums of exponentials get only finite numbers, and needn't handle others."""

    def without_unsharding(self) -> AbstractContextManager[None]:
        """A context in which split weights aren't gathered: each core computes with its part of them."""

    def unguarding(self) -> AbstractContextManager[None]:
        """A context in which this thread reads the tensors of a trace without checking for other threads."""

    def copy_into(
        self, targets: Sequence[Tensor], values: Sequence[Tensor], placement: Placement, shardings: Shardings = ...
    ) -> None:
        """Give tensors new values in place, without waiting."""

    # Numbers

    def keeps_count(self, optimizer: Optimizer) -> bool:
        """True if an optimizer can keep its step counter on the device."""

    # Steps

    def make_placement(self, cores: Cores, recorder: Any = ...) -> Placement:
        """Return the placement of steps on cores, or on a recorder that stands in for absent cores."""

    def make_state(
        self,
        placement: Placement,
        tensors: Iterable[Tensor],
        shardings: Mapping[int, Sharding] | None = ...,
        slots: Callable[[], Sequence[Slot]] = ...,
    ) -> DeviceState:
        """Return the state of tensors at a placement."""

    def make_program(
        self,
        placement: Placement,
        role: str,
        state: DeviceState,
        sums: Sums,
        *,
        jit_compile: str | bool = ...,
        donate: bool = ...,
        matmul_precision: str = ...,
        attention: AttentionForms = ...,
        python_state: Callable[[], dict[str, Any]] = ...,
        kept: Callable[[], Mapping[str, Tensor]] = ...,
    ) -> Program:
        """Return the program of a step at a placement."""

    def tracing(self) -> bool:
        """True while a step is being traced."""

    def tracing_since(self) -> float | None:
        """Return the time when the current capture began; None outside of captures."""

    def recomputing(self, blocks: Mapping[Any, str], seeds: object) -> AbstractContextManager[None]:
        """A context in which blocks, and calls of `torch.utils.checkpoint`, are computed again in the backward pass."""

    def replace_encoder(self) -> AbstractContextManager[None]:
        """A context in which an evaluated `nn.TransformerEncoder` sets padded positions to zero, as on the host."""

    def has_kernel(self, operation: str) -> bool:
        """True if the device computes an operation itself."""

    def falls_back(self, name: str) -> bool:
        """True if the device computes no overload of an operation."""

    def translate(self, error: BaseException, memory: StepMemory | None = ...) -> Exception | None:
        """Translate an error of the runtime into an error of tpufit; None for an unknown error."""

    # Counters

    def counts(self) -> Counts:
        """Return the current counters."""

    def count_live_tensors(self) -> int:
        """Return the number of tensors on the device."""

    def metrics_report(self) -> str:
        """Return the runtime's own report."""

    def find_cure(self, cause: str) -> str:
        """Return the cure for what prevents a step from being replayed."""

    def explain_slowness(self, role: str, cause: str, eagerly: bool) -> str:
        """Return a sentence about a step that isn't replayed, with its cure."""

    def start_profile(self, folder: Any) -> Callable[[], None]:
        """Start recording a profile, and return the function that stops the recording."""

    def keeps_bfloat16(self, kind: str) -> bool:
        """True if attention on a kind of device should keep its weights for the backward pass in bfloat16."""

    def has_flash(self, kind: str) -> bool:
        """True if a kind of device has a kernel for flash attention."""

    def repeats_bits(self, device: torch.device) -> bool:
        """True if a device gives the same bits when it computes a value twice."""

    def find_kernel_work(self, line: str) -> Any:
        """Return the work of the kernel that a line of a program calls; None if it calls no marked kernel."""

    def tracing_for(self, kind: str) -> Any:
        """A context in which operations are traced as for this kind of TPU."""

    def scope(self, name: str) -> Any:
        """A context in which traced operations carry a name."""
