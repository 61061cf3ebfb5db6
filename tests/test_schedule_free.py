"""Schedule-free AdamW: its weights and their averages are those of a plain loop, whatever the speed of its steps."""

import pytest
import torch
from torch import nn

import tpufit
from tpufit.callbacks import Callback, ModelCheckpoint

pytestmark = [pytest.mark.soak, pytest.mark.cores(1, 8)]

X = torch.randn(61, 4, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)


class Averages(Callback):
    """As the guide to learning rates shows it."""

    def on_train_begin(self, logs=None):
        self.model.optimizer.train()

    def on_test_begin(self, logs=None):
        self.model.optimizer.eval()

    def on_test_end(self, logs=None):
        self.model.optimizer.train()

    def on_train_end(self, logs=None):
        self.model.optimizer.eval()


def made():
    import schedulefree

    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    return net, schedulefree.AdamWScheduleFree(net.parameters(), lr=0.05, warmup_steps=4)


def plain(epochs):
    (net, optimizer), losses = made(), []
    for _ in range(epochs):
        optimizer.train()
        for x, y in zip(X.split(16), Y.split(16), strict=True):
            optimizer.zero_grad()
            (net(x) - y).square().mean().backward()
            optimizer.step()
        optimizer.eval()
        losses.append((net(X) - Y).square().mean().item())
    return net, losses


@pytest.mark.filterwarnings("ignore:the train step is traced anew on every call")
def test_it_trains_and_validates_as_a_plain_loop_and_goes_on_from_a_checkpoint(cores, tmp_path):
    pytest.importorskip("schedulefree")
    how = {"batch_size": 16 // cores, "shuffle": False, "validation_data": (X, Y), "verbose": 0, "cores": cores}
    net, losses = plain(3)
    for epochs in (3, 2, 3):  # whole; then in two parts
        model = tpufit.Model(made()[0])
        model.compile(lambda parameters: type(made()[1])(parameters, lr=0.05, warmup_steps=4), "mse", scale_lr=None)
        run = ModelCheckpoint(tmp_path / f"run{how.get('resume')}", keep_last=None)
        history = model.fit(X, Y, epochs=epochs, callbacks=[run, Averages()], **how).history
        how["resume"] = True
        if epochs == 3:
            assert history["val_loss"] == pytest.approx(losses, abs=1e-5)
            for name, value in model.state_dict().items():
                torch.testing.assert_close(value, net.state_dict()[name], rtol=0, atol=1e-5)
