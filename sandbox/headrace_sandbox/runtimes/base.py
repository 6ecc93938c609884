"""The interface of runtimes: they run programs in isolation, and report what isolates them.

* A fault of a runtime raises SandboxFailure; it never becomes a result.
* A runtime that fails its self-test is refused; nothing weaker takes its place.
* A program that breaks its own sandbox is at fault: the result says ``lost``, and the sandbox is not used again.
* A command that no system could start is refused before anything is made, by every runtime alike: no program, a NUL,
  text that is not Unicode, a file below another file.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, runtime_checkable

import msgspec

from headrace.errors import SandboxFailure
from headrace_sandbox.host.layout import SCRATCH
from headrace_sandbox.result import LONGEST_S, ExecResult, Isolation, Limits, check_range

SessionKind = Literal["bash", "python"]

FileKind = Literal["file", "folder", "other"]
"""``other``: a link, a pipe, a socket or a device; it is listed, and neither read nor followed."""

PAGE_BYTES = 4096
"""The size of a page: files in memory use whole ones."""

PRELOAD = ("collections", "functools", "itertools", "json", "math", "random", "re", "string", "typing")
"""Modules that most programs use."""


class SandboxCommand(msgspec.Struct, frozen=True, kw_only=True):
    """A command to run. ``arguments``: program first. ``files``: content by path below the scratch folder. The
    program's environment has ``environment``, PATH, HOME and LANG, and nothing else. Raises SandboxFailure
    ``bad-command`` or ``bad-path``."""

    arguments: Sequence[str]
    stdin: bytes = b""
    files: Mapping[str, bytes] = {}
    environment: Mapping[str, str] = {}

    def __post_init__(self) -> None:
        if not self.arguments:
            raise bad_command("The command names no program.")
        _check_arguments(self.arguments)
        _check_environment(self.environment)
        _check_files(self.files)


class PythonProgram(msgspec.Struct, frozen=True, kw_only=True):
    """A Python program to run. ``files``: content by path below the scratch folder, where it runs.

    A runtime may fork it from an interpreter that imported ``preload`` before; programs of different trust domains
    (``domain``: a run, a tenant) never share one. Raises SandboxFailure as ``SandboxCommand``; a NUL in ``code`` is the
    program's own mistake.
    """

    code: str
    arguments: Sequence[str] = ()
    stdin: bytes = b""
    files: Mapping[str, bytes] = {}
    environment: Mapping[str, str] = {}
    preload: tuple[str, ...] = PRELOAD
    domain: str = ""

    def __post_init__(self) -> None:
        _check_unicode("The program", self.code)
        _check_arguments(self.arguments)
        _check_environment(self.environment)
        _check_files(self.files)


class Template(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a sandbox; sandboxes of one template are interchangeable until a program runs in them.

    ``image``: the runtime's name for a system's files (a Docker image, a folder); none: the programs of this machine.
    ``limits``: of the whole sandbox (memory, processes, processors, disk). ``files`` and ``environment`` as in a
    ``SandboxCommand``, with the same checks.
    """

    image: str | None = None
    files: Mapping[str, bytes] = {}
    environment: Mapping[str, str] = {}
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        _check_environment(self.environment)
        _check_files(self.files)


class FileInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of a folder. ``path`` is relative to the scratch folder; ``size_bytes`` as the file system reports
    it."""

    path: str
    kind: FileKind
    size_bytes: int


class Session(Protocol):
    """A persistent shell or interpreter: each cell finds the state of the cells before.

    A cell's end is reported beside its output, never by it. A cell that exceeds its time is interrupted, its output
    until then is returned, and the session goes on; only if it cannot is it recreated, and the result's ``lost`` says
    so.
    """

    async def run(self, cell: str, limits: Limits) -> ExecResult:
        """Run a cell. Only the limits of time and output apply; the others are the sandbox's. ``exit_code`` is the
        shell's ``$?``; for Python it is 0, or 1 after an exception. Raises SandboxFailure."""
        ...

    async def interrupt(self) -> None:
        """Interrupt the running cell, as Ctrl-C does."""
        ...

    async def close(self) -> None:
        """End it, and everything that it started."""
        ...


class Sandbox(Protocol):
    """A persistent sandbox, which stays between calls."""

    id: str
    isolation: Isolation

    async def run(self, command: SandboxCommand, limits: Limits) -> ExecResult:
        """Run a command in it; its background processes are killed. Only the limits of time and output apply; the
        others are the sandbox's. Raises SandboxFailure."""
        ...

    async def session(self, kind: SessionKind) -> Session:
        """A new session in it. Raises SandboxFailure ``not-offered`` where the runtime has none of that kind."""
        ...

    async def read(self, path: str, most_bytes: int) -> bytes:
        """A regular file below the scratch folder. Raises SandboxFailure ``bad-path``, ``no-such-file``,
        ``file-too-large``."""
        ...

    async def write(self, path: str, content: bytes) -> None:
        """Write a file below the scratch folder; makes the folders above it. Raises SandboxFailure ``bad-path``,
        ``disk-full``."""
        ...

    async def list(self, path: str = "") -> list[FileInfo]:
        """The entries of a folder below the scratch folder, sorted by path. Raises SandboxFailure."""
        ...

    async def upload(self, tar: bytes, path: str = "") -> None:
        """Unpack an archive below the scratch folder. It is refused whole, before anything is written, if an entry
        leads out of it, is not a file, folder or link within it, or if it has too many entries or bytes."""
        ...

    async def download(self, path: str, most_bytes: int) -> bytes:
        """A folder below the scratch folder as a tar archive of its files and folders. Raises SandboxFailure
        ``file-too-large``."""
        ...

    async def reset(self) -> None:
        """Restore its first state: nothing runs, and the scratch folder has only the template's files. Raises
        SandboxFailure ``not-offered`` if the runtime cannot do this."""
        ...

    async def close(self) -> None:
        """End it; nothing of it is left."""
        ...


