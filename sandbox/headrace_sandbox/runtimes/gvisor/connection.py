"""The supervisor's connection to a gVisor sandbox: starts programs in it, and carries their input and output.

* To the supervisor a program inside is like every other one: descriptors, an end, a kill call.
* A program's output is passed on in order, and no faster than it is read.
* A program that cannot be killed alone is killed with its sandbox.
* The end of a sandbox is the end of its programs, and of every wait for them.

``guest/gvisor_init.py`` is the other end, and describes the frames.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from headrace.common.timeouts import timeout
from headrace_sandbox.host.watch import RunningProgram
from headrace_sandbox.host.work_time import look_at_threads
from headrace_sandbox.runtimes.gvisor.runsc import RunscProcess, sandbox_not_made
from headrace_sandbox.runtimes.shared.exec_result import sandbox_lost
from headrace_sandbox.runtimes.shared.guest_modules import LOAD_MODULES, PYTHON, guest_texts

LOADER = f"""{LOAD_MODULES}
import json
load(json.loads(sys.argv.pop(1))).main()
"""
"""Makes modules from their text, and runs the last one."""

INIT_MODULES = ("isolation", "python_cells", "files", "session_host", "gvisor_init")
"""The guest modules of the first process. Each comes after those that it imports."""

HEADER = struct.Struct(">BII")
START, INPUT, KILL = 1, 2, 3
READY, STARTED, STDOUT, STDERR, INPUT_TAKEN, ENDED, FAILED = 1, 2, 3, 4, 5, 6, 7
END = struct.Struct(">iI?")

CHUNK_BYTES = 64 << 10

READY_S = 30.0
"""Deadline for a sandbox to be made, which takes half a second on a quiet machine. It also catches a runsc that
hangs."""

START_S = 20.0
"""Deadline for a program to start."""

END_S = 5.0
"""Deadline for the end of a killed program, or of the sandbox that is killed with it."""

KILL_ALONE_S = 1.0
"""Deadline for the end of a killed program; after it, its sandbox is killed."""


class GuestExit(NamedTuple):
    """The end of a program. ``returncode``: as ``subprocess`` has it; None if it is unknown. ``others``: the number of
    other processes and threads in the sandbox, if it failed. ``disk_full``: it failed while its scratch folder was
    full."""

    returncode: int | None
    others: int
    disk_full: bool = False


class GuestProgram:
    """A program that was started. ``exit`` is set at its end."""

    def __init__(self, number: int) -> None:
        self.number = number
        stdin, self.stdin = os.pipe()
        self.stdout, stdout = os.pipe()
        self.stderr, stderr = os.pipe()
        self.end, end_signal = os.pipe()
        self.reads: int | None = stdin
        self.writes: dict[int, int] = {STDOUT: stdout, STDERR: stderr}
        self.end_signal = end_signal
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.exit: GuestExit | None = None
        self.ended = asyncio.Event()
        for descriptor in (stdin, stdout, stderr):
            os.set_blocking(descriptor, False)

    def finish(self, exit_: GuestExit) -> None:
        """Record its end, and close its output."""
        self.exit = exit_
        self.ended.set()
        for descriptor in (*self.writes.values(), self.end_signal):
            os.close(descriptor)
        self.writes = {}

    def discard(self) -> None:
        """Close the descriptors of a program that is not watched."""
        for descriptor in (self.stdin, self.stdout, self.stderr, self.end):
            os.close(descriptor)


class GuestConnection:
    """The connection to a running sandbox and its programs."""

    def __init__(self, process: RunscProcess) -> None:
        self.process = process
        self.kill_reason: str | None = None
        """The reason that it was killed, if its programs brought that about."""
        self._loop = asyncio.get_running_loop()
        self._programs: dict[int, GuestProgram] = {}
        self._last_number = 0
        self._received = bytearray()
        self._to_send = bytearray()
        self._to_deliver = memoryview(b"")
        self._deliver_to = -1
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._gone = asyncio.Event()
        self._loop.add_reader(process.stdout, self._read)

    @property
    def is_gone(self) -> bool:
        """True once the sandbox has ended."""
        return self._gone.is_set()

    async def wait_ready(self) -> None:
        """Wait until programs can be started. Raises SandboxFailure ``sandbox-not-made``."""
        try:
            async with timeout(READY_S):
                await self._ready
        except TimeoutError:
            raise sandbox_not_made(f"it did not start within {READY_S:g} s. {self.process.messages()}") from None

    async def start(self, request: Mapping[str, Any]) -> GuestProgram:
        """Start a program; it runs when this returns. Raises SandboxFailure."""
        program = self._new_program()
        self._send(START, program.number, json.dumps(request).encode())
        try:
            async with timeout(START_S):
                await program.started
        except BaseException as error:
            self.kill(program)
            program.discard()
            if isinstance(error, TimeoutError):
                raise sandbox_not_made(f"no program started in it within {START_S:g} s") from None
            raise
        self._await_input(program)
        return program

    def running_program(
        self, program: GuestProgram, cpu_s: Callable[[], float | None], threads: Callable[[], Iterable[int]]
    ) -> RunningProgram:
        """A program for ``watch_program``. ``cpu_s`` gives its processor time so far, ``threads`` those of its sandbox
        on this machine."""
        return RunningProgram(
            stdin=program.stdin,
            stdout=program.stdout,
            stderr=program.stderr,
            end=program.end,
            returncode=lambda: program.exit.returncode if program.exit else None,
            kill=lambda: self.kill(program),
            cpu_s=cpu_s,
            look=lambda: look_at_threads(threads, cpu_s),
        )

    def kill(self, program: GuestProgram) -> None:
        """Kill a program and all that it started; if it does not end, kill its sandbox."""
        if program.exit is None and not self.is_gone:
            self._send(KILL, program.number)
            self._loop.call_later(KILL_ALONE_S, self._kill_with_sandbox, program)

    def close(self) -> None:
        """Stop reading from the sandbox, which is killed before or after."""
        self._end_all()

    # Programs ---------------------------------------------------------------------------------------------------

    def _new_program(self) -> GuestProgram:
        self._last_number += 1
        program = GuestProgram(self._last_number)
        if self.is_gone:
            _settle(program.started, sandbox_lost("The sandbox has ended."))
            self._finish(program, GuestExit(None, 0))
        else:
            self._programs[program.number] = program
        return program

    def _kill_with_sandbox(self, program: GuestProgram) -> None:
        if program.exit is None and not self.is_gone:
            self.kill_reason = "a program in it was killed and did not end"
            self.process.kill()

    def _await_input(self, program: GuestProgram) -> None:
        if program.reads is not None:
            self._loop.add_reader(program.reads, self._forward_input, program)

    def _forward_input(self, program: GuestProgram) -> None:
        """Send the next input; more is read once the sandbox has taken it."""
        if program.reads is None:
            return
        try:
            data = os.read(program.reads, CHUNK_BYTES)
        except BlockingIOError:
            return
        self._loop.remove_reader(program.reads)
        self._send(INPUT, program.number, data)
        if not data:
            self._close_input(program)

    def _close_input(self, program: GuestProgram) -> None:
        if program.reads is not None:
            self._loop.remove_reader(program.reads)
            os.close(program.reads)
            program.reads = None

    def _finish(self, program: GuestProgram, exit_: GuestExit) -> None:
        self._programs.pop(program.number, None)
        self._close_input(program)
        program.finish(exit_)

    # Frames -----------------------------------------------------------------------------------------------------

    def _send(self, kind: int, number: int, content: bytes = b"") -> None:
        if self.is_gone:
            return
        self._to_send += HEADER.pack(kind, number, len(content)) + content
        self._write()

    def _write(self) -> None:
        try:
            while self._to_send:
                del self._to_send[: os.write(self.process.stdin, self._to_send[: 1 << 20])]
        except BlockingIOError:
            self._loop.add_writer(self.process.stdin, self._write)
            return
        except BrokenPipeError:
            self._to_send.clear()
        self._loop.remove_writer(self.process.stdin)

    def _read(self) -> None:
        try:
            data = os.read(self.process.stdout, 4 * CHUNK_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._end_all()
            return
        self._received += data
        self._handle_all()

    def _handle_all(self) -> None:
        while not self._to_deliver and len(self._received) >= HEADER.size:
            kind, number, length = HEADER.unpack_from(self._received)
            end = HEADER.size + length
            if len(self._received) < end:
                return
            content = bytes(self._received[HEADER.size : end])
            del self._received[:end]
            self._handle(kind, number, content)

    def _handle(self, kind: int, number: int, content: bytes) -> None:
        if kind == READY:
            if not self._ready.done():
                self._ready.set_result(None)
            return
        program = self._programs.get(number)
        if program is None:
            return
        if kind == STARTED:
            _settle(program.started, None)
        elif kind in (STDOUT, STDERR):
            self._to_deliver, self._deliver_to = memoryview(content), program.writes[kind]
            self._deliver()
        elif kind == INPUT_TAKEN:
            self._await_input(program)
        elif kind == ENDED:
            status, others, full = END.unpack(content)
            _settle(program.started, None)
            self._finish(program, GuestExit(os.waitstatus_to_exitcode(status) if status >= 0 else None, others, full))
        elif kind == FAILED:
            _settle(program.started, sandbox_not_made("its first process could not start a program"))
            self._finish(program, GuestExit(None, 0))

    def _deliver(self) -> None:
        """Pass on a program's output; while its reader is slow, nothing more is read from the sandbox."""
        try:
            while self._to_deliver:
                self._to_deliver = self._to_deliver[os.write(self._deliver_to, self._to_deliver) :]
        except BlockingIOError:
            self._loop.remove_reader(self.process.stdout)
            self._loop.add_writer(self._deliver_to, self._resume_delivery)
        except BrokenPipeError:
            self._to_deliver = memoryview(b"")  # the program is not watched any more

    def _resume_delivery(self) -> None:
        self._loop.remove_writer(self._deliver_to)
        self._deliver()
        if not self._to_deliver and not self.is_gone:
            self._loop.add_reader(self.process.stdout, self._read)
            self._handle_all()

    def _end_all(self) -> None:
        """Record the end of the sandbox and of its programs."""
        if self.is_gone:
            return
        self._gone.set()
        self._loop.remove_reader(self.process.stdout)
        self._loop.remove_writer(self.process.stdin)
        if self._to_deliver:
            self._loop.remove_writer(self._deliver_to)
            self._to_deliver = memoryview(b"")
        for program in list(self._programs.values()):
            _settle(program.started, sandbox_lost("The sandbox has ended."))
            self._finish(program, GuestExit(None, 0))
        if not self._ready.done():
            self._ready.set_exception(sandbox_not_made(self.process.messages()))
            self._ready.exception()  # a caller may have stopped waiting for it


def init_command(options: Mapping[str, Any]) -> list[str]:
    """The command of a sandbox's first process."""
    return [PYTHON, "-I", "-S", "-c", LOADER, json.dumps(guest_texts(INIT_MODULES)), json.dumps(options)]


def _settle(future: asyncio.Future[None], failure: BaseException | None) -> None:
    if future.done():
        return
    if failure is None:
        future.set_result(None)
    else:
        future.set_exception(failure)
        future.exception()  # a caller may have stopped waiting for it
