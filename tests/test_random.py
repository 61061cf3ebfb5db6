"""Seeds: one call seeds everything, and a step's seed depends only on (seed, step)."""

import random

import numpy as np
import pytest
import torch

from tpufit.errors import ArgumentError
from tpufit.utils.random import set_random_seed, step_seed


def test_one_seed_for_python_numpy_and_torch():
    def draw():
        set_random_seed(123)
        return random.random(), np.random.rand(), torch.rand(()).item()

    assert draw() == draw()


@pytest.mark.parametrize("seed", [-1, 1 << 32, 1.0, True, None])
def test_an_invalid_seed(seed):
    with pytest.raises(ArgumentError, match="from 0 to"):
        set_random_seed(seed)


def test_seeds_of_steps_are_all_different_and_fit_the_device():
    seeds = [step_seed(seed, step) for seed in (0, 1, 2**64 - 1) for step in range(-500, 500)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
