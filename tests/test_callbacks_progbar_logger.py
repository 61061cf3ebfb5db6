"""The progress bar and the plain lines: their text, how often they read logs, and the terminal after an error."""

import io
import re
import sys
import time
from collections.abc import MutableMapping
from pathlib import Path

import numpy as np
import pytest
from fake_model import FakeModel
from pseudo_terminal import in_a_terminal, on_screen
from rich.console import Console

from tpufit.callbacks import ProgbarLogger
from tpufit.callbacks._support.progress_line import ProgressLine
from tpufit.callbacks.progbar_logger import resolve_verbose
from tpufit.errors import ArgumentError

ROOT = Path(__file__).resolve().parent.parent
CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets: `clock[0] += seconds`."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def terminal(width=120, encoding="utf-8", file=None):
    file = file or io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
    environ = {"TERM": "xterm-256color"}
    return Console(file=file, force_terminal=True, width=width, color_system=None, _environ=environ)


def shown(console):
    """Return the output, and the lines that remain on the screen."""
    text = console.file.buffer.getvalue().decode(console.file.encoding)
    return text, on_screen(text)


def started(verbose, epochs=3, steps=4, console=None):
    progress = ProgbarLogger(console)
    progress.set_params({"epochs": epochs, "steps": steps, "verbose": verbose})
    progress.set_model(FakeModel())
    return progress


def fit(progress, epochs, steps, clock, step_seconds=0.5, read=lambda: {"loss": 0.5}):
    progress.on_train_begin({})
    for epoch in range(epochs):
        progress.on_epoch_begin(epoch, {})
        for batch in range(steps):
            clock[0] += step_seconds
            progress.on_train_batch_end(batch, read())
        progress.on_test_begin({})
        for batch in range(2):
            progress.on_test_batch_end(batch, read())
        progress.on_test_end({"loss": 9.0})
        progress.on_epoch_end(epoch, {"loss": 0.1234 - epoch / 10, "accuracy": 0.97, "val_loss": 0.00012345})
    progress.on_train_end({})


@pytest.mark.parametrize("verbose", [0, 2])
def test_the_progress_bars_attributes_are_keras(clock, verbose):
    progress = started(verbose, epochs=3, steps=None)
    assert (progress.verbose, progress.epochs, progress.target, progress.seen) == (verbose, 3, None, 0)
    seen = []
    fit(progress, 2, 4, clock, read=lambda: seen.append((progress.target, progress.seen)))
    assert seen[:4] == [(None, batch) for batch in range(4)] and seen[6:10] == [(4, batch) for batch in range(4)]
    assert (progress.target, progress.seen) == (4, 4)


class Counting(MutableMapping):
    """Logs that count first reads, which wait on a device."""

    waits = 0

    def __init__(self):
        self.was_read = False

    def __getitem__(self, name):
        Counting.waits += not self.was_read
        self.was_read = True
        return {"loss": 0.5}[name]

    def __iter__(self):
        return iter(["loss"])

    def __len__(self):
        return 1

    def __setitem__(self, name, value): ...
    def __delitem__(self, name): ...


@pytest.fixture
def waits(monkeypatch):
    monkeypatch.setattr(Counting, "waits", 0)
    return lambda: Counting.waits


@pytest.mark.parametrize("verbose", [1, 2])
def test_plain_lines_where_there_is_no_terminal(verbose, clock, capsys):
    fit(started(verbose, epochs=2), 2, 4, clock)
    assert capsys.readouterr().out == (
        "Epoch 1/2 - 2.0s - 4 steps - loss: 0.1234 - accuracy: 0.9700 - val_loss: 1.2345e-04\n"
        "Epoch 2/2 - 2.0s - 4 steps - loss: 0.0234 - accuracy: 0.9700 - val_loss: 1.2345e-04\n"
    )


def test_verbose_2_is_plain_in_a_terminal_too(clock):
    console = terminal(width=40)
    fit(started(2, epochs=1, console=console), 1, 4, clock)
    assert shown(console)[0] == (
        "Epoch 1/1 - 2.0s - 4 steps - loss: 0.1234 - accuracy: 0.9700 - val_loss: 1.2345e-04\n"
    )


