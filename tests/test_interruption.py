"""`fit` obeys SIGTERM and Ctrl-C at any time, after it has finished the current step."""

import os
import signal

import pytest
import torch
from torch import nn

import tpufit
from tpufit.callbacks import Callback, ModelCheckpoint
from tpufit.trainer.interruption import Interruption

X, Y = torch.ones(16, 4), torch.ones(16, 1)


class TellAt(Callback):
    """Sends this process a signal in a hook; at the end of an epoch in that of the last one."""

    def __init__(self, hook, number, error=None):
        self.ended = []

        def tell(*args):
            if hook != "on_epoch_end" or args[0] == 1:
                os.kill(os.getpid(), number)
                if error is not None:
                    raise error

        setattr(self, hook, tell)


class Ends(Callback):
    ended = 0

    def on_train_end(self, logs=None):
        self.ended += 1


def fit(*callbacks, **options):
    model = tpufit.Model(nn.Linear(4, 1))
    model.compile("sgd", "mse", run_eagerly=options.pop("run_eagerly", False))
    model.fit(X, Y, batch_size=8, epochs=2, verbose=0, cores=1, callbacks=list(callbacks), **options)
    return model


@pytest.mark.cores(1)
@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("hook", ["on_train_begin", "on_epoch_end", "on_train_end"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_any_hook_is_obeyed(cores, tmp_path, number, hook, run_eagerly):
    ends = Ends()
    with pytest.raises(SystemExit if number == signal.SIGTERM else KeyboardInterrupt) as caught:
        fit(ModelCheckpoint(tmp_path), TellAt(hook, number), ends, run_eagerly=run_eagerly)
    assert number == signal.SIGINT or caught.value.code == 143
    assert ends.ended == 1
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert hook == "on_train_begin" or sorted(tmp_path.glob("step-*"))[-1].name == "step-0000000004"


@pytest.mark.cores(1)
def test_a_signal_beside_an_error_is_obeyed_and_the_error_shown(cores, capsys):
    with pytest.raises(SystemExit) as caught:
        fit(TellAt("on_epoch_end", signal.SIGTERM, ValueError("a callback's own")))
    assert caught.value.code == 143
    assert "a callback's own" in capsys.readouterr().err


@pytest.mark.cores(1)
def test_a_signal_without_any_epoch_is_obeyed(cores):
    with pytest.raises(KeyboardInterrupt):
        fit(TellAt("on_train_begin", signal.SIGINT), initial_epoch=5)


@pytest.mark.cores(1)
def test_a_signal_after_the_last_look_is_obeyed(cores):
    with pytest.raises(SystemExit), Interruption():
        os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), Interruption():
        os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(ZeroDivisionError), Interruption():
        raise ZeroDivisionError
