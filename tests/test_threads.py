"""The threads of a process take turns on its device, and none loses what another holds."""

import threading
import time
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import tpufit
from tpufit.backend.device_turns import Turns, turns
from tpufit.callbacks import Callback
from tpufit.errors import BusyError
from tpufit.runtime.pending_tensors import find_alive
from tpufit.runtime.thread_guard import guarding
from tpufit.utils.garbage_collector import collector

X = np.random.default_rng(0).random((64, 4)).astype("float32")
Y = X.sum(1, keepdims=True)


def in_thread(*calls):
    """Run calls in a new thread, and return it with the list of their results or errors."""
    answers = []

    def run():
        for call in calls:
            try:
                answers.append(call())
            except Exception as error:
                answers.append(error)

    thread = threading.Thread(target=run, name="other", daemon=True)
    thread.start()
    return thread, answers


def waits_for(turns):
    while not turns.waited_for:
        time.sleep(0.001)


def test_guarded_tensors_leave_no_reference_cycle():
    """Such a cycle would keep every frame below, and with them a whole trace, until the garbage collector runs."""

    class Value: ...

    def use():
        value = Value()
        with guarding([torch.zeros(1)]):
            pass
        return weakref.ref(value)

    with collector.pausing():
        assert use()() is None


@pytest.mark.cores(1)
def test_tensors_are_listed_while_another_thread_frees_some(cores, capfd):
    """PyTorch warns of tensors freed while Python lists them; their memory may be overwritten later."""
    fit(model(), cores, epochs=1)
    stop = threading.Event()

    def free():
        start = torch.ones(2, requires_grad=True)
        while not stop.is_set():
            result = start
            for _ in range(50):
                result = result * result  # autograd's graph keeps its factors, and Python no longer does
            del result

    thread, answers = in_thread(free)
    for _ in range(100):
        find_alive()
    stop.set()
    thread.join(120)
    assert answers == [None]
    assert "live PyObject references" not in capfd.readouterr().err


def test_a_thread_waits_for_a_call_or_is_admitted():
    turns = Turns()
    order = []

    def call(name, exclusive=False):
        with turns.taking_turn(name, exclusive):
            order.append(name)

    with turns.taking_turn("fit"):
        thread, _ = in_thread(lambda: call("predict"), lambda: call("fit", exclusive=True))
        waits_for(turns)
        with turns.taking_turn("predict"):  # the same thread may continue
            order.append("callback")
        turns.give_way()
        waits_for(turns)
        turns.give_way()  # not for a second fit
        order.append("end of the first fit")
    thread.join(120)
    assert order == ["callback", "predict", "end of the first fit", "fit"]


def test_reading_data_lends_the_device_to_short_calls_only():
    turns = Turns()
    done = threading.Event()

    def take(call, exclusive=False):
        with turns.taking_turn(call, exclusive):
            pass

    def read():
        with turns.taking_turn("predict"), turns.lending():
            return turns.describe_other_call()

    with turns.taking_turn("fit"):
        with turns.lending():
            second, _ = in_thread(lambda: take("fit", exclusive=True), done.set)
            waits_for(turns)
            thread, answers = in_thread(read)
            thread.join(120)
            assert answers == ["fit in thread 'MainThread'"]
        assert not done.is_set()
    second.join(120)
    assert done.is_set() and not turns.describe_other_call()


def test_many_threads_never_overlap():
    turns = Turns()
    running = []
    overlaps = []

    def work(name):
        for i in range(200):
            with turns.taking_turn(name, exclusive=i % 5 == 0):
                overlaps.extend(running)
                running.append(name)
                time.sleep(0)
                running.remove(name)
                if i % 3 == 0:
                    turns.give_way()
                elif i % 7 == 0:
                    with turns.lending():
                        time.sleep(0)

    threads = [in_thread(lambda name=name: work(name)) for name in "abcdef"]
    for thread, _ in threads:
        thread.join(120)
    assert [answers for _, answers in threads] == [[None]] * 6 and not overlaps


def test_a_thread_that_is_waited_for_is_refused(monkeypatch):
    monkeypatch.setattr("tpufit.backend.device_turns._PATIENCE", 0.5)
    turns = Turns()
    with turns.taking_turn("fit"):
        thread, answers = in_thread(lambda: turns.taking_turn("predict").__enter__())
        thread.join(120)
    assert isinstance(answers[0], BusyError) and not turns.waited_for
    assert "predict can't start: fit in thread 'MainThread'" in str(answers[0])
    assert "hasn't moved from test_threads.py:" in str(answers[0])


