"""How a batch's x becomes the arguments of a module: by name, as far as `forward` has the names."""

import copy
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tpufit
from tpufit.errors import ArgumentError, BatchError
from tpufit.step.module_call import call, make_arguments

A, B = torch.zeros(2), torch.ones(2)


class Two(nn.Module):
    def forward(self, a, b=None):
        return a


class Any(nn.Module):
    def forward(self, a=None, **others):
        return a


class Whole(nn.Module):
    def forward(self, batch):
        return batch["a"]


@pytest.mark.parametrize(
    ("kind", "x", "expected"),
    [
        (Two, A, ((A,), {})),
        (Two, (A, B), ((A, B), {})),
        (Two, {"b": B, "a": A}, ((), {"a": A, "b": B})),
        (Two, {"a": A, "b": "left"}, ((), {"a": A, "b": "left"})),  # `forward` has this name
        (Two, {"a": A, "text": ["u", "v"], "ids": [7, 8], "labels": B}, ((), {"a": A})),
        (Any, {"a": A, "c": B, "text": ["u", "v"]}, ((), {"a": A, "c": B})),
        (Any, {"c": B}, ((), {"c": B})),
        (Whole, {"a": A, "text": ["u"]}, (({"a": A, "text": ["u"]},), {})),
        (Whole, {"batch": A}, ((), {"batch": A})),
    ],
)
def test_arguments_of_forward(kind, x, expected):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        args, named = make_arguments(kind(), x)
    assert (tuple(args), dict(named)) == expected


def test_a_tensor_that_forward_doesnt_take_is_reported():
    with pytest.warns(UserWarning, match="x has 'c', but Two.forward has no such parameter and doesn't get it"):
        assert make_arguments(Two(), {"a": A, "c": B}) == ((), {"a": A})


@pytest.mark.parametrize(
    ("kind", "x", "says"),
    [
        (Two, {"b": B}, r"the module is called as Two\(b=...\), but its forward takes \(a, b=None\)"),
        (Two, (A, B, A), r"x is a tuple of 3, .* its forward takes \(a, b=None\)"),
        (nn.ReLU, {"a": A, "b": B}, r"x is a dict of 'a' and 'b', and ReLU.forward.* names none of the keys, .* whole"),
    ],
)
def test_arguments_that_do_not_fit(kind, x, says):
    with pytest.raises(BatchError, match=says):
        call(kind(), x)


class Mode(nn.Module):
    def forward(self, batch, scale, training=False):
        return batch


@pytest.mark.parametrize(
    ("kind", "x", "further", "keywords", "expected"),
    [
        (Two, A, [0.5], {}, ((A, 0.5), {})),
        (Two, A, [(A, B)], {}, ((A, (A, B)), {})),
        (Two, (A,), [B], {}, ((A, B), {})),
        (Two, A, [], {"b": 0.5}, ((A,), {"b": 0.5})),
        (Two, {"a": A}, [], {"b": B}, ((), {"a": A, "b": B})),
        (Two, {"a": A, "b": A}, [], {"b": B}, ((), {"a": A, "b": B})),
        (Any, {"a": A, "c": A}, [], {"c": B, "d": 1}, ((), {"a": A, "c": B, "d": 1})),
        (Whole, {"a": A}, [], {}, (({"a": A},), {})),
        (Mode, {"a": A}, [2], {}, (({"a": A}, 2), {})),
        (Mode, {"a": A}, [], {"scale": 2, "training": True}, (({"a": A},), {"scale": 2, "training": True})),
    ],
)
def test_further_arguments_of_forward(kind, x, further, keywords, expected):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert make_arguments(kind(), x, further, keywords) == expected


def test_further_arguments_that_do_not_fit():
    with pytest.raises(ArgumentError, match=r"x is a dict, which Two gets by keyword: pass the further arguments by"):
        call(Two(), {"a": A}, further=[0.5])
    says = (
        r"calls the module as ReLU\(..., ...\), but its forward takes .* only training=True or training=False, by key"
    )
    with pytest.raises(BatchError, match=says):
        tpufit.Model(nn.ReLU())(A, False)
    with pytest.raises(BatchError, match=r"as ReLU\(..., alpha=...\)"):
        tpufit.Model(nn.ReLU())(A, alpha=0.5)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.seen = []

    def forward(self, x, alpha=1.0, lengths=None, training=None):
        self.seen.append((alpha, self.training, training))
        y = self.linear(x) * alpha
        return y if lengths is None else y * lengths[:, None]


