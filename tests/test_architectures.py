"""Typical nets train 5 steps, replayed and traced, with equal results; a net that can't be replayed says why."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, BATCH, STEPS

import tpufit

pytestmark = pytest.mark.cores(1, 8, timeout=600, quick=False)

TELLING = ("ResNet", "GRU", "Llama", "DeepFM", "GAN", "control flow on the step count")


def train(architecture, cores, jit_compile):
    """Train 5 steps. Return the results, the initial weights, and how often their Python ran."""
    traces = []

    class Counted(architecture.model):
        def train_step(self, batch):
            traces.append(1)
            return super().train_step(batch)

    tpufit.set_random_seed(0)
    net = architecture.net()
    begun = {name: value.detach().clone() for name, value in net.named_parameters()}
    model = Counted(net)
    model.compile(
        architecture.optimizer(net),
        architecture.loss,
        metrics=architecture.metrics,
        scale_lr=None,
        jit_compile=jit_compile,
    )
    history = model.fit(*architecture.data, batch_size=BATCH // cores, verbose=0, shuffle=False, cores=cores).history
    model.to_cpu()
    state = dict(net.named_parameters()) | dict(net.named_buffers())
    optimizers = [value for value in vars(model).values() if isinstance(value, torch.optim.Optimizer)]
    for i, optimizer in enumerate(optimizers):
        for j, values in enumerate(optimizer.state.values()):
            state |= {f"{key} of weight {j} in optimizer {i}": torch.as_tensor(v) for key, v in values.items()}
    return SimpleNamespace(history=history, state=state, begun=begun, traces=len(traces))


@pytest.mark.parametrize(
    "name", [name if name in TELLING else pytest.param(name, marks=pytest.mark.soak) for name in ARCHITECTURES]
)
@pytest.mark.soak_on(8)
def test_five_replayed_steps_equal_five_traced_steps_bit_for_bit(cores, name):
    architecture = ARCHITECTURES[name]
    why = architecture.why_traced
    said = f"the train step is traced again on every call, which is slow, because {why}"
    with pytest.warns(UserWarning, match=said) if why else nullcontext():
        replayed = train(architecture, cores, "auto")
    traced = train(architecture, cores, False)
    assert (replayed.traces, traced.traces) == (architecture.traces, STEPS)
    assert replayed.history == traced.history
    assert replayed.state.keys() == traced.state.keys()
    for key, value in traced.state.items():
        assert torch.equal(replayed.state[key], value), key
    # The weights did change. A bias before a norm, or of a critic, has nothing to learn.
    assert np.isfinite([values for values in traced.history.values()]).all()
    for key, value in traced.begun.items():
        assert value.dim() < 2 or not torch.equal(traced.state[key], value), f"{key} has not learned"