def test_verbose_0_is_silent(clock, capsys, waits):
    console = terminal()
    progress = started(0, console=console)
    fit(progress, 2, 4, clock, read=Counting)
    progress.on_test_begin({})
    progress.on_test_end({"loss": 1.0})
    progress.on_predict_begin({})
    progress.on_predict_end({})
    assert shown(console)[0] == capsys.readouterr().out == ""
    assert waits() == 0


def test_a_plain_line_is_never_wrapped(clock, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    fit(started(2, epochs=1), 1, 4, clock)
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_plain_lines_read_no_batch_logs(clock, capsys, waits):
    fit(started(2), 3, 100, clock, read=Counting)
    assert waits() == 0


def test_the_bar_of_each_epoch_stays(clock):
    console = terminal()
    fit(started(1, epochs=2, console=console), 2, 4, clock)
    bar = "━" * 20
    assert shown(console)[1] == [
        f"Epoch 1/2 {bar} 4/4 2.0s - loss: 0.1234 - accuracy: 0.9700 - val_loss: 1.2345e-04",
        f"Epoch 2/2 {bar} 4/4 2.0s - loss: 0.0234 - accuracy: 0.9700 - val_loss: 1.2345e-04",
    ]


def test_the_bar_moves_and_shows_the_time_left_and_the_logs(clock):
    console = terminal()
    progress = started(1, epochs=3, steps=10, console=console)
    progress.on_epoch_begin(1, {})
    for batch in range(4):
        clock[0] += 5.0 if batch == 0 else 1.0  # the first step is compiled
        progress.on_train_batch_end(batch, {"loss": 0.5 + batch})
    drawn = CONTROLS.sub("", shown(console)[0]).replace("\r", "\n")
    assert re.search(r"Epoch 2/3 ━{20} 0/10 0\.0s\s", drawn)
    assert "1/10 5.0s" in drawn  # the remaining time is still unknown
    assert "4/10 6.0s left - loss: 2.5000" in drawn  # the logs of the previous step
    progress.on_epoch_end(1, {"loss": 0.25})
    progress.on_train_end({})
    assert shown(console)[1] == [f"Epoch 2/3 {'━' * 20} 4/10 8.0s - loss: 0.2500"]


def test_fast_steps_read_few_logs(clock, waits):
    """1000 steps of a millisecond: a second, so four drawings."""
    progress = started(1, epochs=1, steps=1000, console=terminal())
    fit(progress, 1, 1000, clock, step_seconds=0.001, read=Counting)
    assert 1 <= waits() <= 4


def test_slow_steps_read_the_logs_of_the_step_before(clock):
    progress = started(1, epochs=1, steps=3, console=terminal())
    progress.on_epoch_begin(0, {})
    every = [Counting() for _ in range(3)]
    for batch, logs in enumerate(every):
        clock[0] += 1.0
        progress.on_train_batch_end(batch, logs)
    assert [logs.was_read for logs in every] == [True, True, False]
    progress.on_epoch_end(0, {"loss": 0.5})


def test_an_unknown_number_of_steps_is_known_in_the_second_epoch(clock):
    console = terminal()
    fit(started(1, epochs=2, steps=None, console=console), 2, 3, clock)
    drawn = CONTROLS.sub("", shown(console)[0])
    assert "Epoch 1/2 " + "━" * 20 + " 1/? " in drawn
    assert "Epoch 2/2 " + "━" * 20 + " 1/3 " in drawn
    assert [line[:34] for line in shown(console)[1]] == [f"Epoch {n}/2 {'━' * 20} 3/3" for n in (1, 2)]


def test_a_narrow_terminal_truncates_only_the_moving_bar(clock):
    console = terminal(width=40)
    fit(started(1, epochs=1, console=console), 1, 4, clock)
    text, lines = shown(console)
    assert lines[-1].endswith("val_loss: 1.2345e-04")
    moving = [part for part in re.split(r"[\r\n]", CONTROLS.sub("", text)) if part.strip()][:-1]
    assert moving
    assert max(map(len, moving)) <= 40


def test_ascii_only_terminals(clock):
    console = terminal(encoding="ascii")
    progress = started(1, epochs=1, console=console)
    progress.on_epoch_begin(0, {})
    for batch in range(2):
        clock[0] += 1.0
        progress.on_train_batch_end(batch, {})
    assert "==========----------" in shown(console)[0]
    progress.on_epoch_end(0, {"loss": 0.5})


@pytest.mark.parametrize(
    ("what", "line"),
    [("test", "Evaluate - 1.0s - 2 steps - loss: 0.5000\n"), ("predict", "Predict - 1.0s - 2 steps\n")],
)
def test_evaluate_and_predict_have_their_own_line(what, line, clock, capsys):
    def run(progress):
        getattr(progress, f"on_{what}_begin")({})
        for batch in range(2):
            clock[0] += 0.5
            getattr(progress, f"on_{what}_batch_end")(batch, {"outputs": object()} if what == "predict" else {})
        getattr(progress, f"on_{what}_end")({"loss": 0.5} if what == "test" else {})

    run(started(2, steps=2))
    assert capsys.readouterr().out == line
    console = terminal()
    run(started(1, steps=2, console=console))
    title, seconds, _, *logs = line.strip().split(" - ")
    assert shown(console)[1] == [f"{title} {'━' * 20} 2/2 " + " - ".join([seconds, *logs])]


def test_the_bar_is_full_during_validation(clock):
    console = terminal()
    progress = started(1, epochs=1, console=console)
    progress.on_train_begin({})
    progress.on_epoch_begin(0, {})
    for batch in range(4):
        clock[0] += 0.01
        progress.on_train_batch_end(batch, {})
    assert "0/4" in shown(console)[1][-1]
    progress.on_test_begin({})
    assert "4/4" in shown(console)[1][-1]
    progress.on_train_end({})


def test_a_terminal_that_cant_draw_gets_lines(clock):
    console = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"})
    fit(started(1, epochs=1, console=console), 1, 4, clock)
    assert console.file.getvalue().startswith("Epoch 1/1 - 2.0s - 4 steps")


def test_an_evaluation_inside_another_bar_prints_a_line(clock):
    console = terminal()
    outer, inner = started(1, console=console), started(1, console=terminal(file=console.file))
    outer.on_train_begin({})
    outer.on_epoch_begin(0, {})
    inner.on_test_begin({})
    inner.on_test_end({"loss": 0.5})
    outer.on_epoch_end(0, {"loss": 0.25})
    outer.on_train_end({})
    lines = shown(console)[1]
    assert [line.split()[0] for line in lines] == ["Evaluate", "Epoch"]
    assert "━" not in lines[0]


def test_other_output_appears_above_the_bar(clock):
    console = terminal()
    progress = started(1, epochs=1, console=console)
    progress.on_epoch_begin(0, {})
    print("from a callback")
    progress.on_epoch_end(0, {"loss": 0.25})
    assert [line.split()[0] for line in shown(console)[1]] == ["from", "Epoch"]


def test_logs_that_arent_numbers_are_omitted(clock, capsys):
    progress = started(2)
    progress.on_epoch_begin(0, {})
    progress.on_epoch_end(0, {"loss": np.float32(0.5), "recall": np.zeros(3)})
    assert capsys.readouterr().out == "Epoch 1/3 - 0.0s - 0 steps - loss: 0.5000\n"


def test_an_error_keeps_the_bar_and_restores_the_streams(clock):
    console, streams = terminal(), (sys.stdout, sys.stderr)
    progress = started(1, epochs=1, console=console)
    progress.on_train_begin({})
    progress.on_epoch_begin(0, {})
    for batch in range(3):
        clock[0] += 1.0
        progress.on_train_batch_end(batch, {"loss": 0.5})
    assert sys.stdout is not streams[0]
    progress.on_train_end({})
    text, lines = shown(console)
    assert lines == [f"Epoch 1/1 {'━' * 20} 3/4 3.0s - loss: 0.5000"]
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is visible again
    assert (sys.stdout, sys.stderr) == streams
    fit(started(1, epochs=1, console=console), 1, 4, clock)  # and the next fit has its bar
    assert shown(console)[1][-1].startswith(f"Epoch 1/1 {'━' * 20} 4/4")


def test_logs_that_cant_be_read_leave_a_clean_terminal(clock):
    class Broken(Counting):
        def __getitem__(self, name):
            raise RuntimeError("the device failed")

    console, streams = terminal(), (sys.stdout, sys.stderr)
    progress = started(1, epochs=1, console=console)
    progress.on_epoch_begin(0, {})
    progress.on_train_batch_end(0, Broken())
    clock[0] += 1.0
    with pytest.raises(RuntimeError, match="device failed"):
        progress.on_train_batch_end(1, Broken())
    assert (sys.stdout, sys.stderr) == streams
    fit(started(1, epochs=1, console=console), 1, 4, clock)  # and the next fit has its bar
    assert shown(console)[1][-1].startswith(f"Epoch 1/1 {'━' * 20} 4/4")


def test_an_error_leaves_no_plain_line(clock, capsys):
    progress = started(2)
    for broken in ("train", "test"):
        getattr(progress, f"on_{broken}_begin")({})
        if broken == "train":
            progress.on_epoch_begin(0, {})
        getattr(progress, f"on_{broken}_end")({})
    assert capsys.readouterr().out == ""


@pytest.mark.soak
def test_a_real_terminal():
    out = in_a_terminal(
        "import sys, time\n"
        "from types import SimpleNamespace\n"
        "from tpufit.callbacks.progbar_logger import ProgbarLogger, resolve_verbose\n"
        "progress = ProgbarLogger()\n"
        "progress.set_params({'epochs': 1, 'steps': 3, 'verbose': resolve_verbose('auto')})\n"
        "progress.set_model(SimpleNamespace(input_bound=None, rows_seen=0, speed=lambda pace: {}))\n"
        "progress.on_train_begin(); progress.on_epoch_begin(0)\n"
        "for batch in range(3):\n"
        "    time.sleep(0.3); progress.on_train_batch_end(batch, {'loss': 0.5})\n"
        "print('a line ' * 20, file=sys.stderr)\n"
        "progress.on_epoch_end(0, {'loss': 0.25}); progress.on_train_end()\n"
    )
    assert out.count("Epoch 1/1") >= 5  # the start, each step, the end
    assert "2/3" in CONTROLS.sub("", out)
    above, last = on_screen(out)
    assert above == ("a line " * 20).strip()  # longer than the terminal's width, and not wrapped
    assert re.fullmatch(r"Epoch 1/1 ━{20} 3/3 \d\.\ds - loss: 0\.2500", last)
    assert out.rindex("\x1b[?25h") > out.rindex("\x1b[?25l")


@pytest.mark.slow
def test_errors_redirected_to_a_file_stay_there(tmp_path):
    out = in_a_terminal(
        "import sys\n"
        "from types import SimpleNamespace\n"
        "from tpufit.callbacks.progbar_logger import ProgbarLogger\n"
        "progress = ProgbarLogger()\n"
        "progress.set_params({'epochs': 1, 'steps': 3, 'verbose': 1})\n"
        "progress.set_model(SimpleNamespace(input_bound=None, rows_seen=0, speed=lambda pace: {}))\n"
        f"sys.stderr = open({str(tmp_path / 'errors')!r}, 'w')\n"
        "progress.on_epoch_begin(0)\n"
        "print('a warning', file=sys.stderr, flush=True)\n"
        "progress.on_epoch_end(0, {'loss': 0.25})\n"
    )
    assert (tmp_path / "errors").read_text() == "a warning\n"
    assert "a warning" not in out


def test_auto_is_plain_without_a_terminal(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in CI services, whose logs can't be redrawn
    assert resolve_verbose("auto") == 2


@pytest.mark.parametrize("verbose", [0, 1, 2])
def test_an_explicit_verbose_is_used(verbose):
    assert resolve_verbose(verbose) == verbose


@pytest.mark.parametrize("verbose", [3, -1, "quiet", None, 0.5])
def test_an_invalid_verbose_is_an_error(verbose):
    with pytest.raises(ArgumentError, match=re.escape(f"got {verbose!r}")):
        resolve_verbose(verbose)


def test_the_remaining_time_excludes_the_first_step():
    line = ProgressLine("Epoch 1/1", total=11, now=0.0)
    line.advance(1, now=60.0)
    assert line.seconds_remaining(60.0) is None
    line.advance(6, now=70.0)
    assert line.seconds_remaining(70.0) == pytest.approx(10.0)
    line.advance(11, now=80.0)
    assert line.seconds_remaining(80.0) is None


def test_validation_counts_neither_in_rows_nor_in_time(clock, capsys):
    progress = started(2, epochs=1)
    progress.on_train_begin({})
    progress.on_epoch_begin(0, {})
    for batch in range(4):
        clock[0] += 1.0
        progress.model.rows_seen += 20
        progress.on_train_batch_end(batch, {})
        if batch % 2:  # the second validation is at the epoch's end
            clock[0] += 0.5  # until the device is idle
            progress.on_test_begin({})
            clock[0] += 7.0
            progress.model.rows_seen += 500
            progress.on_test_end({"loss": 0.5})
    progress.on_epoch_end(0, {"loss": 0.5})
    # 60 rows after the first step, in 3 seconds plus two half seconds.
    assert capsys.readouterr().out == "Epoch 1/1 - 19.0s - 4 steps - 15 samples/s - loss: 0.5000\n"


def test_one_step_is_singular():
    line = ProgressLine("Predict", total=1, now=0.0)
    line.advance(1, now=0.5)
    assert line.summary(now=0.5) == "Predict - 0.5s - 1 step"


def test_speed_excludes_the_first_step_and_validation():
    line = ProgressLine("Epoch 1/1", total=3, now=0.0)
    line.advance(1, now=60.0, rows=32)
    assert line.samples_per_second() is None
    line.advance(2, now=60.5, rows=64)
    assert line.samples_per_second() == 64.0
    line.advance(3, now=61.0, rows=77)  # a short batch
    line.stop(now=61.5)  # when the device is idle
    line.stop(now=70.0)  # validated
    assert line.samples_per_second() == 30.0
    assert line.summary(now=70.0) == "Epoch 1/1 - 1:10 - 3 steps - 30 samples/s"
    slow = ProgressLine("Predict", total=2, now=0.0)
    slow.advance(1, now=0.0, rows=1)
    slow.advance(2, now=4.0, rows=2)
    assert slow.bar(4.0, ended=True).plain.endswith(" 2/2 4.0s - 0.25 samples/s")


def test_rows_are_counted_by_the_model(clock, capsys):
    progress = started(2, epochs=1)
    progress.model.rows_seen = 1000  # by an earlier fit
    progress.on_train_begin({})
    progress.on_epoch_begin(0, {})
    for batch in range(4):
        clock[0] += 1.0
        progress.model.rows_seen += 20
        progress.on_train_batch_end(batch, {})
    progress.on_test_begin({})
    clock[0] += 5.0
    progress.model.rows_seen += 500
    progress.on_epoch_end(0, {"loss": 0.5})
    assert capsys.readouterr().out == "Epoch 1/1 - 9.0s - 4 steps - 20 samples/s - loss: 0.5000\n"


def test_a_compilation_has_its_own_clock():
    line = ProgressLine("Epoch 1/1", total=3, now=0.0)
    assert line.bar(7.0, ended=False, compiling_since=5.0).plain.endswith(" 0/3 compiling... 2.0s")


def test_the_bar_shows_the_share_of_waiting_for_data(clock):
    console = terminal()
    progress = started(1, epochs=1, console=console)
    progress.on_train_begin({})
    progress.on_epoch_begin(0, {})
    progress.model.input_bound = 0.5
    clock[0] += 1.0
    progress.on_train_batch_end(0, {})
    assert shown(console)[1] == [f"Epoch 1/1 {'━' * 20} 1/4 1.0s - waited for data: 50%"]
    progress.on_train_end({})
