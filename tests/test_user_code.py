"""Warnings point at the user's line, from anywhere in tpufit, and don't show tpufit's code."""

import gc
import inspect
import re
import sys
import threading
from time import sleep

import pytest
import torch
from torch import nn

import tpufit
from tpufit.backend.device_turns import Turns
from tpufit.runtime.thread_guard import guarding
from tpufit.utils.user_code import belongs_to_user, find_line_of_thread, find_raising_line, find_user_line, warn


def here():
    return inspect.currentframe().f_back.f_lineno


def test_a_warning_is_shown_at_the_users_line():
    with pytest.warns(UserWarning, match="no effect") as caught:
        tpufit.data.stream(iter([torch.zeros(2, 2)]), batch_size=2, cores=1)
        line = here() - 1
    assert [(w.filename, w.lineno) for w in caught] == [(__file__, line)]


def test_a_warning_of_a_thread_is_shown_at_the_main_threads_line():
    with pytest.warns(UserWarning, match="from afar") as caught:
        thread = threading.Thread(target=warn, args=["from afar"])
        thread.start()
        thread.join()
    source = inspect.getsource(test_a_warning_of_a_thread_is_shown_at_the_main_threads_line)
    first = inspect.currentframe().f_code.co_firstlineno
    assert caught[0].filename == __file__ and first < caught[0].lineno < first + len(source.splitlines())


def test_no_gc_while_threads_frames_are_read(monkeypatch):
    """On Python 3.11, collecting an object that lets another thread run overwrites memory."""
    native = sys._current_frames
    turns = Turns()
    running = []

    def looked_at():
        running.append(gc.isenabled())
        return native()

    monkeypatch.setattr(sys, "_current_frames", looked_at)
    assert find_line_of_thread(threading.get_ident()).startswith("test_user_code.py:")
    with pytest.warns(UserWarning, match="from afar"):
        thread = threading.Thread(target=warn, args=["from afar"])
        thread.start()
        thread.join()
    with guarding([torch.zeros(1)]):
        assert gc.isenabled()
    with turns.taking_turn("fit"):
        thread = threading.Thread(target=turns.taking_turn("predict").__enter__, daemon=True)
        thread.start()
        while len(running) < 4:
            sleep(0.01)
    thread.join()
    assert running[:4] == [False] * 4 and gc.isenabled()


def test_the_users_line_of_an_error_or_its_cause():
    def wrong():
        torch.zeros(2) @ torch.zeros(3)

    with pytest.raises(RuntimeError) as caught:
        wrong()
    first = wrong.__code__.co_firstlineno
    assert find_raising_line(caught.value) == f"test_user_code.py:{first + 1}"
    translated = ValueError("as a user reads it")
    translated.__cause__ = caught.value
    assert find_raising_line(translated) == f"test_user_code.py:{first + 1}"
    assert find_raising_line(ValueError("never raised")) == ""


def test_a_repeated_warning_is_shown_once_a_line(recwarn):
    import warnings

    warnings.simplefilter("default")
    for _ in range(3):
        warn("again")
    assert [str(w.message) for w in recwarn] == ["again"]


def test_the_users_line_is_not_that_of_a_library():
    assert find_user_line() == f"test_user_code.py:{here()}"
    assert sorted([0], key=lambda _: find_user_line()) and re.match(r"test_user_code.py:\d+", find_user_line())


@pytest.mark.cores(1, 8)
def test_a_step_that_cant_be_replayed_is_shown_at_fit(cores):
    class Counts(tpufit.Model):
        calls = 0

        def train_step(self, batch):
            self.calls += 1
            return super().train_step((batch[0], batch[1] * self.calls))

    model = Counts(nn.Linear(2, 1))
    model.compile("sgd", "mse")
    x = torch.zeros(8 * cores * 6, 2)
    with pytest.warns(UserWarning, match="traced again") as caught:
        model.fit(x, x[:, :1], batch_size=8, verbose=0, cores=cores)
        line = here() - 1
    assert [(w.filename, w.lineno) for w in caught] == [(__file__, line)]


@pytest.mark.parametrize("folder", ["lib/python3.12/site-packages", "usr/local/lib/python3.12/dist-packages"])
def test_code_of_installed_packages_is_not_the_users(folder):
    assert not belongs_to_user(f"/{folder}/torch/nn/modules/module.py")
    assert belongs_to_user("/content/train.py")
