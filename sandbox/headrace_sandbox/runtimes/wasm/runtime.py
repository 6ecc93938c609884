"""The runtime named ``wasm``: CPython in WebAssembly, for Python programs with the standard library alone.

* It needs no root, no namespaces and no filter of system calls, so it works where those are refused.
* A program has no processes, no threads, no sockets, no environment of ours, and no file but those in its folder.
* Its memory cannot grow past its limit, and its folder not past its own; both are errors that the program sees.
* A program runs in a process of its own, which ends with it: a crash of the interpreter of WebAssembly is not ours.
* The interpreter that is run is the one whose hash is here, or none. It is compiled once for this machine, into a
  folder that nobody else can write.
* A trap of WebAssembly is the program's failure, exit code 134. Running out of memory is the ``MemoryError`` that it
  saw: from outside it cannot be told from another.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from headrace.common.timeouts import timeout
from headrace.errors import SandboxFailure
from headrace_sandbox import guest
from headrace_sandbox.host import owner
from headrace_sandbox.host.bwrap import QUOTED_BYTES, environment
from headrace_sandbox.host.child_process import Child
from headrace_sandbox.host.descriptors import refused_by_machine
from headrace_sandbox.host.reaper import FOLDERS
from headrace_sandbox.host.seccomp import filter_program
from headrace_sandbox.host.watch import Verdict, supervise
from headrace_sandbox.result import MOST_CPU_S, ExecResult, Isolation, LimitName, Limits, Usage
from headrace_sandbox.runtimes.base import Command, PythonProgram, Sandbox, Template, check_room, not_offered
from headrace_sandbox.runtimes.shared.outcome import sandbox_lost
from headrace_sandbox.runtimes.wasm.interpreter import PYTHON, Compiled, Parts, compiled

ACTIVE = ("wall_s", "cpu_s", "output_bytes", "memory_bytes", "pids", "disk_bytes", "file_bytes", "open_files")

ENTRIES = 10_000
"""Most files and folders of a program."""

PROGRAM = (Path(guest.__file__).parent / "main_program.py").read_text()

START_TIMEOUT_S = 20.0
"""For the process to be there; on a quiet machine it takes a tenth of a second."""

GRACE_S = 10.0 + START_TIMEOUT_S
"""After its time a process whose supervisor does not end it does so itself; it counts from its own start."""

_numbers = itertools.count()

TRAP_CODE = 134
"""As ``wasmtime run`` ends, and a shell after SIGABRT."""


class Wasm:
    """The runtime. ``module``: the interpreter; that of the extra if none is given."""

    name = "wasm"

    def __init__(self, module: Path | None = None) -> None:
        """Raises SandboxFailure ``runtime-missing``."""
        self._parts = Parts.found()
        self._source = module or self._parts.module
        self._compiled: Compiled | None = None
        self._users = owner.user_ids() if sys.platform == "linux" and os.geteuid() == 0 else None
        versions = {"wasmtime": self._parts.wasmtime_version, "cpython": PYTHON, "kernel": os.uname().release}
        self.isolation = Isolation(runtime=self.name, versions=versions, active=list(ACTIVE))

    async def prepare(self, say: Callable[[str], None]) -> None:
        """Compile the interpreter for this machine, unless that was done before. Raises SandboxFailure
        ``wrong-module``, ``unsafe-cache``, ``not-compiled``."""
        if self._compiled is None:
            self._compiled = await asyncio.to_thread(compiled, self._source, self._parts, say)

    async def run(self, command: Command, limits: Limits) -> ExecResult:
        """Run ``python3 [-c CODE | FILE] ARGUMENTS…``, where FILE is one of the command's. Raises SandboxFailure,
        ``not-offered`` for any other command."""
        return await self.run_code(_program_of(command), limits)

    async def run_code(self, program: PythonProgram, limits: Limits) -> ExecResult:
        """Run a Python program. Raises SandboxFailure; cancelling the call kills it."""
        begun_at = time.monotonic()
        check_room(program.files, limits)
        await self.prepare(lambda _: None)
        with refused_by_machine():
            return await self._run(program, limits, begun_at)

    async def _run(self, program: PythonProgram, limits: Limits, begun_at: float) -> ExecResult:
        user = None if self._users is None else self._users.next()
        scratch = _scratch(user)
        try:
            async with _Worker(self._parts, self._request(program, limits, scratch, user)) as worker:
                if self._users is not None and user is not None:
                    self._users.taken(user, worker.child.process)
                start_s = time.monotonic() - begun_at
                verdict = await supervise(worker.child.started, program.stdin, limits)
                return self._result(worker, verdict, start_s)
        finally:
            await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)

    async def open(self, template: Template, ttl_s: float) -> Sandbox:
        """Not offered."""
        raise not_offered(self.name, "sandboxes that live on")

    async def close(self) -> None:
        """Nothing is kept between executions but the compiled interpreter."""

    def _request(self, program: PythonProgram, limits: Limits, scratch: str, user: int | None) -> bytes:
        filter_ = filter_program() if sys.platform == "linux" else None
        return msgspec.json.encode(
            {
                "modules": {} if self._compiled is None else msgspec.to_builtins(self._compiled),
                "arguments": ["python", "-I", "-B", "-X", "utf8", "-c", PROGRAM, program.code, *program.arguments],
                "environment": environment(program.environment),
                "files": {path: content.decode("latin-1") for path, content in program.files.items()},
                "folder": scratch,
                "user": user,
                "filter": None if filter_ is None else filter_.hex(),
                "wall_s": limits.wall_s + GRACE_S,
                "cpu_s": None if limits.cpu_s is None else min(math.ceil(limits.cpu_s) + 1, MOST_CPU_S),
                "memory_bytes": limits.memory_bytes,
                "disk_bytes": limits.disk_bytes,
                "file_bytes": limits.file_bytes,
                "open_files": limits.open_files,
                "entries": ENTRIES,
            }
        )

    def _result(self, worker: _Worker, verdict: Verdict, start_s: float) -> ExecResult:
        ended = worker.ended()
        limit, lost, exit_code = verdict.limit, None, ended.exit
        if limit is None and ended.trap is not None:
            exit_code = TRAP_CODE
        elif limit is None and exit_code is None:
            limit, lost = _without_word(verdict, worker.child.returncode())
        killed = limit is not None
        disk_full = not killed and exit_code != 0 and ended.disk_full
        if disk_full:
            limit = "disk"
        return ExecResult(
            exit_code=None if killed else exit_code,
            signal=None,
            stdout=verdict.stdout,
            stderr=verdict.stderr,
            limit=limit,
            wall_s=verdict.wall_s,
            start_s=start_s,
            lost=lost,
            usage=Usage(cpu_s=worker.child.cpu_s(), peak_memory_bytes=ended.memory_bytes, disk_full=disk_full),
            isolation=self.isolation,
        )


def _without_word(verdict: Verdict, code: int) -> tuple[LimitName | None, str | None]:
    """The limit that ended a process that told nothing, or how its program crashed it. Raises SandboxFailure."""
    if code == -signal.SIGXCPU:
        return "cpu", None
    if code >= 0 or code == -signal.SIGKILL:  # its own error; or a kill that no program in it can bring about
        said = verdict.stderr.text.strip()[-QUOTED_BYTES:]
        raise sandbox_lost(f"The process of a program in WebAssembly ended with {code}: {said or 'it said nothing'}")
    return None, f"The program crashed the interpreter of WebAssembly: {signal.Signals(-code).name}."


def _worker_environment() -> dict[str, str]:
    """wasmtime's files are served by threads; a program makes one call at a time."""
    named = {owner.VARIABLE: str(owner.me())} if sys.platform == "linux" else {}
    return {"TOKIO_WORKER_THREADS": "1", **named}


