"""LambdaCallback calls given hooks with their arguments; other hooks cost nothing."""

import pytest
from fake_model import FakeModel

from tpufit.callbacks import Callback, CallbackList, LambdaCallback
from tpufit.errors import ArgumentError, UnknownNameError

HOOKS = [name for name in dir(Callback) if name.startswith("on_")]


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_may_be_a_function(hook):
    calls = []
    hooks = CallbackList(LambdaCallback(**{hook: lambda *args: calls.append(args)}), model=FakeModel())
    called = hook.replace("on_batch", "on_train_batch")
    assert hooks.has(called)
    takes_one = any(word in hook for word in ("epoch", "batch", "step", "save", "exception"))
    arguments = (3, {"loss": 0.5}) if takes_one else ({"loss": 0.5},)
    hooks.call(called, *arguments)
    assert calls == [arguments]


def test_omitted_hooks_cost_nothing():
    hooks = CallbackList([LambdaCallback(), LambdaCallback(on_epoch_end=None, on_test_end=None)], model=FakeModel())
    assert not any(hooks.has(hook) for hook in HOOKS if not hook.startswith("on_batch"))


def test_the_order_of_keras_arguments():
    calls = []
    names = ["epoch_begin", "epoch_end", "train_begin", "train_end", "train_batch_begin", "train_batch_end"]
    callback = LambdaCallback(*(lambda *args, name=name: calls.append(name) for name in names))
    for name in names:
        getattr(callback, f"on_{name}")(0, {})
    assert calls == names


def test_functions_reach_the_model_and_attributes_are_kept():
    callback = LambdaCallback(on_epoch_end=lambda epoch, logs: setattr(callback.model, "stop_training", True), note=7)
    model = FakeModel()
    CallbackList(callback, model=model).call("on_epoch_end", 0)
    assert model.stop_training and callback.note == 7
    assert callback.reads_weights and not LambdaCallback(reads_weights=False).reads_weights


def test_wrong_arguments():
    with pytest.raises(UnknownNameError, match="unknown hook 'on_epoch_ends': did you mean 'on_epoch_end'"):
        LambdaCallback(on_epoch_ends=print)
    with pytest.raises(ArgumentError, match="on_train_end must be a function, got 3"):
        LambdaCallback(on_train_end=3)
