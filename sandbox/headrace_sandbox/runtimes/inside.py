"""How programs of ours get into a sandbox: as files, run by the Python there, that import each other.

* They tell nothing of this machine: they come from memory, not from where they lie here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from headrace_sandbox import bwrap

PYTHON = "/usr/bin/python3"
"""The interpreter inside: that of this machine's system, which every user can read."""

FOLDER = "/headrace"
"""Where the files are inside."""

PACKAGE = "headrace_sandbox.inside"

HERE = Path(__file__).parent.parent / "inside"


def sources(*modules: str) -> dict[str, int]:
    """Descriptors to read these modules from, by where each of them is inside."""
    package = PACKAGE.replace(".", "/")
    return {f"{FOLDER}/{package}/{name}.py": bwrap.memory_file((HERE / f"{name}.py").read_bytes()) for name in modules}


def mounts(files: Mapping[str, int]) -> Iterator[str]:
    """bubblewrap's arguments for the files."""
    for path, descriptor in files.items():
        yield from ("--perms", "0444", "--ro-bind-data", f"{descriptor}", path)


def command(module: str, *arguments: str, python: str = PYTHON) -> list[str]:
    """The command that runs a module."""
    run = f"import sys; sys.path.append({FOLDER!r}); import {PACKAGE}.{module} as module; module.main()"
    return [python, "-I", "-S", "-c", run, *arguments]