class Runtime(Protocol):
    """Runs programs, each in a sandbox of its own, and makes persistent sandboxes."""

    name: str
    isolation: Isolation
    """The parts that isolate."""

    async def run(self, command: SandboxCommand, limits: Limits) -> ExecResult:
        """Run a command in a fresh sandbox. Raises SandboxFailure; cancelling the call kills it."""
        ...

    async def run_code(self, program: PythonProgram, limits: Limits) -> ExecResult:
        """Run a Python program in a fresh sandbox, in the runtime's cheapest way. Raises SandboxFailure;
        cancelling the call kills it."""
        ...

    async def open(self, template: Template, ttl_s: float) -> Sandbox:
        """A persistent sandbox, which ends after ``ttl_s`` even if its supervisor is gone. Raises SandboxFailure
        ``not-offered`` if the runtime has none."""
        ...

    async def close(self) -> None:
        """End everything that it runs, and remove everything that it keeps."""
        ...


@runtime_checkable
class SupportsSweep(Protocol):
    """A runtime whose sandboxes may outlive this machine's processes, because a daemon holds them."""

    async def sweep(self) -> int:
        """Remove the sandboxes that have expired or whose supervisor is dead; returns their number. Raises
        SandboxFailure."""
        ...


def not_offered(runtime: str, subject: str) -> SandboxFailure:
    """The failure of a call that a runtime does not support."""
    return SandboxFailure(
        f"The runtime {runtime} has no {subject}.",
        hint="`headrace sandbox doctor` lists what each runtime here has.",
        kind="not-offered",
        retryable=False,
    )


def bad_command(detail: str) -> SandboxFailure:
    """The failure of a command that no system could start."""
    return SandboxFailure(
        detail,
        hint="Pass binary data in a file, or as standard input.",
        kind="bad-command",
        retryable=False,
    )


def _check_arguments(arguments: Sequence[str]) -> None:
    for argument in arguments:
        _check_text("An argument", argument)


def _check_environment(environment: Mapping[str, str]) -> None:
    for name, value in environment.items():
        if not name or "=" in name:
            raise bad_command(f"{name[:100]!r} is not a name of a variable.")
        _check_text("The name of a variable", name)
        _check_text(f"The variable {name}", value)


def _check_text(subject: str, text: str) -> None:
    if "\0" in text:
        raise bad_command(f"{subject} has a NUL in it, which no program can receive.")
    _check_unicode(subject, text)


def _check_unicode(subject: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise bad_command(f"{subject} is not Unicode: it has half a character in it.") from error


def _check_files(files: Mapping[str, bytes]) -> None:
    for path in files:
        above = checked_path(path)
        while above := above.rpartition("/")[0]:
            if above in files:
                raise _bad_path(f"{path!r} lies below {above!r}, which is a file.", "Give one of them another name.")


def checked_path(path: str) -> str:
    """The path, which is below the scratch folder. Raises SandboxFailure ``bad-path`` for a path that leads out of it,
    or that no file can have."""
    parts = path.split("/")
    if not path or "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise _bad_path(f"{path!r} is not a path below {SCRATCH}.", "Give a relative path without '.' and '..'.")
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise _bad_path(f"{path!r} is not Unicode.", "Give another name.") from error
    return path


def check_room(files: Mapping[str, bytes], limits: Limits) -> None:
    """Check that files fit in a scratch folder. Raises SandboxFailure ``disk-full``."""
    largest = max(map(len, files.values()), default=0)
    if largest > limits.file_bytes:
        raise _disk_full(f"A file has {largest} bytes; the limit is {limits.file_bytes}.")
    if sum(map(_pages, map(len, files.values()))) > _pages(limits.disk_bytes):
        raise _disk_full(f"The files do not fit in a scratch folder of {limits.disk_bytes} bytes.")


def check_ttl(ttl_s: float) -> None:
    """Check that a time to live is a positive, finite number. Raises SandboxFailure ``bad-limit``."""
    check_range("ttl_s", ttl_s, sys.float_info.min, LONGEST_S)


def _pages(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES)


def _disk_full(detail: str) -> SandboxFailure:
    return SandboxFailure(detail, hint="Raise `disk_bytes` and `file_bytes`.", kind="disk-full", retryable=False)


def _bad_path(detail: str, hint: str) -> SandboxFailure:
    return SandboxFailure(detail, hint=hint, kind="bad-path", retryable=False)
