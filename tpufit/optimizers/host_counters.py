"""`HostCounters`: the counts of optimizers that stay on the host."""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


class HostCounters:
    """The numbers of optimizers' state that stay on the host, mostly counts of steps.

    A replay runs no Python, which would move them on. They are moved on afterwards, by as much as a trace did.
    """

    def __init__(self) -> None:
        self._by_step: dict[Hashable, list[tuple[dict[str, Any], str, float]]] = {}
        self._replayed: Counter[Hashable] = Counter()

    @contextmanager
    def traced(self, key: Hashable, optimizers: Iterable[Optimizer]) -> Iterator[None]:
        """A context in which a step's Python runs: a replay must add to the numbers as much as it does."""
        self.catch_up()  # a replay's share, added inside, would count as the trace's
        optimizers = list(optimizers)
        before = {(id(state), name): value for state, name, value in _host_numbers(optimizers)}
        yield
        added = [(s, name, value - before.get((id(s), name), value)) for s, name, value in _host_numbers(optimizers)]
        self._by_step[key] = [(state, name, value) for state, name, value in added if value]

    @contextmanager
    def untouched(self, optimizers: Iterable[Optimizer]) -> Iterator[None]:
        """A context in which a step's Python runs for nothing: the optimizers' numbers are put back afterwards."""
        self.catch_up()
        before = list(_host_numbers(optimizers))
        try:
            yield
        finally:
            for state, name, value in before:
                if isinstance(state[name], Tensor):
                    state[name].fill_(value)
                else:
                    state[name] = value

    def replayed(self, key: Hashable) -> None:
        """Note a replay of a step that has been traced."""
        self._replayed[key] += 1

    def catch_up(self) -> None:
        """Move the numbers on by the replays since the last call."""
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
