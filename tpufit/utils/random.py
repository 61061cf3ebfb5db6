"""Random numbers: one seed for everything, and each step's seed as a function of (seed, step)."""

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
    is PyTorch's: for these, `torch.manual_seed` is enough. Each `evaluate` and `predict` draws a seed from PyTorch's
    generator, so that active dropout (Monte Carlo dropout) gives a new sample at each call.

    Args:
        seed: A whole number from 0 to 2**32 - 1 (NumPy's range).

    Raises:
        ArgumentError: The seed is out of range or not a whole number.

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
    """Return the device's seed for a step: a function of (seed, step), whatever ran before.

    Steps count from 0 since the model was created. Successive steps give unrelated numbers, from 0 to 2**63 - 1 (the
    finalizer of SplitMix64, Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).

    Example:
        >>> step_seed(0, 1) == step_seed(0, 1) != step_seed(0, 2)
        True
    """
    z = (seed + (step + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z ^ (z >> 31)) >> 1


def to_signed(seed: int) -> int:
    """Return a seed modulo 2**64 as a signed number, as devices keep it.

    Example:
        >>> to_signed(7), to_signed((1 << 64) - 1)
        (7, -1)
    """
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


def draw_seed() -> int:
    """Draw a seed from PyTorch's generator, as a `DataLoader` does for each pass."""
    return int(torch.empty((), dtype=torch.int64).random_())


def state_to_hex(state: Tensor) -> str:
    """Return a generator's state as text, for JSON.

    Example:
        >>> state = torch.Generator().get_state()
        >>> torch.equal(state_from_hex(state_to_hex(state)), state)
        True
    """
    return state.numpy().tobytes().hex()


def state_from_hex(text: str) -> Tensor:
    """Return the state that `state_to_hex` gave as text."""
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


@dataclass(frozen=True)
class RNGState:
    """The state of the host's random numbers: Python's, NumPy's, PyTorch's and the user's generators.

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
        """Return the current state, including the user's generators."""
        states = tuple(generator.get_state() for generator in generators)
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), states)

    def is_now(self) -> bool:
        """True if Python's, NumPy's and PyTorch's generators haven't been used since."""
        now = RNGState.now()
        return (
            self.python == now.python
            and all(np.array_equal(before, after) for before, after in zip(self.numpy, now.numpy, strict=True))
            and torch.equal(self.pytorch, now.pytorch)
        )

    def restore(self, generators: Sequence[Generator] = ()) -> None:
        """Restore this state; the generators are those passed to `now`. If `now` got none, they aren't changed."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.pytorch)
        for generator, state in zip(generators, self.own, strict=bool(self.own)):
            generator.set_state(state)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values for JSON."""
        version, words, gauss = self.python
        kind, keys, *rest = self.numpy
        return {
            "python": [version, list(words), gauss],
            "numpy": [kind, keys.tolist(), *rest],
            "torch": state_to_hex(self.pytorch),
            "own": [state_to_hex(state) for state in self.own],
        }

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> RNGState:
        """Make a state from the plain values that `state_dict` returned.

        Raises:
            ValueError, or another error: No generator can have such a state.
        """
        version, words, gauss = state["python"]
        kind, keys, *rest = state["numpy"]
        numpy = (kind, np.array(keys, dtype=np.uint32), *rest)
        result = cls(
            (version, tuple(words), gauss),
            numpy,
            state_from_hex(state["torch"]),
            tuple(map(state_from_hex, state["own"])),
        )
        random.Random().setstate(result.python)
        np.random.RandomState().set_state(result.numpy)
        try:
            torch.Generator().set_state(result.pytorch)
        except RuntimeError as error:
            raise ValueError(str(error)) from error
        return result
