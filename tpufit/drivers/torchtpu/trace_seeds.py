"""`TpuSeeds`: the random numbers of a trace on TorchTPU, whose generator's state is a tensor: a seed and a count."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...backend import Placement
from ...runtime.aliases import identify_storage
from ...runtime.trace_seeds import Draw, Place, TraceSeeds
from ...utils.random import to_signed
from .compute_modes import computing, recording
from .private_names import names
from .tensor_identity import handle_of
from .trace_session import Session

_RANGE = 1 << 64


@dataclass(frozen=True, eq=False)
class GeneratorState:
    """A state of the generator."""

    tensor: Tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GeneratorState) and identify_storage(self.tensor) == identify_storage(other.tensor)

    __hash__ = None  # type: ignore[assignment]


class TpuSeeds(TraceSeeds):
    """The random numbers of a trace or, without a session, of a step that is computed immediately."""

    def __init__(self, placement: Placement, seeds: Sequence[int], session: Session | None) -> None:
        super().__init__(seeds)
        self._placement = placement
        self._session = session
        self._places: dict[Hashable, Place] = {}
        self._generator: Any = None

    def place_of(self, value: Tensor, handle: Hashable) -> Place | None:
        return self._places.get(handle)

    @contextmanager
    def inside(self) -> Iterator[None]:
        if self._session is None:
            yield
            return
        with computing():
            native = names().default_generator(0)
        with recording():
            self._generator = names().make_generator(native)
        names().set_default_generator(self._generator)
        self._begin(self._first_base())  # for a step that draws before its seed is set
        try:
            yield
        finally:
            names().clear_default_generators()

    def _first_base(self) -> Tensor:
        return self._begin_user_seed(0)

    def _begin_step(self, seed: int) -> Tensor:
        state = self._begin_user_seed(seed)
        self._places.setdefault(handle_of(state), (self._step, 0))
        return state

    def draw(self) -> Draw:
        draw = super().draw()
        # Converted for each draw: a tensor of the trace that is kept for the step would count as escaped from it.
        return replace(draw, seed=draw.seed[0].to(torch.int64))

    def _begin_user_seed(self, seed: int) -> Tensor:
        state = state_of(seed, self._placement)
        if self._session is None:
            names().manual_seed(seed % _RANGE)
        else:
            self._session.take(state)
            self._go_to(GeneratorState(state))
        return state

    def _native(self) -> Any:
        return GeneratorState(names().generator_state(self._in_use()))

    def _go_to(self, native: Any) -> None:
        names().set_generator_state(self._in_use(), native.tensor)

    def _in_use(self) -> Any:
        return names().default_generator(0) if self._session is None else self._generator


def state_of(seed: int, placement: Placement) -> Tensor:
    """Return the state of a newly seeded generator, on the device."""
    (state,) = placement.send([torch.tensor([to_signed(seed), 0]).view(torch.uint64)])
    return state
