"""Training or not, gradients or none: `model(x, training=...)`, and calls under `no_grad` and `inference_mode`."""

import pytest
import torch
from torch import nn

import tpufit
from tpufit.errors import ArgumentError

pytestmark = pytest.mark.cores(1, 8)
X, Y = torch.randn(32, 4), torch.arange(32) % 2


def compiled(kind=tpufit.Model):
    model = kind(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)))
    model.compile("sgd", "cross_entropy")
    return model


def test_a_call_says_whether_it_is_of_training(cores):
    class Says(tpufit.Model):
        def train_step(self, batch):
            x, y = batch
            still = self(x, training=False)
            modes.append([layer.training for layer in self.module.modules()])
            y_pred = self(x, training=True)
            self.apply_gradients(self.compute_loss(x, y, y_pred))
            return {"differ": (y_pred - still).abs().mean()}

    modes = []
    model = compiled(Says)
    history = model.fit(X, Y, 4, 2, verbose=0, cores=cores).history
    assert min(history["differ"]) > 1e-3 and all(all(mode) for mode in modes) and modes
    assert not any(model.report().traced.values())
    expected = torch.tensor(model.predict(X, verbose=0))
    torch.testing.assert_close(model(X, training=False), expected)
    assert not torch.allclose(model(X, training=True), expected) and not model.module.training


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_fit_needs_gradients_and_the_others_do_not(cores, context):
    model, plain = compiled(), compiled()
    plain.load_state_dict(model.state_dict())
    with context():
        loss = model.evaluate(X, Y, verbose=0, cores=cores)
        assert model.test_on_batch(X, Y) == pytest.approx(loss) and model.predict_on_batch(X).shape == (32, 2)
        predicted = model.predict(torch.clone(X), verbose=0)
        torch.testing.assert_close(model(X, training=False), torch.tensor(predicted))
        for method in (model.fit, model.lr_find, model.train_on_batch):
            with pytest.raises(ArgumentError, match=f"{method.__name__} is called under torch.no_grad"):
                method(X, Y)
    assert plain.evaluate(X, Y, verbose=0, cores=cores) == loss
    model.fit(X, Y, 4, verbose=0)
    assert not model.report().problems
