"""`Backend`: the functions that the rest of tpufit asks of a device, beside the methods of the classes in this package.

A module fulfils it: `runtime/conforms.py` lets mypy compare. Each function's own docstring there has its arguments.
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
from .step_load import Load


class Backend(Protocol):
    """A device and its runtime.

    Attributes:
        Recorder: Takes the place of a device that isn't there, and keeps the programs of steps, for a preflight.
        Recorded: A program that it keeps.
        KernelWork: What a kernel of a program computes and moves.
        COUNTS: The type for the classes and the counts of one batch: integers that the device computes at full speed.
    """

    Recorder: Any
    Recorded: Any
    KernelWork: Any
    COUNTS: torch.dtype

    # Cores

    def init(self, cores: CoresArgument = ...) -> None:
        """Settle the cores of the process, before any step."""

    def start(self, cores: CoresArgument, asked_by: str, eager: bool = ...) -> Cores:
        """Start the runtime, or make sure that it runs on these cores."""

    def start_absent(self, count: int, asked_by: str) -> Cores:
        """Start the runtime where steps are only traced, for a preflight."""

    def get_settled_cores(self) -> Cores | None:
        """The cores of the process, if they are settled."""

    def platform(self) -> str:
        """The kind of device that `"auto"` means."""

    def count_available_cores(self, used: int) -> int:
        """The number of cores that this host's device has."""

    def device_memory(self) -> int | None:
        """A core's memory in bytes, if it is known."""

    def memory_used(self) -> int | None:
        """The bytes of a core's memory that are in use, if they are known."""

    def set_matmul_precision(self, name: str) -> None:
        """Set the precision of float32 matrix products."""

    def versions(self) -> dict[str, str]:
        """The versions that the last digits of a training depend on."""

    def message_of(self, error: BaseException) -> str:
        """The text of an error of the runtime, for users."""

    # Hosts

    def process_index(self) -> int:
        """The number of this host."""

    def process_count(self) -> int:
        """The number of hosts."""

    def may_have_hosts(self) -> bool:
        """False if no other host computes with this one, as far as it is known before the start."""

    # Tensors

    def send_rows(self, tensors: Sequence[Tensor], rows: int, placement: Placement, axis: int = ...) -> list[Tensor]:
        """Send this host's rows of a global batch, without waiting."""

    def gather_rows(self, nest: Any, placement: Placement) -> Any:
        """The same values, such that each host can read them."""

    def value_of(self, tensor: Tensor, placement: Placement) -> Tensor | None:
        """Return the value of a tensor on the host; None for one that a step's trace has yet to compute."""

    def fetch_rows(self, nest: Any, mine: Sequence[int], reason: str) -> Any:
        """Copy this host's rows of a step's outputs to the host, which waits."""

    def to_device(
        self, tensors: Sequence[Tensor], placement: Placement, sharding: Sharding | Sequence[Sharding] = ...
    ) -> list[Tensor]:
        """Copy host tensors to the device, without waiting."""

    def to_host(self, tensors: Sequence[Tensor], reason: str, collective: bool = ...) -> list[Tensor]:
        """Copy tensors to the host, which waits."""

    def fetch(self, nest: Any, reason: str) -> Any:
        """Copy the tensors of a nest to the host, which waits once."""

    def fetch_each(self, tensors: Iterable[Tensor], reason: str) -> Iterator[Tensor]:
        """Copy tensors to the host one after the other, which waits."""

    def copy_to_host(self, tensors: Sequence[Tensor], reason: str) -> list[Tensor]:
        """Copy tensors to host memory of their own, which waits once."""

    def move(
        self, tensors: Iterable[Tensor], placement: Placement, names: Names = ..., shardings: Shardings = ...
    ) -> None:
        """Move tensors in place."""

    def swap_value(self, tensor: Tensor, value: Tensor, requires_grad: bool | None = ...) -> Tensor:
        """Give a tensor object another value."""

    def reshard(self, tensors: Iterable[Tensor], placement: Placement, shardings: Shardings) -> None:
        """Let tensors lie over the cores as they should from now on, which may wait."""

    def assuming_finite(self) -> AbstractContextManager[None]:
        """A context in which extremes and sums of exponentials need no care for infinite numbers."""

    def without_unsharding(self) -> AbstractContextManager[None]:
        """A context in which split weights are computed with as they are."""

    def unguarding(self) -> AbstractContextManager[None]:
        """A context in which this thread reads the tensors of a trace directly, without a look at other threads."""

    def copy_into(
        self, targets: Sequence[Tensor], values: Sequence[Tensor], placement: Placement, shardings: Shardings = ...
    ) -> None:
        """Give tensors new values in place, without waiting."""

    # Numbers

    def keeps_count(self, optimizer: Optimizer) -> bool:
        """True if an optimizer can keep its step counter on the device."""

    # Steps

    def placement_on(self, cores: Cores, recorder: Any = ...) -> Placement:
        """The placement of steps on cores, or on absent ones."""

    def state_at(
        self,
        placement: Placement,
        tensors: Iterable[Tensor],
        shardings: Mapping[int, Sharding] | None = ...,
        slots: Callable[[], Sequence[Slot]] = ...,
    ) -> DeviceState:
        """The state of tensors that are at a placement."""

    def program_at(
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
        """A step at a placement."""

    def tracing(self) -> bool:
        """True while a step is being traced."""

    def tracing_since(self) -> float | None:
        """The time when the capture under way began."""

    def recomputing(self, blocks: Mapping[Any, str], seeds: object) -> AbstractContextManager[None]:
        """A context in which blocks, and calls of `torch.utils.checkpoint`, are computed again in the backward pass."""

    def replace_encoder(self) -> AbstractContextManager[None]:
        """A context in which evaluated `nn.TransformerEncoder`s set padded positions to zero, as on the host."""

    def has_kernel(self, operation: str) -> bool:
        """True if the device computes an operation itself."""

    def falls_back(self, name: str) -> bool:
        """True if the device computes no form of an operation."""

    def translate(self, error: BaseException, load: Load | None = ...) -> Exception | None:
        """The error of tpufit for one of the runtime."""

    # Counters

    def counts(self) -> Counts:
        """The counters as they stand."""

    def live_tensors(self) -> int:
        """The number of tensors on the device."""

    def metrics_report(self) -> str:
        """The runtime's own report."""

    def cure_for(self, cause: str) -> str:
        """The cure for what keeps a step from being replayed."""

    def explain_slowness(self, role: str, cause: str, eagerly: bool) -> str:
        """A sentence about a step that isn't replayed, with its cure."""

    def start_profile(self, folder: Any) -> Callable[[], None]:
        """Begin to record a profile, and return what ends the recording."""

    def keeps_bfloat16(self, kind: str) -> bool:
        """True if steps for a kind of device keep the weights of attention in bfloat16."""

    def has_flash(self, kind: str) -> bool:
        """True if there is a kernel for flash attention on a kind of device."""

    def repeats_bits(self, device: torch.device) -> bool:
        """True if a value that a device computes twice is the same to the bit."""

    def work_in(self, line: str) -> Any:
        """The work of the kernel that a line of a program calls, if it says it."""

    def tracing_for(self, kind: str) -> Any:
        """A context in which operations are traced as for a TPU."""

    def scope(self, name: str) -> Any:
        """A context in which traced operations carry a name."""
