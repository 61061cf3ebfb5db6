"""Prefetcher: batches in order, each once; errors at their position; no thread is left behind."""

import gc
import signal
import threading
import time
import traceback
import weakref
from contextlib import contextmanager
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpufit.data import prefetch
from tpufit.data.prefetch import Prefetcher
from tpufit.errors import ArgumentError

SOON = 120.0  # the time limit, in seconds, for something that takes a few milliseconds


@pytest.fixture(autouse=True)
def _no_test_hangs():
    def give_up(*_):
        raise TimeoutError("the test was still running after 280 s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, 280)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True)
def _no_thread_is_left(_no_test_hangs):
    yield
    assert becomes(lambda: not feed_threads())


def feed_threads():
    return [thread for thread in threading.enumerate() if thread.name == "tpufit-prefetch"]


def becomes(condition):
    deadline = time.monotonic() + SOON
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return condition()


def same(batch):
    return batch


def filled(source, count, depth):
    """Return a prefetcher with a number of ready batches."""
    given = []
    feed = Prefetcher(source, lambda batch: given.append(batch) or batch, depth)
    assert becomes(lambda: len(given) == count)
    with feed.pausing():  # which waits until the last of them is delivered
        return feed


class Source:
    """Endless numbers; it counts reads, and records the thread in which its generator was closed."""

    def __init__(self):
        self.read = 0
        self.closed_in = None

    def __iter__(self):
        try:
            for self.read in count(1):
                yield self.read - 1
        finally:
            self.closed_in = threading.current_thread().name


class Gate:
    """A source that gives one batch, then waits until it is released."""

    def __init__(self):
        self.reached, self.go = threading.Event(), threading.Event()

    def __iter__(self):
        yield 0
        self.reached.set()
        self.go.wait(SOON)
        yield 1


@settings(deadline=None)  # a busy machine delays threads
@given(length=st.integers(0, 60), depth=st.integers(1, 70), generator=st.booleans())
def test_every_batch_once_and_in_order(length, depth, generator):
    batches = (i for i in range(length)) if generator else range(length)
    feed = Prefetcher(batches, lambda batch: (batch, threading.current_thread().name), depth)
    assert list(feed) == [(i, "tpufit-prefetch") for i in range(length)]
    assert list(feed) == []
    assert not feed_threads()  # the end was awaited


@settings(deadline=None)  # a busy machine delays threads
@given(good=st.integers(0, 10), depth=st.integers(1, 12), in_prepare=st.booleans())
def test_an_error_follows_all_earlier_batches(good, depth, in_prepare):
    error = KeyError("a bad row")

    def batches():
        yield from range(good)
        if not in_prepare:
            raise error
        yield "bad"

    def prepare(batch):
        if batch == "bad":
            raise error
        return batch

    feed, got = Prefetcher(batches(), prepare, depth), []
    with pytest.raises(KeyError) as caught:
        for batch in feed:
            got.append(batch)
    assert caught.value is error
    assert got == list(range(good))
    assert list(feed) == []
    assert not feed_threads()


def test_an_error_shows_the_line_of_the_users_code():
    def users_data():
        yield 1
        raise ValueError("a bad row")  # this line

    with Prefetcher(users_data(), same) as feed, pytest.raises(ValueError) as caught:
        list(feed)
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (last.filename, last.name, last.line) == (
        __file__,
        "users_data",
        'raise ValueError("a bad row")  # this line',
    )
    assert caught.value.__context__ is None


@pytest.mark.parametrize("kind", [SystemExit, GeneratorExit, KeyboardInterrupt])
def test_base_exceptions_are_passed_on(kind):
    def prepare(batch):
        raise kind("from the thread")

    with Prefetcher([1], prepare) as feed, pytest.raises(kind, match="from the thread"):
        next(feed)


def test_data_that_cannot_be_iterated():
    with Prefetcher(5, same) as feed, pytest.raises(TypeError, match="not iterable"):
        next(feed)


def test_stop_iteration_in_prepare_is_an_error():
    with (
        Prefetcher([1, 2], lambda batch: next(iter(()))) as feed,
        pytest.raises(RuntimeError, match="prepare raised Stop"),
    ):
        list(feed)


def test_an_error_references_neither_data_nor_feed():
    class Data:
        def __iter__(self):
            return map(lambda row, _: row, range(3), [self] * 3)

    def prepare(batch):
        raise ValueError("a bad row")

    data = Data()
    feed = Prefetcher(data, prepare)
    data_gone, feed_gone = weakref.ref(data), weakref.ref(feed)
    gc.disable()  # nor in a cycle, which would be collected too late
    try:
        try:
            next(feed)
        except ValueError as error:
            kept = error  # as a notebook does, with all frames of the traceback
        del data
        assert data_gone() is None
        del feed, kept
        assert feed_gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("depth", [0, -1, True, 1.5, None])
def test_a_depth_must_be_a_number_of_batches(depth):
    with pytest.raises(ArgumentError, match="depth must be a whole number"):
        Prefetcher([], same, depth)


# Reading ahead


@settings(deadline=None)  # a busy machine delays threads
@given(depth=st.integers(1, 5), taken=st.integers(0, 8))
def test_at_most_the_depth_is_read_ahead(depth, taken):
    source = Source()
    with Prefetcher(source, same, depth) as feed:
        for _ in range(taken):
            next(feed)
        least = taken + depth - (depth - 1) // 2  # the slots of up to half of them are released together
        assert becomes(lambda: source.read >= least)
        time.sleep(0.002)
        assert least <= source.read <= taken + depth


def test_batches_are_freed_early():
    class Batch:
        pass

    raw, prepared = [], []

    def prepare(batch):
        raw.append(weakref.ref(batch))
        made = Batch()
        prepared.append(weakref.ref(made))
        return made

    with Prefetcher((Batch() for _ in range(9)), prepare, depth=1) as feed:
        for taken in range(1, 4):
            next(feed)
            assert becomes(lambda taken=taken: len(prepared) == taken + 1 and not any(ref() for ref in raw))
            assert becomes(lambda: sum(ref() is not None for ref in prepared) == 1)  # the pending batch


def test_seconds_of_waiting(monkeypatch):
    now, asked = [0.0], []

    def clock():
        asked.extend(now if threading.current_thread() is threading.main_thread() else [])
        return now[0]

    def slow():
        for i in range(3):
            assert becomes(lambda i=i: len(asked) == 2 * i + 1)  # `next` has begun to wait
            now[0] += 5
            yield i

    with monkeypatch.context() as patch:
        patch.setattr(prefetch, "perf_counter", clock)
        with Prefetcher(slow(), same) as feed:
            list(feed)
            assert feed.times.waited == 15
    with filled(range(3), 3, depth=3) as feed:
        next(feed), next(feed), next(feed)
        assert feed.times.waited == 0


# Ending


@settings(deadline=None)  # a busy machine delays threads
@given(taken=st.integers(0, 5), depth=st.integers(1, 3))
def test_close_in_the_middle(taken, depth):
    source = Source()
    batches = iter(source)  # referenced, so that only closing ends it
    feed = Prefetcher(batches, same, depth)
    for _ in range(taken):
        next(feed)
    feed.close()
    read = source.read
    assert read <= taken + depth
    assert not feed_threads()
    assert list(feed) == []
    feed.close()
    assert source.read == read
    # A generator that wasn't started has nothing to finish.
    assert source.closed_in == ("tpufit-prefetch" if read else None)


def test_only_generators_are_closed():
    class File:
        def __iter__(self):
            return iter(range(3))

        def close(self):
            pytest.fail("it is the user's")

    assert list(Prefetcher(File(), same)) == [0, 1, 2]


def test_a_with_block_left_by_an_error_stops_the_thread():
    source = Source()
    with pytest.raises(ZeroDivisionError), Prefetcher(iter(source), same) as feed:
        next(feed)
        1 / 0  # noqa: B018
    assert not feed_threads()
    assert source.closed_in == "tpufit-prefetch"


def test_a_dropped_feed_ends_its_thread():
    source = Source()
    feed = Prefetcher(iter(source), same)
    gone = weakref.ref(feed)
    next(feed)
    del feed
    assert gone() is None
    assert becomes(lambda: not feed_threads())
    assert source.closed_in == "tpufit-prefetch"


def test_a_feed_dropped_in_a_cycle_ends_its_thread():
    class Loop:
        def __init__(self):
            self.feed, self.myself = Prefetcher(count(), same), self

    loop = Loop()
    next(loop.feed)
    del loop
    gc.collect()
    assert becomes(lambda: not feed_threads())


def test_close_while_the_data_block(monkeypatch):
    monkeypatch.setattr(prefetch, "_PATIENCE", 0.05)
    gate, prepared = Gate(), []
    feed = Prefetcher(gate, prepared.append)
    next(feed)
    assert gate.reached.wait(SOON)
    feed.close()  # stops waiting
    assert feed_threads()
    gate.go.set()
    assert becomes(lambda: not feed_threads())
    assert prepared == [0]  # batches after close weren't prepared


# Pausing


@contextmanager
def recording():
    """Return a `prepare` that records whether it runs during a pause."""
    paused, wrong = threading.Event(), []

    def prepare(batch):
        for _ in range(3):
            wrong.extend([batch] if paused.is_set() else [])
            time.sleep(0.0005)
        return batch

    yield prepare, paused
    assert wrong == []


def test_no_batch_is_prepared_while_prefetching_is_paused():
    with recording() as (prepare, paused), Prefetcher(range(60), prepare, depth=4) as feed:
        got = []
        for batch in feed:
            got.append(batch)
            if batch % 5 == 0:
                with feed.pausing():
                    paused.set()
                    time.sleep(0.005)
                    paused.clear()
    assert got == list(range(60))


def test_ready_batches_are_available_while_prefetching_is_paused():
    with filled(range(10), 3, depth=3) as feed:
        with feed.pausing():
            assert [next(feed) for _ in range(3)] == [0, 1, 2]
            with pytest.raises(RuntimeError, match="no batch is ready during a pause"):
                next(feed)
        assert list(feed) == list(range(3, 10))


def test_the_end_of_data_is_available_while_prefetching_is_paused():
    with Prefetcher(range(2), same, depth=5) as feed:
        assert becomes(lambda: not feed_threads())
        with feed.pausing():
            assert list(feed) == [0, 1]


def test_close_does_not_wait_while_prefetching_is_paused(monkeypatch):
    monkeypatch.setattr(prefetch, "_PATIENCE", 1e6)
    source, prepared = Source(), []
    feed = Prefetcher(source, prepared.append, depth=1)
    assert becomes(lambda: len(prepared) == 1)
    with feed.pausing():
        next(feed)
        assert becomes(lambda: source.read == 2)  # the thread has the batch, and waits for the end of the pause
        feed.close()
    assert becomes(lambda: not feed_threads())
    assert prepared == [0]


# Processes


def test_ctrl_c_ends_a_wait_immediately(run_python):
    result = run_python(
        """
        import os, signal, sys, threading, time
        from tpufit.data.prefetch import Prefetcher

        go = threading.Event()
        def data():
            go.wait()
            yield "the batch"

        feed = Prefetcher(data(), str)
        def press():
            while sys._current_frames()[main].f_code is not Prefetcher._get.__code__:
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGINT)
        main = threading.get_ident()
        threading.Thread(target=press).start()
        try:
            next(feed)
        except KeyboardInterrupt:
            print(feed.times.waited > 0)
        go.set()
        print(list(feed))  # nothing was lost
        """
    )
    assert (result.stdout.split("\n"), result.returncode) == (["True", "['the batch']", ""], 0), result.stderr


@pytest.mark.slow
def test_the_interpreter_exits_while_the_data_block(run_python):
    result = run_python(
        """
        import threading
        from tpufit.data.prefetch import Prefetcher

        blocked = threading.Semaphore(0)

        def data():
            yield 1
            blocked.release()
            threading.Event().wait()

        open, dropped, closed = feeds = [Prefetcher(data(), str) for _ in range(3)]
        print(*map(next, feeds))
        for _ in feeds:
            blocked.acquire()
        closed.close()
        del dropped, feeds
        print([thread.name for thread in threading.enumerate()].count("tpufit-prefetch"))
        """
    )
    assert (result.stdout, result.returncode) == ("1 1 1\n3\n", 0), result.stderr


def test_the_interpreter_exits_while_the_thread_is_inside_torch(run_python):
    # Without waiting for the thread: "terminate called without an active exception", and exit code 134.
    result = run_python(
        """
        import itertools, os, threading, torch
        from tpufit.data import prefetch
        from tpufit.data.prefetch import Prefetcher

        prefetch._PATIENCE = 1000
        square, made, begun = torch.randn(700, 700), threading.Event(), threading.Event()

        def prepare(batch):
            made.wait()
            begun.set()
            while not feed._channel.stopped:
                square @ square
            for _ in range(20):
                square @ square
            os.write(1, b"prepared\\n")

        feed = Prefetcher(itertools.count(), prepare, depth=10**6)
        made.set()
        begun.wait()
        """
    )
    # Its current call has ended, and nothing else was started.
    assert (result.stdout, result.returncode) == ("prepared\n", 0), result.stderr


def test_a_fork_changes_nothing(run_python):
    result = run_python(
        """
        import os, time, warnings
        from tpufit.data.prefetch import Prefetcher

        warnings.simplefilter("ignore", DeprecationWarning)  # since Python 3.12: a fork of a process with threads
        given = []
        feed = Prefetcher(range(5), lambda batch: given.append(batch) or batch)
        got = [next(feed)]
        while len(given) < 3:
            time.sleep(0.001)
        with feed.pausing():  # until the last of them is handed over
            pass
        child = os.fork()
        if not child:
            try:
                while True:
                    next(feed)
            except RuntimeError as error:
                right = "another process" in str(error)
            feed.close()
            os._exit(7 if right else 1)
        got += feed
        print(got, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
    )
    assert (result.stdout, result.returncode) == ("[0, 1, 2, 3, 4] 7\n", 0), result.stderr


def test_a_loader_whose_workers_are_forked_from_the_thread(run_python):
    result = run_python(
        """
        import torch, warnings
        from torch.utils.data import DataLoader, Dataset
        from tpufit.data.prefetch import Prefetcher

        warnings.simplefilter("ignore", DeprecationWarning)
        class Rows(Dataset):
            def __len__(self):
                return 7
            def __getitem__(self, i):
                if i == 6:
                    raise ValueError("row 6 is bad")
                return i

        with Prefetcher(DataLoader(Rows(), batch_size=2, num_workers=1), torch.Tensor.tolist) as feed:
            try:
                for batch in feed:
                    print(batch)
            except ValueError as error:
                print("row 6 is bad" in str(error), "__getitem__" in str(error))
        """
    )
    assert result.stdout.splitlines() == ["[0, 1]", "[2, 3]", "[4, 5]", "True True"], result.stderr
    assert result.returncode == 0, result.stderr
