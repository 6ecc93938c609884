"""The supervisor's end of a sandbox of gVisor: starts programs in it, and carries their input and output.

* To the supervisor a program in there is one like every other: descriptors, an end, a way to kill it.
* What a program writes is passed on in order, and no faster than it is read.
* One that cannot be killed alone is killed with its sandbox.
* A sandbox that ends takes its programs with it; nobody waits for them any more.

``guest/gvisor_init.py`` is the other end, and describes the frames.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from headrace.common.timeouts import timeout
from headrace.errors import SandboxFailure
from headrace_sandbox.host.watch import Started
from headrace_sandbox.runtimes.gvisor.runsc import Container, not_made
from headrace_sandbox.runtimes.shared.guest_programs import HERE, PYTHON

LOADER = """
import json, sys
for name in ("headrace_sandbox", "headrace_sandbox.guest"):
    sys.modules[name] = type(sys)(name)
for name, text in json.loads(sys.argv.pop(1)):
    module = sys.modules["headrace_sandbox.guest." + name] = type(sys)(name)
    setattr(sys.modules["headrace_sandbox.guest"], name, module)
    module.__file__ = name
    exec(compile(text, name, "exec"), module.__dict__)
module.main()
"""
"""Makes modules from their text, and runs the last one: an image has no folder where they could lie."""

MODULES = ("isolation", "python_cells", "files", "session_host", "gvisor_init")
"""Each after those that it imports."""

HEADER = struct.Struct(">BII")
START, INPUT, KILL = 1, 2, 3
READY, STARTED, STDOUT, STDERR, TOOK, ENDED, FAILED = 1, 2, 3, 4, 5, 6, 7
END = struct.Struct(">iI?")

CHUNK = 64 << 10

READY_S = 30.0
"""For a sandbox to be made: half a second where the machine is quiet. A runsc that hangs is found out by this."""

STARTED_S = 20.0
"""For a program to be started in it."""

END_S = 5.0
"""For a killed program to be gone, with its sandbox if that is what it takes."""

ALONE_S = 1.0
"""For a killed program to be gone; then its sandbox is killed."""


class Ended(NamedTuple):
    """How a program ended. ``returncode``: as ``subprocess`` has it; None if nobody could tell. ``left``: of one
    that failed, how many processes and threads there were beside it. ``disk_full``: it failed while its scratch folder
    was full."""

    returncode: int | None
    left: int
    disk_full: bool = False


class Program:
    """One that was started. ``ended`` is there once it has."""

    def __init__(self, number: int) -> None:
        self.number = number
        stdin, self.stdin = os.pipe()
        self.stdout, stdout = os.pipe()
        self.stderr, stderr = os.pipe()
        self.end, told = os.pipe()
        self.reads: int | None = stdin
        self.writes: dict[int, int] = {STDOUT: stdout, STDERR: stderr}
        self.told = told
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended: Ended | None = None
        self.gone = asyncio.Event()
        for descriptor in (stdin, stdout, stderr):
            os.set_blocking(descriptor, False)

    def finish(self, ended: Ended) -> None:
        """It has ended: whoever reads of it reads to the end."""
        self.ended = ended
        self.gone.set()
        for descriptor in (*self.writes.values(), self.told):
            os.close(descriptor)
        self.writes = {}

    def discard(self) -> None:
        """Nobody supervises it."""
        for descriptor in (self.stdin, self.stdout, self.stderr, self.end):
            os.close(descriptor)


class Guest:
    """A sandbox that runs, and the programs in it."""

    def __init__(self, container: Container) -> None:
        self.container = container
        self.killed_for: str | None = None
        """Why it was killed, if that was for what its programs did."""
        self._loop = asyncio.get_running_loop()
        self._programs: dict[int, Program] = {}
        self._numbers = 0
        self._received = bytearray()
        self._to_send = bytearray()
        self._to_deliver = memoryview(b"")
        self._deliver_to = -1
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._gone = asyncio.Event()
        self._loop.add_reader(container.stdout, self._read)

    @property
    def is_gone(self) -> bool:
        """Whether the sandbox has ended."""
        return self._gone.is_set()

    async def ready(self) -> None:
        """Wait until programs can be started. Raises SandboxFailure ``sandbox-not-made``."""
        try:
            async with timeout(READY_S):
                await self._ready
        except TimeoutError:
            raise not_made(f"it did not start within {READY_S:g} s. {self.container.said()}") from None

    async def start(self, request: Mapping[str, Any]) -> Program:
        """Start a program; it runs when this returns. Raises SandboxFailure."""
        program = self._new_program()
        self._send(START, program.number, json.dumps(request).encode())
        try:
            async with timeout(STARTED_S):
                await program.started
        except BaseException as error:
            self.kill(program)
            program.discard()
            if isinstance(error, TimeoutError):
                raise not_made(f"no program started in it within {STARTED_S:g} s") from None
            raise
        self._await_input(program)
        return program

    def started(self, program: Program, cpu_s: Callable[[], float | None]) -> Started:
        """A program as it is supervised. ``cpu_s``: the processor time that it used so far."""
        return Started(
            stdin=program.stdin,
            stdout=program.stdout,
            stderr=program.stderr,
            end=program.end,
            returncode=lambda: program.ended.returncode if program.ended else None,
            kill=lambda: self.kill(program),
            cpu_s=cpu_s,
        )

    def kill(self, program: Program) -> None:
        """Kill a program and all that it started; with its sandbox, if that is what it takes."""
        if program.ended is None and not self.is_gone:
            self._send(KILL, program.number)
            self._loop.call_later(ALONE_S, self._kill_with_sandbox, program)

    def close(self) -> None:
        """Stop reading of the sandbox; it is killed by then, or will be."""
        self._end_all()

    # Programs ---------------------------------------------------------------------------------------------------

    def _new_program(self) -> Program:
        self._numbers += 1
        program = Program(self._numbers)
        if self.is_gone:
            _settle(program.started, lost())
            self._finish(program, Ended(None, 0))
        else:
            self._programs[program.number] = program
        return program

    def _kill_with_sandbox(self, program: Program) -> None:
        if program.ended is None and not self.is_gone:
            self.killed_for = "a program in it was killed and did not end"
            self.container.kill()

    def _await_input(self, program: Program) -> None:
        if program.reads is not None:
            self._loop.add_reader(program.reads, self._forward_input, program)

    def _forward_input(self, program: Program) -> None:
        """Its next input goes on; more is read when that was taken."""
        if program.reads is None:
            return
        try:
            data = os.read(program.reads, CHUNK)
        except BlockingIOError:
            return
        self._loop.remove_reader(program.reads)
        self._send(INPUT, program.number, data)
        if not data:
            self._close_input(program)

    def _close_input(self, program: Program) -> None:
        if program.reads is not None:
            self._loop.remove_reader(program.reads)
            os.close(program.reads)
            program.reads = None

    def _finish(self, program: Program, ended: Ended) -> None:
        self._programs.pop(program.number, None)
        self._close_input(program)
        program.finish(ended)

    # Frames -----------------------------------------------------------------------------------------------------

    def _send(self, kind: int, number: int, content: bytes = b"") -> None:
        if self.is_gone:
            return
        self._to_send += HEADER.pack(kind, number, len(content)) + content
        self._write()

    def _write(self) -> None:
        try:
            while self._to_send:
                del self._to_send[: os.write(self.container.stdin, self._to_send[: 1 << 20])]
        except BlockingIOError:
            self._loop.add_writer(self.container.stdin, self._write)
            return
        except BrokenPipeError:
            self._to_send.clear()
        self._loop.remove_writer(self.container.stdin)

    def _read(self) -> None:
        try:
            data = os.read(self.container.stdout, 4 * CHUNK)
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
        elif kind == TOOK:
            self._await_input(program)
        elif kind == ENDED:
            status, left, full = END.unpack(content)
            _settle(program.started, None)
            self._finish(program, Ended(os.waitstatus_to_exitcode(status) if status >= 0 else None, left, full))
        elif kind == FAILED:
            _settle(program.started, not_made("its first process could not start a program"))
            self._finish(program, Ended(None, 0))

    def _deliver(self) -> None:
        """Pass on what a program wrote; where its reader is slow nothing more is read of the sandbox."""
        try:
            while self._to_deliver:
                self._to_deliver = self._to_deliver[os.write(self._deliver_to, self._to_deliver) :]
        except BlockingIOError:
            self._loop.remove_reader(self.container.stdout)
            self._loop.add_writer(self._deliver_to, self._go_on)
        except BrokenPipeError:
            self._to_deliver = memoryview(b"")  # nobody supervises it any more

    def _go_on(self) -> None:
        self._loop.remove_writer(self._deliver_to)
        self._deliver()
        if not self._to_deliver and not self.is_gone:
            self._loop.add_reader(self.container.stdout, self._read)
            self._handle_all()

    def _end_all(self) -> None:
        """The sandbox has ended."""
        if self.is_gone:
            return
        self._gone.set()
        self._loop.remove_reader(self.container.stdout)
        self._loop.remove_writer(self.container.stdin)
        if self._to_deliver:
            self._loop.remove_writer(self._deliver_to)
            self._to_deliver = memoryview(b"")
        for program in list(self._programs.values()):
            _settle(program.started, lost())
            self._finish(program, Ended(None, 0))
        if not self._ready.done():
            self._ready.set_exception(not_made(self.container.said()))
            self._ready.exception()  # it may be that nobody waits for it


def first_command(options: Mapping[str, Any]) -> list[str]:
    """The command of a sandbox's first process."""
    texts = [(name, (HERE / f"{name}.py").read_text()) for name in MODULES]
    return [PYTHON, "-I", "-S", "-c", LOADER, json.dumps(texts), json.dumps(options)]


def lost() -> SandboxFailure:
    """The failure of a sandbox that ended, and not by its programs' doing."""
    return SandboxFailure("The sandbox has ended.", kind="sandbox-lost", retryable=True)


def _settle(future: asyncio.Future[None], failure: BaseException | None) -> None:
    if future.done():
        return
    if failure is None:
        future.set_result(None)
    else:
        future.set_exception(failure)
        future.exception()  # it may be that nobody waits for it