def model(seed=0, **options):
    torch.manual_seed(seed)
    made = tpufit.Model(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1)))
    made.compile(lambda p: torch.optim.SGD(p, 0.1), "mse", scale_lr=None, **options)
    return made


def fit(made, cores, epochs=6, **options):
    options = {"shuffle": False, "verbose": 0, **options}
    return made.fit(X, Y, batch_size=8 // cores or 1, epochs=epochs, cores=cores, **options).history["loss"]


class Meanwhile(Callback):
    """Lets another thread work from the second epoch on: each batch ends when it waits for the device, or has ended."""

    def __init__(self, *calls):
        self.calls = calls
        self.thread = threading.Thread()  # not alive

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            self.thread, self.answers = in_thread(*self.calls)

    def on_train_batch_end(self, batch, logs=None):
        while self.thread.is_alive() and not turns.waited_for:
            time.sleep(0.001)


@pytest.mark.cores(1, 8)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"steps_per_execution": 2},
        pytest.param({"accumulate_steps": 2}, marks=pytest.mark.soak),
        {"run_eagerly": True},
    ],
    ids=str,
)
def test_a_model_is_used_by_another_thread_while_it_trains(cores, options, tmp_path):
    expected = model(**options)
    losses = fit(expected, cores)
    made = model(**options)
    saved = tmp_path / "weights.safetensors"
    calls = (
        lambda: made.predict(X, verbose=0).shape,
        lambda: made(X[:8]).shape,
        lambda: np.isfinite(made.evaluate(X, Y, verbose=0)),
        lambda: {value.device.type for value in made.state_dict().values()},
        lambda: len(made.get_weights()),
        lambda: made.save_weights(saved),
    )
    other = Meanwhile(*calls)
    assert fit(made, cores, callbacks=[other]) == losses
    other.thread.join(120)
    assert other.answers == [(64, 1), (8, 1), True, {"cpu"}, 4, None], other.answers
    assert saved.stat().st_size
    for one, two in zip(expected.get_weights(), made.get_weights(), strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.cores(1, 8)
def test_parameters_are_refused_to_another_thread_in_fit(cores):
    made = model()
    other = Meanwhile(lambda: list(made.parameters()), made.write_back)
    fit(made, cores, callbacks=[other])
    other.thread.join(120)
    assert len(other.answers) == 2
    for answer in other.answers:
        assert isinstance(answer, BusyError) and "fit in thread 'MainThread'" in str(answer), answer
    assert all(np.isfinite(p.detach().cpu().numpy()).all() for p in made.parameters())


@pytest.mark.cores(1, 8)
@pytest.mark.parametrize("same", [False, True])
def test_two_fits_in_two_threads(cores, same):
    expected = []
    for seed in (0, 1):
        alone = model(seed)
        torch.manual_seed(7)  # both fits read it
        expected.append(fit(alone, cores))
    one, two = model(0), model(1)
    torch.manual_seed(7)
    threads = [in_thread(lambda each=each: fit(each, cores)) for each in (one, one if same else two)]
    for thread, _ in threads:
        thread.join(200)
    found = [answers[0] for _, answers in threads]
    assert all(len(losses) == 6 for losses in found), found
    if not same:
        assert found == expected


@pytest.mark.cores(1)
def test_data_may_ask_the_model_that_they_train(cores):
    """As in reinforcement learning: rows come from threads that predict, which `fit` waits for."""

    class Played(IterableDataset):
        def __iter__(self):
            for i in range(0, 64, 8):
                thread, answers = in_thread(lambda i=i: made.predict(X[i : i + 8], verbose=0))
                thread.join(120)
                yield X[i : i + 8], Y[i : i + 8] + 0 * answers[0]

    made = model()
    history = made.fit(Played(), epochs=3, cores=cores, verbose=0)
    assert len(history.history["loss"]) == 3


@pytest.mark.cores(1)
def test_a_callback_that_waits_for_a_thread_never_hangs(cores, monkeypatch):
    monkeypatch.setattr("tpufit.backend.device_turns._PATIENCE", 0.5)

    class Waiting(Callback):
        def on_epoch_end(self, epoch, logs=None):
            thread, self.answers = in_thread(lambda: self.model.predict(X, verbose=0))
            thread.join(120)

    waiting = Waiting()
    assert len(fit(model(), cores, epochs=2, callbacks=[waiting])) == 2
    (answer,) = waiting.answers
    assert isinstance(answer, BusyError) and "test_threads.py:" in str(answer)
