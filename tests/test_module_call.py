"""How a batch's x becomes the arguments of a module: by name, as far as `forward` has the names."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tpufit.errors import BatchError
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