class _Ended(msgspec.Struct, frozen=True):
    """What a process told: the program's exit code, or the trap that ended it, how large its memory was, and whether it
    was ever refused room in its folder."""

    exit: int | None = None
    trap: str | None = None
    memory_bytes: int | None = None
    disk_full: bool = False


class _Worker:
    """The process of one program; it is entered when the program starts."""

    def __init__(self, parts: Parts, request: bytes) -> None:
        self._status, status = os.pipe()
        try:
            with tempfile.TemporaryFile() as file:
                file.write(request)
                file.seek(0)
                handed = (file.fileno(), status)
                arguments = parts.command("run", *(str(number) for number in handed))
                self.child = Child(arguments, _worker_environment(), "/", handed)
        except BaseException:
            os.close(self._status)
            raise
        finally:
            os.close(status)

    async def __aenter__(self) -> _Worker:
        try:
            if not await self._started():
                raise await self._not_made()
        except BaseException:
            os.close(self._status)
            await self.child.abandon()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        os.close(self._status)
        await self.child.__aexit__()

    async def _started(self) -> bool:
        readable = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._status, readable.set)
        try:
            async with timeout(START_TIMEOUT_S):
                await readable.wait()
            return os.read(self._status, 1) == b"\n"
        except TimeoutError:
            return False
        finally:
            loop.remove_reader(self._status)

    async def _not_made(self) -> SandboxFailure:
        os.set_blocking(self.child.started.stderr, False)
        said = b""
        with contextlib.suppress(OSError):
            said = os.read(self.child.started.stderr, 1 << 20)
        return SandboxFailure(
            f"A process for WebAssembly could not be made: {said.decode(errors='replace').strip()[-QUOTED_BYTES:]}",
            kind="sandbox-not-made",
            retryable=True,
        )

    def ended(self) -> _Ended:
        """What it told; nothing if it was killed."""
        os.set_blocking(self._status, False)
        try:
            return msgspec.json.decode(os.read(self._status, 4096) or b"{}", type=_Ended)
        except BlockingIOError:
            return _Ended()


def _scratch(user: int | None) -> str:
    if sys.platform != "linux":
        return tempfile.mkdtemp(prefix="headrace-")
    scratch = str(owner.state_folder() / FOLDERS / f"{owner.me()}-wasm-{next(_numbers)}")
    os.makedirs(scratch, mode=0o700)
    if user is not None:
        os.chown(scratch, user, user)
    return scratch


def _program_of(command: Command) -> PythonProgram:
    program, *arguments = command.arguments
    if os.path.basename(program) not in ("python", "python3"):
        raise not_offered("wasm", f"program {program!r}, only Python ones")
    while arguments and arguments[0] in ("-I", "-S", "-B", "-E", "-s", "-u"):
        arguments = arguments[1:]
    if len(arguments) > 1 and arguments[0] == "-c":
        code, arguments = arguments[1], arguments[2:]
    elif arguments and arguments[0] in command.files:
        code, arguments = command.files[arguments[0]].decode(), arguments[1:]
    else:
        raise not_offered("wasm", f"way to run {command.arguments!r}; use python3 -c, or a file of the command's")
    return PythonProgram(
        code=code, arguments=arguments, stdin=command.stdin, files=command.files, environment=command.environment
    )
