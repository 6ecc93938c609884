"""Images for tests, made of this machine's own files, without a registry.

* Programs come with the libraries that the loader says they need; one that this machine has not is left out.
* ``PYTHON`` has a shell, the usual tools and Python; ``SHELL`` no Python; ``BARE`` no shell either.
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

BARE = ("true", "echo", "cat")
SHELL = (
    *BARE, "sh", "sleep", "tar", "mkdir", "rm", "ls", "chmod", "dd", "env", "false", "head", "id", "kill", "ln", "mv",
    "nohup", "setsid", "seq", "stat", "touch", "mkfifo", "wc", "find", "yes", "cp", "du", "df",
)  # fmt: skip
PYTHON = (*SHELL, "bash", "python3", "pgrep", "pkill", "ps", "grep", "sed", "truncate", "timeout", "su")

SYSTEM_PYTHON = Path("/usr/bin/python3")

LEFT_OUT = {"__pycache__", "test", "idlelib", "tkinter", "lib2to3", "ensurepip", "turtledemo", "pydoc_data"}
"""Large parts of the standard library that the tests do not need."""


def rootfs(programs: Iterable[str]) -> bytes:
    """A tar archive of a root file system with these programs."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for folder in ("usr/bin", "usr/lib", "usr/lib64", "etc", "proc", "dev", "sys"):
            archive.addfile(_entry(folder, tarfile.DIRTYPE))
        archive.addfile(_entry("tmp", tarfile.DIRTYPE, mode=0o1777))
        for name in ("bin", "lib", "lib64"):
            archive.addfile(_entry(name, tarfile.SYMTYPE, f"usr/{name}"))
        archive.addfile(_entry("sbin", tarfile.SYMTYPE, "usr/bin"))
        for inside, path in sorted(_files(programs).items()):
            archive.add(path.resolve(), inside, recursive=False)
    return buffer.getvalue()


def _entry(name: str, kind: bytes, target: str = "", mode: int = 0o755) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname, entry.mode = kind, target, mode
    return entry


def _files(programs: Iterable[str]) -> dict[str, Path]:
    """The files of an image by their path inside: programs, their libraries, and Python's standard library."""
    found = {
        f"usr/bin/{name}": Path(path)
        for name in programs
        if (path := shutil.which(name, path="/usr/bin:/bin:/usr/sbin")) is not None
    }
    linked = list(found.values())
    if SYSTEM_PYTHON in linked:
        library = list(_standard_library())
        found.update((str(file)[1:], file) for file in library)
        linked += [file for file in library if file.suffix == ".so"]
    said = subprocess.run(["ldd", *linked], capture_output=True, text=True, check=False).stdout
    found.update((_merged(path), Path(path)) for path in re.findall(r"(/\S+) \(0x", said))
    return found


def _merged(path: str) -> str:
    return path[1:] if path.startswith("/usr/") else f"usr{path}"


def _standard_library() -> Iterator[Path]:
    said = subprocess.run(
        [SYSTEM_PYTHON, "-I", "-c", "import sysconfig; print(sysconfig.get_path('stdlib'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    root = Path(said.stdout.strip())
    for path in root.rglob("*"):
        if path.is_file() and not LEFT_OUT & set(path.relative_to(root).parts):
            yield path
