"""TerminateOnNaN, with the model's known steps; tests/faults/test_nan.py tests it in training."""

import pytest
from fake_model import FakeModel

from tpufit.callbacks import Callback, CallbackList, TerminateOnNaN
from tpufit.errors import CallbackError


class Ends(Callback):
    def __init__(self):
        self.ends = []

    def on_exception(self, exception, logs=None):
        self.ends.append(str(exception.__cause__))

    def on_train_end(self, logs=None):
        self.ends.append(logs)


def train(guard, bad_steps, *others):
    """Run an epoch with the known first bad step, or None, after each batch. Return the trained batches."""
    model = FakeModel()
    hooks = CallbackList([guard, *others], model=model)
    hooks.call("on_train_begin")
    batch = -1
    try:
        for batch, model.first_bad_step in enumerate(bad_steps):
            hooks.call("on_train_batch_end", batch)
            if model.stop_training:
                break
        hooks.call("on_epoch_end", 0)
        hooks.call("on_train_end", {"loss": 0.5})
    except CallbackError as error:
        hooks.close_after_error(error)
        raise
    return batch + 1


@pytest.mark.parametrize("raise_error", [False, True])
def test_a_training_with_finite_losses_continues(raise_error, capsys):
    ends = Ends()
    assert train(TerminateOnNaN(raise_error), [None] * 5, ends) == 5
    assert ends.ends == [{"loss": 0.5}] and capsys.readouterr().out == ""


def test_a_nan_loss_ends_training_and_prints_one_line(capsys):
    ends = Ends()
    assert train(TerminateOnNaN(), [None, None, 2, 2], ends) == 3
    assert ends.ends == [{"loss": 0.5}]
    assert capsys.readouterr().out == "step 2 returned a loss that is not finite: training ends\n"


def test_other_callbacks_get_the_error_before_their_end():
    ends = Ends()
    with pytest.raises(CallbackError, match="TerminateOnNaN.on_train_batch_end raised RuntimeError: step 2 returned"):
        train(TerminateOnNaN(raise_error=True), [None, None, 2, 2], ends)
    assert ends.ends == ["step 2 returned a loss that is not finite", {}]


def test_a_nan_in_the_last_batch_is_found_at_the_epochs_end(capsys):
    class Late(Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.first_bad_step = batch + 1

    assert train(TerminateOnNaN(), [None], Late()) == 1
    assert capsys.readouterr().out == "step 1 returned a loss that is not finite: training ends\n"
