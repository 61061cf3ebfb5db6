"""`HostCounters`: the step counters of optimizers that stay on the host."""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


class HostCounters:
    """The numbers in optimizers' state that stay on the host, mostly step counters.

    A replay runs no Python that would advance them, so they are advanced afterwards, by as much as the trace did.
    """

    def __init__(self) -> None:
        self._by_step: dict[Hashable, list[tuple[dict[str, Any], str, float]]] = {}
        self._replayed: Counter[Hashable] = Counter()

    @contextmanager
    def tracing(self, key: Hashable, optimizers: Iterable[Optimizer]) -> Iterator[None]:
        """A context for tracing a step, which notes how much the step's Python adds to each number."""
        self.catch_up()  # before the trace, whose additions would otherwise include those of replays
        optimizers = list(optimizers)
        before = {(id(state), name): value for state, name, value in _host_numbers(optimizers)}
        yield
        added = [(s, name, value - before.get((id(s), name), value)) for s, name, value in _host_numbers(optimizers)]
        self._by_step[key] = [(state, name, value) for state, name, value in added if value]

    @contextmanager
    def restoring_numbers(self, optimizers: Iterable[Optimizer]) -> Iterator[None]:
        """A context at whose end the optimizers' numbers are restored, for Python that runs without a step."""
        self.catch_up()
        optimizers = list(optimizers)
        before = list(_host_numbers(optimizers))
        groups = [(group, dict(group)) for optimizer in optimizers for group in optimizer.param_groups]
        try:
            yield
        finally:
            for group, options in groups:
                group.update(options)
            for state, name, value in before:
                if isinstance(state[name], Tensor):
                    state[name].fill_(value)
                else:
                    state[name] = value

    def note_replay(self, key: Hashable) -> None:
        """Count a replay of a traced step."""
        self._replayed[key] += 1

    def catch_up(self) -> None:
        """Advance the numbers by the replays since the last call."""
        for key, times in self._replayed.items():
            for state, name, added in self._by_step[key]:
                state[name] += times * added
        self._replayed.clear()


def _host_numbers(optimizers: Iterable[Optimizer]) -> Iterator[tuple[dict[str, Any], str, float]]:
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor) and not value.dim() and value.device.type == "cpu":
                    yield state, name, value.item()
                elif isinstance(value, (int, float)) and not isinstance(value, bool):
                    yield state, name, value
