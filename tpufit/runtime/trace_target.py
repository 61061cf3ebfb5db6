"""`Target`: what the traces of a program run on: the cores, the state and the sums."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..backend import AttentionForms, Body, Sums
from ..utils.is_compiling import compiling
from .device_state import HeldState
from .driver import driver
from .ops.attention_choice import choose_attention
from .ops.kernels import replace_kernels
from .pending_tensors import drop, find_pending
from .placement import CorePlacement
from .trace_context import tracing_with
from .trace_seeds import TraceSeeds
from .trace_view import TraceView
from .unsharding import Unsharding


@dataclass(frozen=True)
class Target:
    """The device, the state and the sums of a program's graphs."""

    placement: CorePlacement
    role: str  # for which its graphs are counted
    state: HeldState  # read and changed by a step
    sums: Sums
    donates: bool  # whether graphs write the new state over the old
    attention: AttentionForms  # requested by the user
    kept: Callable[[], Mapping[str, Tensor]]  # returns the tensors that the user's Python keeps, by name

    def trace_seeds(self, seeds: list[int]) -> TraceSeeds:
        """Return the source of a trace's random numbers."""
        return driver().trace_seeds(self.placement, seeds)

    def trace(
        self,
        body: Body,
        inputs: list[Tensor],
        seeds: TraceSeeds,
        watch: AbstractContextManager[object],
        view: TraceView | None = None,
    ) -> Any:
        """Run the body over lazy tensors while `watch` observes it. `begin` of the sums must have been called.

        Without a view, the trace can't be replayed, and its graph isn't known.
        """
        shardings = self.state.shardings
        whole = Unsharding(shardings, self.placement) if shardings else None
        with (
            # On one core too, because torch_xla's batch norm in eval mode has no backward pass.
            replace_kernels(),
            choose_attention(self.attention, self.placement),
            tracing_with(tracing=True, draw=seeds.draw, unsharding=whole),
            whole or nullcontext(),
            watch,
            compiling(True),
            driver().body(),
            seeds.inside(),
            seeds.seeded_by_torch(),
            # In this thread, because autograd has no thread for the device if a backward pass ran on the CPU before the
            # runtime was imported, and then fails with an internal error.
            torch.autograd.set_multithreading_enabled(False),
        ):
            with nullcontext() if view is None else view.adopting_replacements():
                result = body(inputs, seeds)
            if shardings:
                self.state.pin(self.state.tensors, self.placement)
            return result

    def launch(self, outputs: Any, new: Sequence[Tensor], because: str) -> Any:
        """Run a trace that can't be replayed for this reason. If it fails, the state that it changed is lost.

        Args:
            outputs: The body's result.
            new: The living tensors that the trace has made.
            because: The reason.
        """
        try:
            changed = [*self.state.list_present(), *self.sums.tensors, *new]
            self.placement.launch(self.role, f"it is traced again on every call, because {because}", changed)
        except BaseException:
            tensors = self.state.tensors
            # Mark before pending work is dropped; afterwards lost tensors can't be distinguished.
            self.state.mark_lost(find_pending(tensors))
            returned = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
            drop([*returned, *self.sums.tensors, *(tensors if self.state.lost else ())])
            raise
        return outputs
