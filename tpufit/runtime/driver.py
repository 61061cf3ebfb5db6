"""`Driver`: what the engine needs from a runtime for TPUs, and `driver`: the driver of the installed runtime.

The engine in this package decides what is traced, compared, replayed and audited. A driver starts the cores, copies
tensors, traces operations on its own tensors, and compiles and runs the graph of a trace.

| package | its runtime |
| --- | --- |
| `drivers/xla` | torch_xla 2.8 and 2.9 |
| `drivers/torchtpu` | torch_tpu, from torch 2.11 on |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from torch import Tensor

from ..backend import Cores, Placement
from ..utils import releases
from .trace_seeds import Place, TraceSeeds

_PACKAGES = {"torch_xla": "tpufit.drivers.xla", "torch_tpu": "tpufit.drivers.torchtpu"}


@dataclass(frozen=True)
class CoresRequest:
    """The cores that a call requests: how many (None: all), and the number of a single core (None: any)."""

    count: int | None
    index: int | None


@dataclass(frozen=True)
class Trace:
    """A trace whose graph will be compiled."""

    graph: Any
    roots: list[Tensor]  # its outputs
    values: list[Tensor]  # its inputs
    axes: Sequence[int | None]  # the dimension along which each tensor of the state is split over the cores
    role: str
    cause: str  # why the graph is needed, for the report

    @property
    def output_axes(self) -> list[int | None]:
        """The dimension along which each output is split over the cores, or None. Changes of the state come first."""
        changed = [self.axes[i] for i in self.graph.changed]
        return changed + [None] * (len(self.roots) - len(changed))


class Driver(ABC):
    """A runtime for TPUs.

    Attributes:
        name: The name of its package, for messages.
        device_type: The type of its devices, `"xla"`.
        dispatch_key: The dispatch key of its tensors, `"XLA"`.
        is_lazy: True if its tensors record operations at all times, so that a trace can be started directly.
        donates_from: On a CPU, the bytes of a state from which a step writes the new state over the old.
    """

    name: str
    device_type: str
    dispatch_key: str
    is_lazy: bool
    donates_from: float

    # Cores

    @abstractmethod
    def load(self) -> None:
        """Import the runtime without starting it.

        Raises:
            VersionError: tpufit doesn't support its version or torch's.
        """

    @abstractmethod
    def start(self, request: CoresRequest, cores: Any, asked_by: str) -> tuple[int, int, str, int]:
        """Start the runtime on cores.

        Args:
            request: The cores.
            cores: The user's argument, for errors.
            asked_by: The call that requests the cores, for errors.

        Returns:
            How many cores, the number of a single core (else 0), the kind of device, such as `"TPU"`, and the number
            of hosts.
        """

    def start_absent(self, count: int) -> str:
        """Start the runtime for tracing only, with this number of absent cores; return the kind of device."""
        raise NotImplementedError(f"{self.name} can't trace steps for absent cores")

    @abstractmethod
    def connect_hosts(self, processes: int) -> None:
        """Connect the hosts of a pod, after the start, if the start hasn't."""

    def has_hosts(self) -> bool:
        """Return True if it is known before the start that other hosts run this script, on any kind of device."""
        return False

    @abstractmethod
    def platform(self) -> str:
        """Return the kind of device for `"auto"`, without starting the runtime."""

    @abstractmethod
    def count_available_cores(self) -> int:
        """Return the number of cores of the running runtime."""

    @abstractmethod
    def memory_info(self) -> Mapping[str, int]:
        """Return the bytes of a core's memory as `"limit"` and `"used"`; empty if the runtime doesn't report them."""

    @abstractmethod
    def find_kind(self) -> str:
        """Return the runtime's name of its kind of core, such as `"TPU v5 lite"` or `"cpu"`."""

    @abstractmethod
    def detach_forked_process(self) -> None:
        """Prevent a forked process from waiting for the device at its end."""

    # Placements

    @abstractmethod
    def make_placement(self, cores: Cores, recorder: Any) -> Placement:
        """Return the placement of steps on cores, or on a recorder."""

    def send_parts(self, parts: Sequence[Tensor], axis: int, block: int, rows: int, placement: Placement) -> Tensor:
        """Send this host's parts of a batch of `rows` rows along `axis`; each part has at most `block` rows."""
        raise NotImplementedError(f"tpufit computes on one host with {self.name}")

    def fetch_parts(self, tensor: Tensor) -> Tensor:
        """Read this host's rows of a computed tensor."""
        raise NotImplementedError(f"tpufit computes on one host with {self.name}")

    # Values

    @abstractmethod
    def read(self, tensors: Sequence[Tensor], collective: bool) -> list[Tensor]:
        """Copy device tensors to the host. **This waits**. If `collective`, all hosts read the same tensors."""

    @abstractmethod
    def read_one(self, tensor: Tensor) -> Tensor:
        """Copy one tensor, computed or being computed, to the host. **This waits**."""

    @abstractmethod
    def wait_for(self, tensor: Tensor) -> None:
        """Wait until the device has computed a tensor, which may have rows on other hosts."""

    @abstractmethod
    def split_axis(self, tensor: Tensor) -> int | None:
        """Return the dimension along which a tensor is split over the cores; None if it is whole."""

    @abstractmethod
    def compute(self, tensors: Sequence[Tensor], wait: bool = False) -> None:
        """Start the pending work of only these tensors, without writing over any memory that it reads."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until the device has done all started work."""

    @abstractmethod
    def find_pending(self, tensors: Sequence[Tensor]) -> list[int]:
        """Return the indices of the tensors without a value. `tensors` isn't empty, and all are on the device."""

    def count_pending(self) -> int:
        """Return the number of pending tensors on the device; 0 if tensors from before a trace are never pending."""
        return 0

    def count_copies(self) -> Hashable:
        """Return a number that changes with each copy on the device, if copies share memory until a change."""
        return 0

    def find_written(self) -> list[Tensor]:
        """Return older tensors that the current trace has changed. Lazy drivers return none, see `count_pending`."""
        return []

    def list_own(self) -> list[Tensor]:
        """Return the tensors that the driver itself keeps during the current trace."""
        return []

    @abstractmethod
    def identity(self, tensor: Tensor) -> int:
        """Return the number of a tensor's value, which tensors with one value share.

        With a lazy driver later values have higher numbers.
        """

    @abstractmethod
    def handles(self, tensors: Sequence[Tensor]) -> list[Hashable]:
        """Return the identity of each tensor's memory. All tensors must have been computed."""

    @abstractmethod
    def alias_memory(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return new tensors over these tensors' current memory, which don't show later changes of the originals."""

    @abstractmethod
    def put_behind_barrier(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors of equal values behind an optimization barrier, which are computed together."""

    def copy_apart(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy tensors of a state into memory that no other copy shares. Only for a driver that isn't lazy."""
        raise NotImplementedError

    def note_exposed(self, tensors: Sequence[Tensor]) -> None:  # noqa: B027 - one process has nothing to note
        """Note that user code may have changed these tensors in place."""

    @abstractmethod
    def apply_view(self, tensor: Tensor, view: Tensor) -> Tensor:
        """Apply the operations that made a functional view to a tensor other than its base."""

    # Traces

    @abstractmethod
    def tracing(self) -> AbstractContextManager[object]:
        """A context for one trace, from its beginning until its graph has run."""

    def show_values(self, values: list[Tensor]) -> list[Tensor]:
        """Return tensors with these values for the current trace; changing them doesn't change the values.

        A runtime whose values never change in place returns them directly.
        """
        return values

    def body(self) -> AbstractContextManager[object]:
        """A context for the Python of the current trace, in which operations are recorded instead of computed."""
        return nullcontext()

    def resolve(self, tensors: Sequence[Tensor]) -> None:  # noqa: B027 - by default there are no such tensors
        """After the current trace has run, replace stand-ins among these tensors by the values that they show."""

    @abstractmethod
    def lend_values(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Return new tensors, like `show_values`, for the user's tensors to show in a trace that isn't run."""

    @abstractmethod
    def trace_seeds(self, placement: Placement, seeds: Sequence[int]) -> TraceSeeds:
        """Return the source of a trace's random numbers."""

    @abstractmethod
    def seed_tensors(self, placement: Placement, seeds: Sequence[int], places: Sequence[Place]) -> list[Tensor]:
        """Return the random states at these places, for these steps' seeds, as device tensors for a graph's inputs."""

    @abstractmethod
    def work_of(self, tensor: Tensor) -> Hashable:
        """Return the identity of the work that computes a pending tensor."""

    @abstractmethod
    def inputs_of(self, roots: Sequence[Tensor]) -> list[Tensor]:
        """Return the inputs of the graph of some traced tensors, in the graph's order."""

    @abstractmethod
    def hash_of(self, roots: Sequence[Tensor], values: Sequence[Tensor], donated: Sequence[int]) -> Hashable:
        """Return the identity of a graph with these outputs and inputs; it may write over the donated inputs."""

    def outline_of(self, roots: Sequence[Tensor], values: Sequence[Tensor], donated: Sequence[int]) -> Hashable:
        """Return a cheaper identity, which ignores which of several inputs of one shape is used; None without one."""
        return None

    @abstractmethod
    def revoke_donation(self, values: Sequence[Tensor]) -> None:
        """Revoke the donation of these values to a graph that won't run."""

    @abstractmethod
    def compile(self, trace: Trace) -> None:
        """Compile the graph of a trace; it is later started by its hash."""

    @abstractmethod
    def text_of(self, roots: Sequence[Tensor]) -> str:
        """Return the text of the graph of some traced tensors, for counting operations."""

    def serialize(self, trace: Trace) -> bytes:
        """Return a trace's program for a compiler elsewhere: XLA's serialized proto, or StableHLO as text."""
        raise NotImplementedError(f"{self.name} can't provide programs for a preflight")

    # What a graph depends on besides its operations

    @abstractmethod
    def set_matmul_precision(self, name: str) -> None:
        """Set the precision of float32 matrix products in graphs traced from now on."""

    @abstractmethod
    def lowering(self, matmul_precision: str) -> AbstractContextManager[object]:
        """A context in which graphs are traced and lowered with a precision, even if another model has set another."""

    def variables(self) -> tuple[str, ...]:
        """Return what the next compilation reads from the environment."""
        return ()

    def checking_shapes(self) -> AbstractContextManager[object]:
        """A context for the first trace of a step, in which shapes that don't fit raise PyTorch's error."""
        return nullcontext()

    # Operations

    @abstractmethod
    def compute_keep_mask(self, words: Sequence[Tensor], shape: tuple[int, ...], limit: int, number: int) -> Tensor:
        """Return which elements of a shape a dropout keeps, see `ops.dropout`; from two words of the seed."""

    @abstractmethod
    def compute_once(self, tensor: Tensor) -> Tensor:
        """Return a traced tensor that is computed only once, and read from memory by all users."""

    def device_module(self) -> AbstractContextManager[object]:
        """A context in which PyTorch finds a module named like the device."""
        return nullcontext()

    @abstractmethod
    def jax_call(
        self, function: Callable[..., Any], arguments: Sequence[Any], platform: str, name: str
    ) -> tuple[Callable[..., list[Tensor]], list[Any]]:
        """Turn a function of JAX arrays into one of traced tensors; also return its results' shapes and types."""

    # Reports

    @abstractmethod
    def extract_message(self, error: BaseException) -> str:
        """Return the text of an error of the runtime for users."""

    @abstractmethod
    def count_fallbacks(self) -> Counter[str]:
        """Return how often each operation has run on the host, including reads of a value."""

    @abstractmethod
    def count_reads(self) -> Hashable:
        """Return a number that changes with each read of a value; a change during a trace means that it was cut."""

    @abstractmethod
    def count_compiled(self) -> int:
        """Return the number of graphs compiled so far."""

    @abstractmethod
    def get_seconds_executing(self) -> float:
        """Return the seconds that the device has computed, if the runtime reports them."""

    @abstractmethod
    def count_live_tensors(self) -> int:
        """Return the number of tensors on the device."""

    @abstractmethod
    def metrics_report(self) -> str:
        """Return the runtime's report of its counters."""

    @abstractmethod
    def start_profile(self, folder: Any) -> None:
        """Start recording a profile in a folder."""

    @abstractmethod
    def stop_profile(self) -> None:
        """Stop recording, and write the profile."""

    def scope(self, name: str) -> AbstractContextManager[None]:
        """A context in which traced operations carry a name."""
        return nullcontext()


@cache
def driver() -> Driver:
    """Return the driver of the installed runtime, without starting it."""
    name = "torch_tpu" if releases.find_version("torch_tpu") and not releases.find_version("torch_xla") else "torch_xla"
    package = import_module(_PACKAGES[name])
    found: Driver = package.DRIVER
    return found


def on_device(tensor: Tensor) -> bool:
    """True for a tensor on the runtime's device."""
    return tensor.device.type == driver().device_type
