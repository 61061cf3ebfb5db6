"""`fit` handles SIGTERM and Ctrl-C at any time, after it has finished the current step."""

import os
import signal
import time

import pytest
import torch
from torch import nn

import tpufit
from tpufit.callbacks import Callback, LambdaCallback, ModelCheckpoint
from tpufit.checkpoint import CheckpointDirectory
from tpufit.trainer.interruption import Interruption
from tpufit.utils.defer_interrupt import defer_interrupt

X, Y = torch.ones(16, 4), torch.ones(16, 1)


class TellAt(Callback):
    """Sends this process a signal in a hook; in a hook at an epoch's end, in the last epoch."""

    def __init__(self, hook, number, error=None):
        self.ended = []

        def tell(*args):
            if hook != "on_epoch_end" or args[0] == 1:
                os.kill(os.getpid(), number)
                if error is not None:
                    raise error

        setattr(self, hook, tell)


class Ends(Callback):
    """Records the end hooks, and the checkpoints that exist by then."""

    def __init__(self, folder):
        self.told, self.folder = [], folder

    def on_exception(self, exception, logs=None):
        self.told.append(type(exception))

    def on_train_end(self, logs=None):
        self.told.append(dict(logs))
        self.saved = sorted(path.name for path in self.folder.glob("step-*"))


def fit(*callbacks, **options):
    model = tpufit.Model(nn.Linear(4, 1))
    model.compile("sgd", "mse", run_eagerly=options.pop("run_eagerly", False))
    model.fit(X, Y, batch_size=8, epochs=2, verbose=0, cores=1, callbacks=list(callbacks), **options)
    return model


@pytest.mark.cores(1)
@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("hook", ["on_train_begin", "on_epoch_end", "on_train_end"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_any_hook_is_handled(cores, tmp_path, number, hook, run_eagerly):
    ends, error = Ends(tmp_path), SystemExit if number == signal.SIGTERM else KeyboardInterrupt
    with pytest.raises(error) as caught:
        fit(ModelCheckpoint(tmp_path), TellAt(hook, number), ends, run_eagerly=run_eagerly)
    assert number == signal.SIGINT or caught.value.code == 143
    if hook == "on_train_end":  # training was complete
        assert ends.told == [{"loss": ends.told[0]["loss"]}]
    else:
        assert ends.told == [error, {}]
    frames = [entry.name for entry in caught.traceback]
    assert (frames[-1] == "shorten_interrupt") == (number == signal.SIGINT)  # the other handlers print nothing
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert hook == "on_train_begin" or ends.saved[-1] == "step-0000000004"


@pytest.mark.cores(1)
def test_a_signal_with_an_error_shows_both(cores, capsys):
    with pytest.raises(SystemExit) as caught:
        fit(TellAt("on_epoch_end", signal.SIGTERM, ValueError("a callback's own")))
    assert caught.value.code == 143
    assert "a callback's own" in capsys.readouterr().err


class Slow(CheckpointDirectory):
    def write(self, checkpoint):
        time.sleep(0.3)
        return super().write(checkpoint)


@pytest.mark.cores(1)
def test_a_pending_checkpoint_survives_an_interrupt(cores, tmp_path):
    def stop(epoch, logs):
        if epoch == 1:
            raise KeyboardInterrupt

    keep = ModelCheckpoint(tmp_path)
    keep.checkpoint_writer.run.__class__ = Slow
    with pytest.raises(KeyboardInterrupt):
        fit(keep, LambdaCallback(on_epoch_begin=stop))
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-0000000002"]


@pytest.mark.cores(1)
def test_a_signal_without_an_epoch_is_handled(cores):
    with pytest.raises(KeyboardInterrupt):
        fit(TellAt("on_train_begin", signal.SIGINT), initial_epoch=5)


@pytest.mark.cores(1)
def test_a_signal_after_the_last_check_is_handled(cores):
    with pytest.raises(SystemExit), Interruption():
        os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), Interruption():
        os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(ZeroDivisionError), Interruption():
        raise ZeroDivisionError


def test_a_deferred_interrupt_arrives_after_an_error():
    with pytest.raises(KeyboardInterrupt), defer_interrupt():
        signal.raise_signal(signal.SIGINT)
        raise ImportError
