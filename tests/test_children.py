"""Processes that the library starts and waits for."""

import signal
import subprocess

import pytest

from tpufit.utils.children import run


def test_an_interrupt_while_a_process_starts_ends_it(monkeypatch):
    started = []
    popen = subprocess.Popen

    def start(*args, **kwargs):
        started.append(popen(*args, **kwargs))
        signal.raise_signal(signal.SIGINT)
        return started[0]

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        monkeypatch.setattr(subprocess, "Popen", start)
        with pytest.raises(KeyboardInterrupt):
            run(["-c", "import time; time.sleep(1e6)"], "waiting", 1e6, clock=False)
        assert started[0].poll() == -signal.SIGKILL
    finally:
        signal.signal(signal.SIGINT, before)
        started[0].kill()
        started[0].wait()