CALLS = {
    "position": lambda model, x, lengths: model(x, 0.5, lengths),
    "zero": lambda model, x, lengths: model(x, 0) + model(x, True, lengths),
    "keyword": lambda model, x, lengths: model(x, lengths=lengths, alpha=0.5),
    "tuple": lambda model, x, lengths: model((x,), 0.5, lengths),
    "dict": lambda model, x, lengths: model({"x": x, "lengths": lengths}, alpha=0.5),
    "no x": lambda model, x, lengths: model(**{"lengths": lengths, "x": x, "alpha": 0.5}),
}


@pytest.mark.cores(1, 8)
@pytest.mark.parametrize("name", CALLS)
def test_further_arguments_in_a_step_and_outside(cores, name):
    tpufit.init(cores)  # first: autograd looks up the existing devices once

    class Own(tpufit.Model):
        def train_step(self, batch):
            x, lengths, y = batch
            loss = F.cross_entropy(CALLS[name](self, x, lengths), y)
            self.apply_gradients(loss)
            return {"loss": loss}

    numbers = torch.Generator().manual_seed(0)
    x, y, lengths = torch.randn(32, 4, generator=numbers), torch.arange(32) % 3, torch.arange(32) % 5
    net = Scaled()
    plain = copy.deepcopy(net)
    plain_call = (lambda _, x, lengths: plain(x, 0.5, lengths)) if name in ("tuple", "dict") else CALLS[name]
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for i in (0, 16):
        optimizer.zero_grad()
        F.cross_entropy(plain_call(plain, x[i : i + 16], lengths[i : i + 16]), y[i : i + 16]).backward()
        optimizer.step()
    model = Own(net)
    model.compile(lambda parameters: torch.optim.SGD(parameters, 0.1), scale_lr=None)
    batches = [(x[i : i + 16], lengths[i : i + 16], y[i : i + 16]) for i in (0, 16)]
    model.fit(batches, batch_size="global", verbose=0, cores=cores)
    assert set(net.seen) == set(plain.seen)
    expected = plain_call(plain, x[:10], lengths[:10]).detach()
    torch.testing.assert_close(CALLS[name](model, x[:10], lengths[:10]), expected, rtol=0, atol=1e-5)
    expected = plain(x[:10], 0.5, lengths[:10]).detach()
    torch.testing.assert_close(model(x[:10].numpy(), 0.5, lengths[:10].numpy()), expected, rtol=0, atol=1e-5)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, plain.state_dict()[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("training", [False, True])
def test_a_forward_with_a_training_argument_gets_it(training):
    net = Scaled()
    tpufit.Model(net)(torch.zeros(2, 4), 0.5, training=training)
    assert net.seen == [(0.5, training, training)]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_an_override_of_the_call_runs_once(context):
    class Doubled(tpufit.Model):
        def __call__(self, x, *args, **kwargs):
            return super().__call__(2 * x, *args, **kwargs)

    with context():
        assert Doubled(nn.Identity())(torch.ones(1)).tolist() == [2.0]


class Generating(nn.Module):
    """As a language model of transformers, it returns its cache unless told otherwise."""

    config = SimpleNamespace(use_cache=True)

    def forward(self, a, use_cache=None):
        return (a, "cache") if self.config.use_cache and use_cache is not False else a


class Adapted(nn.Module):
    """As peft wraps a model."""

    config = Generating.config

    def __init__(self):
        super().__init__()
        self.base = Generating()

    def get_base_model(self):
        return self.base

    def forward(self, *args, **others):
        return self.base(*args, **others)


class Encoding(nn.Module):
    config = Generating.config

    def forward(self, a):
        return a


def test_a_language_model_returns_no_cache_by_default():
    for kind in (Generating, Adapted, Encoding):
        assert call(kind(), A) is A and call(kind(), {"a": A}) is A, kind
    assert call(Generating(), {"a": A, "use_cache": True}) == (A, "cache")
    assert call(Generating(), A, keywords={"use_cache": True}) == (A, "cache")
