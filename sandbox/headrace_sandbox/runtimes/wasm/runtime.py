"""The runtime named ``wasm``: CPython in WebAssembly, for Python programs with the standard library alone.

* It needs no root, no namespaces and no filter of system calls, so it works where those are refused.
* A program has no processes, no threads, no sockets, no variables of ours, and no files outside its folder.
* Its memory and its folder cannot grow past their limits; the program sees an error.
* A program runs in a process of its own, which ends with it: a crash of the WebAssembly runtime does not crash us.
* Only the interpreter with the known hash is run. It is compiled once for this machine, into a folder that no other
  user can write.
* A trap of WebAssembly is the program's failure, exit code 134. Running out of memory is a ``MemoryError`` inside,
  which from outside looks like any other exception.
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
from headrace_sandbox.host.child_process import ChildProcess
from headrace_sandbox.host.descriptors import os_errors_as_failures, wait_readable
from headrace_sandbox.host.layout import program_environment
from headrace_sandbox.host.seccomp import filter_program
from headrace_sandbox.host.supervisor import SUPERVISOR_VARIABLE, owned_folder, this_supervisor
from headrace_sandbox.host.user_ids import shared_user_ids
from headrace_sandbox.host.watch import ProgramOutcome, watch_program
from headrace_sandbox.result import MOST_CPU_S, ExecResult, Isolation, LimitName, Limits, Usage
from headrace_sandbox.runtimes.base import PythonProgram, Sandbox, SandboxCommand, Template, check_room, not_offered
from headrace_sandbox.runtimes.shared.exec_result import INODES, sandbox_lost
from headrace_sandbox.runtimes.shared.guest_modules import guest_text
from headrace_sandbox.runtimes.wasm.interpreter import (
    PYTHON,
    QUOTED_BYTES,
    CompiledModules,
    WasmInstallation,
    compiled_modules,
)

ACTIVE = ("wall_s", "cpu_s", "output_bytes", "memory_bytes", "pids", "disk_bytes", "file_bytes", "open_files")

MAIN_PROGRAM = guest_text("main_program")

START_TIMEOUT_S = 20.0
"""Deadline for the process to start; on a quiet machine it takes a tenth of a second."""

GRACE_S = 10.0 + START_TIMEOUT_S
"""A process ends itself this long after its time limit, counted from its own start, if its supervisor does not."""

_numbers = itertools.count()

TRAP_CODE = 134
"""The exit code of ``wasmtime run`` after a trap, and of a shell after SIGABRT."""


class WasmRuntime:
    """The runtime. ``module``: the interpreter; without one, that of the extra."""

    name = "wasm"

    def __init__(self, module: Path | None = None) -> None:
        """Raises SandboxFailure ``runtime-missing``."""
        self._installation = WasmInstallation.find()
        self._source = module or self._installation.module
        self._compiled: CompiledModules | None = None
        self._users = shared_user_ids() if sys.platform == "linux" and os.geteuid() == 0 else None
        versions = {"wasmtime": self._installation.wasmtime_version, "cpython": PYTHON, "kernel": os.uname().release}
        self.isolation = Isolation(runtime=self.name, versions=versions, active=list(ACTIVE))

    async def prepare(self, say: Callable[[str], None]) -> None:
        """Compile the interpreter for this machine, unless it is compiled already. Raises SandboxFailure
        ``wrong-module``, ``unsafe-cache``, ``not-compiled``."""
        if self._compiled is None:
            self._compiled = await asyncio.to_thread(compiled_modules, self._source, self._installation, say)

    async def run(self, command: SandboxCommand, limits: Limits) -> ExecResult:
        """Run ``python3 [-c CODE | FILE] ARGUMENTS…``, where FILE is one of the command's. Raises SandboxFailure,
        ``not-offered`` for any other command."""
        return await self.run_code(_python_program(command), limits)

    async def run_code(self, program: PythonProgram, limits: Limits) -> ExecResult:
        """Run a Python program. Raises SandboxFailure; cancelling the call kills it."""
        started_at = time.monotonic()
        check_room(program.files, limits)
        await self.prepare(lambda _: None)
        with os_errors_as_failures():
            return await self._run(program, limits, started_at)

    async def _run(self, program: PythonProgram, limits: Limits, started_at: float) -> ExecResult:
        user = None if self._users is None else self._users.next_free()
        scratch = _make_scratch(user)
        try:
            async with _Worker(self._installation, self._request(program, limits, scratch, user)) as worker:
                if self._users is not None and user is not None:
                    self._users.assign(user, worker.child.process)
                start_s = time.monotonic() - started_at
                outcome = await watch_program(worker.child.program, program.stdin, limits)
                return self._result(worker, outcome, start_s)
        finally:
            await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)

    async def open(self, template: Template, ttl_s: float) -> Sandbox:
        """Raises SandboxFailure ``not-offered``."""
        raise not_offered(self.name, "persistent sandboxes")

    async def close(self) -> None:
        """Do nothing: only the compiled interpreter is kept between executions."""

    def _request(self, program: PythonProgram, limits: Limits, scratch: str, user: int | None) -> bytes:
        filter_ = filter_program() if sys.platform == "linux" else None
        return msgspec.json.encode(
            {
                "modules": {} if self._compiled is None else msgspec.to_builtins(self._compiled),
                "arguments": ["python", "-I", "-B", "-X", "utf8", "-c", MAIN_PROGRAM, program.code, *program.arguments],
                "environment": program_environment(program.environment),
                "files": {path: content.decode("latin-1") for path, content in program.files.items()},
                "folder": scratch,
                "user": user,
                "filter": None if filter_ is None else filter_.hex(),
                "most_s": limits.whole_s + GRACE_S,
                "cpu_s": None if limits.cpu_s is None else min(math.ceil(limits.cpu_s) + 1, MOST_CPU_S),
                "memory_bytes": limits.memory_bytes,
                "disk_bytes": limits.disk_bytes,
                "file_bytes": limits.file_bytes,
                "open_files": limits.open_files,
                "entries": INODES,
            }
        )

    def _result(self, worker: _Worker, outcome: ProgramOutcome, start_s: float) -> ExecResult:
        report = worker.report()
        limit, lost, exit_code = outcome.limit, None, report.exit
        if limit is None and report.trap is not None:
            exit_code = TRAP_CODE
        elif limit is None and exit_code is None:
            limit, lost = _end_without_report(outcome, worker.child.returncode())
        killed = limit is not None
        disk_full = not killed and exit_code != 0 and report.disk_full
        if disk_full:
            limit = "disk"
        return ExecResult(
            exit_code=None if killed else exit_code,
            signal=None,
            stdout=outcome.stdout,
            stderr=outcome.stderr,
            limit=limit,
            wall_s=outcome.wall_s,
            work_s=outcome.work_s,
            start_s=start_s,
            lost=lost,
            usage=Usage(cpu_s=worker.child.cpu_s(), peak_memory_bytes=report.memory_bytes, disk_full=disk_full),
            isolation=self.isolation,
        )


def _end_without_report(outcome: ProgramOutcome, code: int) -> tuple[LimitName | None, str | None]:
    """The limit that ended a process without a report, or the reason that the program crashed it. Raises
    SandboxFailure."""
    if code == -signal.SIGXCPU:
        return "cpu", None
    if code >= 0 or code == -signal.SIGKILL:  # its own error, or a kill that no program in it can cause
        message = outcome.stderr.text.strip()[-QUOTED_BYTES:]
        raise sandbox_lost(f"The process of a WebAssembly program ended with {code}: {message or 'it gave no reason'}")
    return None, f"The program crashed the WebAssembly runtime: {signal.Signals(-code).name}."


def _worker_environment() -> dict[str, str]:
    """The variables of a worker. wasmtime uses threads for files; one suffices, since a program makes one call at a
    time."""
    mark = {SUPERVISOR_VARIABLE: str(this_supervisor())} if sys.platform == "linux" else {}
    return {"TOKIO_WORKER_THREADS": "1", **mark}


class _WorkerReport(msgspec.Struct, frozen=True):
    """A worker's report: the program's exit code, or the trap that ended it, the size of its memory, and True if it was
    ever refused space in its folder."""

    exit: int | None = None
    trap: str | None = None
    memory_bytes: int | None = None
    disk_full: bool = False


class _Worker:
    """The process of one program. Entering the context waits for the program's start."""

    def __init__(self, installation: WasmInstallation, request: bytes) -> None:
        self._status, status = os.pipe()
        try:
            with tempfile.TemporaryFile() as file:
                file.write(request)
                file.seek(0)
                descriptors = (file.fileno(), status)
                arguments = installation.command("run", *(str(number) for number in descriptors))
                self.child = ChildProcess(arguments, _worker_environment(), "/", descriptors)
        except BaseException:
            os.close(self._status)
            raise
        finally:
            os.close(status)

    async def __aenter__(self) -> _Worker:
        try:
            if not await self._wait_started():
                raise self._not_started()
        except BaseException:
            os.close(self._status)
            await self.child.abandon()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        os.close(self._status)
        await self.child.__aexit__()

    async def _wait_started(self) -> bool:
        try:
            async with timeout(START_TIMEOUT_S):
                await wait_readable(self._status)
        except TimeoutError:
            return False
        return os.read(self._status, 1) == b"\n"

    def _not_started(self) -> SandboxFailure:
        os.set_blocking(self.child.program.stderr, False)
        message = b""
        with contextlib.suppress(OSError):
            message = os.read(self.child.program.stderr, 1 << 20)
        return SandboxFailure(
            f"A WebAssembly process could not be started: {message.decode(errors='replace').strip()[-QUOTED_BYTES:]}",
            kind="sandbox-not-made",
            retryable=True,
        )

    def report(self) -> _WorkerReport:
        """The report of the process; empty if it was killed."""
        os.set_blocking(self._status, False)
        try:
            return msgspec.json.decode(os.read(self._status, 4096) or b"{}", type=_WorkerReport)
        except BlockingIOError:
            return _WorkerReport()


def _make_scratch(user: int | None) -> str:
    if sys.platform != "linux":
        return tempfile.mkdtemp(prefix="headrace-")
    scratch = str(owned_folder(f"wasm-{next(_numbers)}"))
    os.makedirs(scratch, mode=0o700)
    if user is not None:
        os.chown(scratch, user, user)
    return scratch


def _python_program(command: SandboxCommand) -> PythonProgram:
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
