"""The device runs out of memory, or Ctrl-C comes in the middle of a step: what remains, and how training continues."""

import signal
from functools import partial
from itertools import chain

import numpy as np
import pytest
import torch
from engines import engine_of
from torch import nn

import tpufit
from tpufit import runtime
from tpufit.callbacks import Callback, ModelCheckpoint
from tpufit.errors import StateLostError
from tpufit.runtime import device_state, graph, trace_view

pytestmark = pytest.mark.cores(1, 8, timeout=300, quick=False)

GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(256, 12)).astype("float32")
Y = GENERATOR.integers(0, 4, 256)


class Greedy(nn.Module):
    """With its momentum 17 MB, enough that its memory is donated to each step; on request it allocates a terabyte."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(12, 4096), nn.BatchNorm1d(4096), nn.ReLU(), nn.Linear(4096, 512), nn.Linear(512, 4)
        )
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)
        self.greedy = False

    def forward(self, x):
        h = self.layers(x) * self.scale
        if self.greedy:
            numbers = torch.arange(2**19, device=h.device) * h.sum().detach()
            h = h + (numbers[:, None] - numbers).sort(1).values[0, :4]
        return h


def large(**compiling):
    torch.manual_seed(0)
    model = tpufit.Model(Greedy())
    model.compile(partial(torch.optim.SGD, lr=0.01, momentum=0.9), "cross_entropy", scale_lr=None, **compiling)
    return model


def fit(model, cores, epochs=1, **options):
    torch.manual_seed(1)
    return model.fit(X, Y, 32 // cores, epochs, verbose=0, cores=cores, **options).history


class Notes(Callback):
    """Records the state when training ends."""

    def on_train_end(self, logs=None):
        self.lost = bool(engine_of(self.model).state.device.lost)


@pytest.mark.parametrize("jit_compile", ["auto", pytest.param(False, marks=pytest.mark.soak)])
@pytest.mark.soak_on(1)
def test_a_step_out_of_memory_is_an_error_and_recoverable(cores, tmp_path, jit_compile):
    """A real failure: the error is raised at a wait, several steps later."""
    model, notes = large(jit_compile=jit_compile), Notes()
    tensors = list(model.module.parameters())
    fit(model, cores)
    model.save_weights(tmp_path / "good.safetensors")
    model.module.greedy = True
    with pytest.raises(StateLostError, match=r"(?s)step \d+ failed.*good\.safetensors.*no room.*Out of memory.*\d{13}"):
        fit(model, cores, callbacks=notes)
    assert notes.lost
    for use in (
        model.state_dict,
        partial(model.save_weights, tmp_path / "bad.safetensors"),
        partial(fit, model, cores),
    ):
        with pytest.raises(StateLostError, match="load_weights"):
            use()
    assert not (tmp_path / "bad.safetensors").exists()

    model.module.greedy = False
    with pytest.warns(UserWarning, match="the optimizer starts without state"):
        model.load_weights(tmp_path / "good.safetensors")
    assert all(one is other for one, other in zip(model.module.parameters(), tensors, strict=True))
    fresh = large(jit_compile=jit_compile)
    fresh.load_weights(tmp_path / "good.safetensors")
    assert fit(model, cores, 2) == fit(fresh, cores, 2)
    state = fresh.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.soak_on(8)
def test_a_whole_state_gets_new_values_in_place(cores):
    model = large(use_ema=True)
    fit(model, cores)
    tensors = list(engine_of(model).state.tensors()[0].values())
    values = runtime.to_host(tensors, "test")
    fit(model, cores)
    expected = runtime.to_host(tensors, "test")
    model.module.greedy = True
    with pytest.raises(StateLostError):
        fit(model, cores)
    model.module.greedy = False
    engine_of(model).state.device.clear_lost()
    runtime.copy_into(tensors, values, engine_of(model).state.placement)
    fit(model, cores)
    assert all(torch.equal(*pair) for pair in zip(runtime.to_host(tensors, "test"), expected, strict=True))


@pytest.mark.soak_on(8)
def test_fit_resumes_from_a_checkpoint_in_the_same_process(cores, tmp_path):
    expected, model = large(use_ema=True), large(use_ema=True)
    history = fit(expected, cores, 3)

    class Greed(Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.module.greedy = epoch == 2

    checkpoint = ModelCheckpoint(tmp_path)
    with pytest.raises(StateLostError):
        fit(model, cores, 3, callbacks=[checkpoint, Greed()])
    assert checkpoint.checkpoint_writer.run.steps() == [8, 16]  # nothing of the failed epoch was saved
    model.module.greedy = False
    assert fit(model, cores, 3, callbacks=[checkpoint], resume=True) == history
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected.state_dict()[name]), name


@pytest.mark.soak_on(8)
def test_failed_models_dont_affect_others(cores):
    """They are referenced, as in a notebook, with the results of pending steps."""
    failed = [large() for _ in range(4)]
    for model in failed:
        model.module.greedy = True
        with pytest.raises(StateLostError):
            fit(model, cores)
    for _ in range(4):
        assert np.isfinite(fit(large(), cores, 2, validation_data=(X, Y))["val_loss"]).all()


@pytest.mark.soak_on(8)
def test_copied_weights_can_be_trained(cores):
    """A copy on the device shares memory with the original, which can be donated only once."""

    class CopiesALayer(Callback):
        def on_epoch_begin(self, epoch, logs=None):
            with torch.no_grad():
                self.model.module.layers[0].weight[:, :1].copy_(self.model.module.layers[0].weight[:, 1:2])
                self.model.module.layers[4].bias.copy_(self.model.module.layers[4].weight[:, 0])
                self.model.module.layers[1].bias.copy_(self.model.module.layers[1].weight)

    histories = [fit(large(jit_compile=jit), cores, 3, callbacks=CopiesALayer()) for jit in (True, False)]
    assert histories[0] == histories[1]


@pytest.mark.soak_on(8)
def test_incomplete_weights_restore_nothing(cores):
    model = large()
    fit(model, cores)
    weights = model.state_dict()
    model.module.greedy = True
    with pytest.raises(StateLostError):
        fit(model, cores)
    part = {name: value for name, value in weights.items() if "4.bias" not in name}
    with (
        pytest.warns(UserWarning, match=r"missing in the weights: layers\.4\.bias"),
        pytest.raises(StateLostError, match=r"^layers\.4\.bias can't be restored"),
    ):
        model.load_state_dict(part, skip_mismatch=True)
    assert engine_of(model).state.device.lost


@pytest.mark.soak_on(1)
def test_an_evaluation_out_of_memory_keeps_the_weights(cores):
    model = large()
    fit(model, cores)
    before = model.state_dict()
    model.module.greedy = True
    with pytest.raises(RuntimeError, match="Out of memory") as error:
        model.evaluate(X, Y, verbose=0)
    assert not isinstance(error.value, StateLostError)
    model.module.greedy = False
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert np.isfinite(fit(model, cores)["loss"]).all()


@pytest.mark.soak_on(8)
def test_an_interrupt_right_after_the_start_of_a_step_loses_nothing(cores, monkeypatch):
    def then_interrupted(*parts):
        """As `chain`, with a signal before any other Python runs."""
        calls.append(1)
        return chain(*parts, filter(signal.raise_signal, [signal.SIGINT])) if len(calls) == 5 else chain(*parts)

    model, calls = large(), []
    fit(model, cores)
    monkeypatch.setattr(graph, "chain", then_interrupted)
    with pytest.raises(KeyboardInterrupt):
        fit(model, cores, 2)
    assert len(calls) == 5 and not engine_of(model).state.device.lost
    interrupted = model.state_dict()
    monkeypatch.undo()

    same = large()
    fit(same, cores)
    fit(same, cores, 1, steps_per_epoch=5)
    assert all(torch.equal(value, interrupted[name]) for name, value in same.state_dict().items())
    assert np.isfinite(fit(model, cores)["loss"]).all()


class Looks(Callback):
    """Has the weights written back into the module before each step, and taken out again."""

    def on_train_batch_begin(self, batch, logs=None): ...


@pytest.mark.soak_on(8)
@pytest.mark.parametrize("at", [4, 22, 40, *(pytest.param(at, marks=pytest.mark.soak) for at in (13, 31, 49, 58))])
def test_an_interrupt_during_write_back_loses_nothing(cores, monkeypatch, at):
    real, countdown = device_state.swap_value, iter(range(at))

    def swap_value(*arguments):
        value = real(*arguments)
        if next(countdown, None) is None:
            monkeypatch.undo()
            raise KeyboardInterrupt
        return value

    torch.manual_seed(0)
    model = tpufit.Model(nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)))
    model.compile("adamw", "cross_entropy", scale_lr=None)
    fit(model, cores, 2, callbacks=Looks())
    seen, begun = {}, model.steps_taken

    class Sees(Callback):
        def on_train_batch_begin(self, batch, logs=None):
            seen[self.model.steps_taken] = self.model.state_dict()

    for module in (device_state, trace_view):
        monkeypatch.setattr(module, "swap_value", swap_value)
    with pytest.raises(KeyboardInterrupt):
        fit(model, cores, callbacks=Looks())
    left, steps = model.state_dict(), model.steps_taken
    assert next(countdown, None) is None and begun <= steps < begun + 8

    torch.manual_seed(0)
    same = tpufit.Model(nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)))
    same.compile("adamw", "cross_entropy", scale_lr=None)
    fit(same, cores, 2)
    fit(same, cores, callbacks=Sees())
    assert all(torch.equal(value, left[name]) for name, value in seen[steps].items())
    assert np.isfinite(fit(model, cores)["loss"]).all()
