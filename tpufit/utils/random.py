"""Random numbers: one seed for everything, and a step's own seed as a function of (seed, step)."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from ..errors import ArgumentError

_MASK = (1 << 64) - 1


def set_random_seed(seed: int) -> None:
    """Seed Python's, NumPy's and PyTorch's generators, and with them every `fit` that follows.

    `fit` derives the order of the rows from (seed, epoch) and the dropout of a step from (seed, step), where the seed
    is PyTorch's: for those two, `torch.manual_seed` is enough. Each `evaluate` and `predict` draws a seed from
    PyTorch's generator, so that dropout which stays active (Monte Carlo dropout) gives another sample at each call.

    Args:
        seed: A whole number from 0 to 2**32 - 1 (NumPy's range).

    Raises:
        ArgumentError: The seed is no such number.

    Example:
        >>> import torch, tpufit
        >>> tpufit.set_random_seed(7)
        >>> first = torch.rand(())
        >>> tpufit.set_random_seed(7)
        >>> bool(first == torch.rand(()))
        True

    Source: `keras.utils.set_random_seed`.
    """
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= seed < 1 << 32:
        raise ArgumentError(f"seed must be a whole number from 0 to 2**32 - 1, got {seed!r}")
    seed = int(seed)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def step_seed(seed: int, step: int) -> int:
    """The device's seed of one step: a function of (seed, step), whatever ran in between.

    Steps count from 0 since the model was made. Neighbouring ones give unrelated numbers, from 0 to 2**63 - 1 (the
    finalizer of SplitMix64, Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).

    Example:
        >>> step_seed(0, 1) == step_seed(0, 1) != step_seed(0, 2)
        True
    """
    z = (seed + (step + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z ^ (z >> 31)) >> 1


def draw_seed() -> int:
    """Draw a seed from PyTorch's generator, as a `DataLoader` does for each pass."""
    return int(torch.empty((), dtype=torch.int64).random_())


@dataclass(frozen=True)
class RNGState:
    """The state of the host's random numbers: of Python, NumPy, PyTorch and the user's own generators.

    Example:
        >>> before = RNGState.now()
        >>> first = random.random(), torch.rand(())
        >>> before.restore()
        >>> first == (random.random(), torch.rand(()))
        True
    """

    python: Any
    numpy: Any
    pytorch: Tensor
    own: tuple[Tensor, ...] = ()

    @classmethod
    def now(cls, generators: Sequence[Generator] = ()) -> RNGState:
        """The state now, with that of the user's own generators."""
        own = tuple(generator.get_state() for generator in generators)
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), own)

    def is_now(self) -> bool:
        """True if nobody has drawn from Python's, NumPy's or PyTorch's generator since."""
        now = RNGState.now()
        return (
            self.python == now.python
            and all(np.array_equal(one, other) for one, other in zip(self.numpy, now.numpy, strict=True))
            and torch.equal(self.pytorch, now.pytorch)
        )

    def restore(self, generators: Sequence[Generator] = ()) -> None:
        """Go back to this state; the generators are those that `now` was given. If there were none, they stay as is."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.pytorch)
        for generator, state in zip(generators, self.own, strict=bool(self.own)):
            generator.set_state(state)

    def state_dict(self) -> dict[str, Any]:
        """The same as plain values, which JSON can hold."""
        version, words, gauss = self.python
        kind, keys, *rest = self.numpy
        return {
            "python": [version, list(words), gauss],
            "numpy": [kind, keys.tolist(), *rest],
            "torch": _hex(self.pytorch),
            "own": [_hex(state) for state in self.own],
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> RNGState:
        """Make a state of the plain values that `state_dict` gave.

        Raises:
            ValueError, or another error: They aren't, and no generator can have such a state.
        """
        version, words, gauss = state["python"]
        kind, keys, *rest = state["numpy"]
        numpy = (kind, np.array(keys, dtype=np.uint32), *rest)
        found = cls((version, tuple(words), gauss), numpy, _of_hex(state["torch"]), tuple(map(_of_hex, state["own"])))
        random.Random().setstate(found.python)
        np.random.RandomState().set_state(found.numpy)
        try:
            torch.Generator().set_state(found.pytorch)
        except RuntimeError as error:
            raise ValueError(str(error)) from error
        return found


def _hex(state: Tensor) -> str:
    return state.numpy().tobytes().hex()


def _of_hex(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
