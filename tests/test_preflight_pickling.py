"""Pickling a training for another process."""

import pickle

import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from tpufit.preflight.pickling import pickle_training


def test_a_module_with_parametrized_weights():
    net = nn.Sequential(weight_norm(nn.Linear(3, 2)), nn.ReLU())
    twin = pickle.loads(pickle_training({"net": net}, model=None, state=()))["net"]
    x = torch.randn(4, 3)
    assert torch.equal(twin(x), net(x)) and list(twin.state_dict()) == list(net.state_dict())


def test_values_of_weights_arent_pickled():
    net = nn.Sequential(weight_norm(nn.Linear(3, 2)))
    weights = list(net.parameters())
    twin = pickle.loads(pickle_training({"net": net}, model=None, state={id(weight) for weight in weights}))["net"]
    assert [(w.shape, w.dtype, w.device.type) for w in twin.parameters()] == [
        (w.shape, w.dtype, "meta") for w in weights
    ]
