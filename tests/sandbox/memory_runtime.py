"""A runtime that isolates nothing and runs nothing: programs are a few words, sandboxes are dictionaries."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable

from headrace.errors import SandboxFailure
from headrace_sandbox.result import ExecResult, Isolation, Limits, Output, Usage
from headrace_sandbox.runtimes.base import FileInfo, PythonProgram, SandboxCommand, SessionKind, Template

ISOLATION = Isolation(runtime="memory", versions={}, active=[])


async def run(words: str, limits: Limits) -> ExecResult:
    """Run ``sleep S``, ``kill``, ``lost`` or ``fail``; other words are printed."""
    begun_at = time.monotonic()
    verb, _, argument = words.partition(" ")
    if verb == "sleep":
        await asyncio.sleep(float(argument))
    if verb == "fail":
        raise SandboxFailure("It broke.", kind="sandbox-lost", retryable=True)
    return ExecResult(
        exit_code=None if verb == "kill" else 0,
        signal=9 if verb == "kill" else None,
        stdout=Output(head=words.encode(), total_bytes=len(words)),
        stderr=Output(),
        limit=None,
        lost="it ended its sandbox" if verb == "lost" else None,
        wall_s=time.monotonic() - begun_at,
        start_s=0.0,
        usage=Usage(),
        isolation=ISOLATION,
    )


class MemoryRuntime:
    """``make_s``: the time to make a sandbox. ``open_fails``, ``reset_fails``, ``close_fails``: True for a failure."""

    name = "memory"
    isolation = ISOLATION

    def __init__(self, make_s: float = 0.0) -> None:
        self.make_s = make_s
        self.open_fails: Callable[[], bool] = lambda: False
        self.reset_fails: Callable[[], bool] = lambda: False
        self.close_fails: Callable[[], bool] = lambda: False
        self.living: set[str] = set()
        self.opened: list[MemorySandbox] = []
        self.running = 0
        self.most_running = 0
        self.ran: list[str] = []
        self.is_closed = False
        self._numbers = itertools.count()

    async def run(self, command: SandboxCommand, limits: Limits) -> ExecResult:
        await asyncio.sleep(self.make_s)
        return await self.do(" ".join(command.arguments), limits)

    async def run_code(self, program: PythonProgram, limits: Limits) -> ExecResult:
        return await self.do(program.code, limits)

    async def do(self, words: str, limits: Limits) -> ExecResult:
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        self.ran.append(words)
        try:
            return await run(words, limits)
        finally:
            self.running -= 1

    async def open(self, template: Template, ttl_s: float) -> MemorySandbox:
        await asyncio.sleep(self.make_s)
        if self.open_fails():
            raise SandboxFailure("There is no room.", kind="sandbox-not-made", retryable=True)
        sandbox = MemorySandbox(self, f"box{next(self._numbers)}", template)
        self.living.add(sandbox.id)
        self.opened.append(sandbox)
        return sandbox

    async def close(self) -> None:
        self.is_closed = True


class MemorySandbox:
    isolation = ISOLATION

    def __init__(self, runtime: MemoryRuntime, id: str, template: Template) -> None:
        self.id = id
        self._runtime = runtime
        self._template = template
        self.files = dict(template.files)

    async def run(self, command: SandboxCommand, limits: Limits) -> ExecResult:
        return await self._runtime.do(" ".join(command.arguments), limits)

    async def session(self, kind: SessionKind) -> MemorySession:
        return MemorySession(self)

    async def read(self, path: str, most_bytes: int) -> bytes:
        if path not in self.files:
            raise SandboxFailure(f"There is no {path}.", kind="no-such-file", retryable=False)
        return _at_most(self.files[path], most_bytes)

    async def write(self, path: str, content: bytes) -> None:
        self.files[path] = content

    async def list(self, path: str = "") -> list[FileInfo]:
        return [FileInfo(path=name, kind="file", size_bytes=len(data)) for name, data in sorted(self.files.items())]

    async def upload(self, tar: bytes, path: str = "") -> None:
        self.files[f"{path}.tar"] = tar

    async def download(self, path: str, most_bytes: int) -> bytes:
        return _at_most(self.files[f"{path}.tar"], most_bytes)

    async def reset(self) -> None:
        if self._runtime.reset_fails():
            raise SandboxFailure("It is not clean.", kind="not-offered", retryable=False)
        self.files = dict(self._template.files)

    async def close(self) -> None:
        if self._runtime.close_fails():
            raise SandboxFailure("It does not end.", kind="unkillable", retryable=True)
        self._runtime.living.discard(self.id)


class MemorySession:
    def __init__(self, sandbox: MemorySandbox) -> None:
        self._sandbox = sandbox
        self._interrupted = asyncio.Event()

    async def run(self, cell: str, limits: Limits) -> ExecResult:
        self._interrupted.clear()
        running = asyncio.ensure_future(run(cell, limits))
        stopping = asyncio.ensure_future(self._interrupted.wait())
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if running.done():
            return running.result()
        running.cancel()
        return await run("interrupted", limits)

    async def interrupt(self) -> None:
        self._interrupted.set()

    async def close(self) -> None:
        pass


def _at_most(content: bytes, most_bytes: int) -> bytes:
    if len(content) > most_bytes:
        raise SandboxFailure(f"At most {most_bytes} bytes are wanted.", kind="file-too-large", retryable=False)
    return content
