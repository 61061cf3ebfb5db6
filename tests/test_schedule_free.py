"""Schedule-free AdamW: its weights and their averages equal a plain loop's, and its steps are replayed."""

import pytest
import torch
from torch import nn

import tpufit
from tpufit.callbacks import Callback, ModelCheckpoint

pytestmark = [pytest.mark.soak, pytest.mark.cores(1, 8)]

X = torch.randn(128, 4, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)


class Averages(Callback):
    """As in the guide to learning rates."""

    def on_train_begin(self, logs=None):
        self.model.optimizer.train()

    def on_test_begin(self, logs=None):
        self.model.optimizer.eval()

    def on_test_end(self, logs=None):
        self.model.optimizer.train()

    def on_train_end(self, logs=None):
        self.model.optimizer.eval()


class Slower(Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            self.model.learning_rate = 0.02


def optimizer_of(parameters):
    import schedulefree

    weight, bias = parameters
    groups = [{"params": [weight]}, {"params": [bias], "lr": 0.01, "weight_decay": 0.0}]
    return schedulefree.AdamWScheduleFree(groups, lr=0.05, warmup_steps=6, weight_decay=0.1)


def made():
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def plain(epochs, accumulate):
    net, losses = made(), []
    optimizer = optimizer_of(net.parameters())
    for epoch in range(epochs):
        optimizer.train()
        if epoch == 1:
            optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = 0.02, 0.004
        for x, y in zip(X.split(16 * accumulate), Y.split(16 * accumulate), strict=True):
            optimizer.zero_grad()
            (net(x) - y).square().mean().backward()
            optimizer.step()
        optimizer.eval()
        losses.append((net(X) - Y).square().mean().item())
    return net, optimizer, losses


@pytest.mark.parametrize(("steps", "accumulate"), [(1, 1), (5, 1), (1, 2), (5, 2)])
def test_schedule_free_equals_a_plain_loop_and_resumes_bit_for_bit(cores, tmp_path, steps, accumulate):
    pytest.importorskip("schedulefree")
    how = {"batch_size": 16 // cores, "shuffle": False, "validation_data": (X, Y), "verbose": 0, "cores": cores}
    net, optimizer, losses = plain(4, accumulate)
    whole = {}
    for epochs in (4, 2, 4):  # whole; then in two parts
        model = tpufit.Model(made())
        joined = {"steps_per_execution": steps, "accumulate_steps": accumulate}
        model.compile(optimizer_of, "mse", scale_lr=None, **joined)
        run = ModelCheckpoint(tmp_path / f"run{how.get('resume')}", keep_last=None)
        history = model.fit(X, Y, epochs=epochs, callbacks=[run, Averages(), Slower()], **how).history
        how["resume"] = True
        assert not model.report().traced["train"]  # it is replayed
        if epochs == 2:
            continue
        assert history["val_loss"] == pytest.approx(losses, abs=1e-5)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, net.state_dict()[name], rtol=0, atol=1e-5)
            assert torch.equal(value, whole.setdefault(name, value)), name
        for ours, theirs in zip(model.optimizer.param_groups, optimizer.param_groups, strict=True):
            for key in ("k", "lr", "lr_max", "weight_sum", "scheduled_lr", "train_mode"):
                assert type(ours[key]) is type(theirs[key])
                assert ours[key] == theirs[key], key
