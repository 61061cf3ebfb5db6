"""`CoreConnections`: the other cores' processes, the connections to them, and the detection of failures.

The user's process sends every message to all of them. Even if a signal comes, a message reaches all cores or none:
Python prepares the message, and `uninterrupted` calls send it to all cores.
"""

from __future__ import annotations

import select
import socket
import subprocess
import tempfile
import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from selectors import EVENT_READ, DefaultSelector
from time import monotonic, sleep
from typing import IO, Any

import torch

from ...errors import DeviceLostError
from ...hosts.heartbeat import read_silence_limit
from ...utils.child_python import child_python
from ...utils.children import explain_end
from ...utils.uninterrupted import uninterrupted
from .messages import Begin, Block, Failed, Imported, Map, Message, Probe, Sign, Started, pack, receive

_PROCESS = f"{__package__}.core_process"
_SEND_BUFFER = 1 << 18  # bytes, of a socket
_MIN_BLOCK = 1 << 20  # bytes
_MAX_PAUSE_SECONDS = 1e-3  # between two checks of a condition
_PROBE_SECONDS = 2.0  # between two probes of the cores for failed programs, during a wait
_SAME_FAILURE_SECONDS = 10.0  # for the other cores to fail like the first core


class CoreConnections:
    """The processes of all cores except the first core, which this process drives.

    Args:
        environments: The environment variables that TorchTPU reads, for each core of this host.
        start: Starts the runtime in this process; called in a thread, once all other processes can start it, too.
        on_loss: Called when the cores fail after the start has begun, because the device may then never answer.
        first: The number of this host's first core among the cores of all hosts (default 0), for error messages.

    Attributes:
        count: The number of this host's cores, including the first.
        failure: The reason why the cores have failed; empty if they haven't.
        lock: Held while messages that belong together are sent, because another thread sends batches ahead.
    """

    def __init__(
        self,
        environments: Sequence[Mapping[str, str]],
        start: Callable[[], None],
        on_loss: Callable[[], None],
        first: int = 0,
    ) -> None:
        self.count = len(environments)
        self._first = first
        self.failure = ""
        self.lock = threading.RLock()
        self._start = start
        self._on_loss = on_loss
        self._sockets: list[socket.socket] = []
        self._send_poll = select.poll()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._output_files: list[IO[bytes]] = []
        self._answers = {Imported: 0, Started: 0}
        self._start_begun = False  # True once the start of this process's runtime has begun
        self._ready = False
        self._reports = [0] * (self.count - 1)  # the number of failures received from each core
        self._failed_messages: dict[int, str] = {}  # the errors of messages, by the message's number
        self._failed_programs: dict[int, str] = {}  # the last errors of programs, by the core
        self._blocks = [Block(_MIN_BLOCK)]  # the first block contains the cores' signs
        self._last_use: list[int] = [0]  # the number of the last message that used each block
        self._signs = self._blocks[0].tensor_at(0, (self.count, len(Sign)), torch.int64).numpy()[1:]
        self._sent = 0
        # Started in a thread of their own, because the processes end when the thread that has started them ends.
        self._thread = threading.Thread(
            target=self._run_processes, args=(environments,), daemon=True, name="tpufit cores"
        )

    # Processes

    def begin(self) -> None:
        """Start the processes and their runtimes, and wait for them; after an interrupt, continue the start."""
        if self._thread.ident is None:
            self._thread.start()
        self.wait_until(lambda: self._ready and self._answers[Started] == self.count - 1)

    def cancel(self) -> bool:
        """End the processes, and return True, if the start of this process's runtime hasn't begun."""
        with self.lock:
            if not self._start_begun:
                self._fail("their start was canceled")
            return not self._start_begun

    def _run_processes(self, environments: Sequence[Mapping[str, str]]) -> None:
        """Start the processes and listen to them."""
        if self.count == 1:
            return self._begin()
        with DefaultSelector() as answers:
            try:
                for core in range(1, self.count):
                    self._sockets.append(self._start_process(core, environments[core]))
                    self._send_poll.register(self._sockets[-1], select.POLLOUT)
                    answers.register(self._sockets[-1], EVENT_READ, (core, self._sockets[-1]))
                self.tell(Map(0, self._blocks[0].nbytes), self._blocks[0].descriptor)
            except OSError as error:
                self._fail(f"no process could be started for a core: {error}")
            while answers.get_map():
                for key, _ in answers.select():
                    core, connection = key.data
                    if not self._handle_answer(core, connection):
                        answers.unregister(connection)
                        self._note_end(core)

    def _handle_answer(self, core: int, connection: socket.socket) -> bool:
        """Handle a core's message. Return False if its connection is closed."""
        try:
            answer, _, _ = receive(connection)
        except ConnectionError:
            return False
        if isinstance(answer, Failed):
            self._failed_messages[answer.message] = answer.why
            if answer.stops_programs:
                self._failed_programs[core] = answer.why
            self._reports[core - 1] += 1
        elif isinstance(answer, (Imported, Started)):
            self._answers[type(answer)] += 1
            if self._answers[Imported] == self.count - 1 and not self._start_begun:
                threading.Thread(target=self._begin, daemon=True).start()
        return answer is not None

    def _begin(self) -> None:
        """Start the runtime in all processes at once, because each start waits for the others."""
        with self.lock:
            if self.failure or self._start_begun:
                return
            self._start_begun = True
            self.tell(Begin())
        try:
            self._start()
        except RuntimeError as error:
            self._fail(str(error))
        self._ready = True

    def _start_process(self, core: int, variables: Mapping[str, str]) -> socket.socket:
        """Start the process of a core, and return the connection to it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        output = tempfile.TemporaryFile()  # noqa: SIM115 - it is read after the process has ended
        command = ["-m", _PROCESS, str(theirs.fileno()), str(core), str(self.count)]
        with theirs:
            self._processes.append(
                subprocess.Popen(
                    **child_python(command, {**variables, "PYTHONFAULTHANDLER": "1"}),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # Ctrl-C is for the user's process alone
                )
            )
        self._output_files.append(output)
        return ours

    def _note_end(self, core: int) -> None:
        status = self._processes[core - 1].wait()
        output = self._output_files[core - 1]
        output.seek(0)
        end = explain_end(status, output.read().decode(errors="replace"))
        self._fail(f"the process of core {self._first + core} is gone: {end}")

    def _fail(self, why: str) -> None:
        """Kill the processes, and record why. The first reason is kept, because it may cause later failures."""
        if not self.failure:
            if self._start_begun:
                self._on_loss()
            self.failure = why
        for process in self._processes:
            process.kill()

    # Waits

    def check(self) -> None:
        """Raise an error if the cores have failed."""
        if self.failure:
            # TorchTPU can't be started again while one of its programs waits for other cores.
            raise DeviceLostError(
                f"this process has lost its cores: {self.failure}. Restart the process (in a notebook: the kernel) and "
                "resume from the last checkpoint with fit(resume=True)"
            )

    def wait_until(self, condition: Callable[[], bool], seconds: float = inf, programs: bool = False) -> bool:
        """Wait until a condition holds, or raise an error if the cores have failed.

        Args:
            condition: Called repeatedly.
            seconds: The most seconds to wait (default: no limit).
            programs: True (default False) if the condition depends on programs of all cores.

        Returns:
            False if the time has run out.
        """
        pause = 1e-5
        began = last_probe = monotonic()
        probe = 0
        stuck: set[int] = set()
        while not condition():
            self.check()
            sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE_SECONDS)
            now = monotonic()
            if now - began > seconds:
                return False
            if now - last_probe > _PROBE_SECONDS:
                last_probe = now
                self._check_heartbeats(now)
                if programs:
                    stuck = self._find_stuck_cores(probe, stuck)
                    with self.lock:
                        probe = self.tell(Probe())
        return True

    def _check_heartbeats(self, now: float) -> None:
        for core, beat in enumerate(self._signs[:, Sign.BEAT], 1):
            if 0 < beat < (now - read_silence_limit()) * 1e3:
                number = self._first + core
                self._fail(f"the process of core {number} has sent no heartbeat for {read_silence_limit():g} s")

    def _find_stuck_cores(self, probe: int, suspected: set[int]) -> set[int]:
        """Return the cores that failed to run a program, and have answered a later probe.

        If one of them was `suspected` before, fail: the first core would wait forever for that core's part of the
        program.
        """
        idle = {core for core in self._failed_programs if probe and self._signs[core - 1, Sign.DONE] >= probe}
        for core in idle & suspected:
            why = self._failed_programs[core]
            self._fail(f"core {self._first + core} failed with an error that core {self._first} didn't have: {why}")
        return idle

    def watch_while(self, waits: Callable[[], None]) -> None:
        """Call a function that waits for programs of all cores in a thread, and raise an error here if a core fails."""
        failed: list[RuntimeError] = []

        def wait_and_note() -> None:
            try:
                waits()
            except RuntimeError as error:
                failed.append(error)

        thread = threading.Thread(target=wait_and_note, daemon=True)
        thread.start()
        self.wait_until(lambda: not thread.is_alive(), programs=True)
        if failed:
            raise failed[0]

    def await_same_failure(self, why: str) -> None:
        """After an error of the first core, wait until the other cores have it too, or else fail.

        The caller has ensured that the first core has finished all other work.
        """
        self.check()
        with self.lock:
            probe = self.tell(Probe())
        if self.wait_until(lambda: self.last_handled() >= probe, _SAME_FAILURE_SECONDS):
            self._failed_programs.clear()
            self._failed_messages.clear()
            return
        waiting = [core for core, done in enumerate(self._signs[:, Sign.DONE], 1) if done < probe]
        self._fail(f"core {self._first} failed with an error that core {self._first + waiting[0]} didn't have: {why}")
        self.check()

    # Messages

    def prepare_sending(self, message: Message, descriptor: int | None = None) -> list[partial[Any]]:
        """Prepare a message: return the calls, for `uninterrupted`, that send it. The caller holds the lock."""
        # A send that waits could be interrupted.
        self.wait_until(lambda: len(self._send_poll.poll(0)) == len(self._sockets))
        self._sent += 1
        packet = pack(message, self._sent)
        if descriptor is None:
            return [partial(connection.send, packet) for connection in self._sockets]
        files = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [descriptor]))]
        return [partial(connection.sendmsg, [packet], files) for connection in self._sockets]

    def tell(self, message: Message, descriptor: int | None = None) -> int:
        """Send a message to all other cores, and return its number. The caller holds the lock."""
        sends = self.prepare_sending(message, descriptor)
        try:
            list(uninterrupted(sends))
        except ConnectionError:  # the listening thread is about to record why
            self.wait_until(lambda: False)
        return self._sent

    def last_handled(self) -> int:
        """Return the number of the last message that all cores have handled."""
        return int(self._signs[:, Sign.DONE].min(initial=self._sent))

    def wait_for(self, message: int) -> None:
        """Wait until all cores have handled a message.

        Raises:
            RuntimeError: The message has failed on a core.
        """
        self.wait_until(lambda: self.last_handled() >= message)
        self.wait_until(lambda: all(self._reports >= self._signs[:, Sign.REPORTS]))
        why = self._failed_messages.pop(message, "")
        if why:
            raise RuntimeError(why)

    # Blocks

    def block(self, nbytes: int) -> tuple[int, Block]:
        """Return an unused block of at least `nbytes` bytes, and its number. The caller holds the lock."""
        done = self.last_handled()
        for number, block in enumerate(self._blocks):
            if number and block.nbytes >= nbytes and self._last_use[number] <= done:
                return number, block
        number = len(self._blocks)
        block = Block(max(_MIN_BLOCK, 1 << (nbytes - 1).bit_length()))
        self.tell(Map(number, block.nbytes), block.descriptor)
        self._last_use.append(0)
        self._blocks.append(block)
        return number, block

    def tell_with_block(self, message: Message, block: int) -> int:
        """Send a message whose data are in a block. The caller holds the lock."""
        # Before the send: an interrupt between the two could leave the block free.
        self._last_use[block] = self._sent + 1
        return self.tell(message)
