"""How programs of ours get into a sandbox: as files, run by the Python there, that import each other.

* They tell nothing of this machine: they come from memory, not from where they lie here.
* What is started often is compiled once, by the Python inside, in a sandbox of its own.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path

from headrace_sandbox import guest
from headrace_sandbox.host import bwrap
from headrace_sandbox.host.descriptors import Descriptors
from headrace_sandbox.result import ExecResult, Limits
from headrace_sandbox.runtimes.base import Command

PYTHON = "/usr/bin/python3"
"""The interpreter inside: that of this machine's system, which every user can read."""

FOLDER = "/headrace"
"""Where the files are inside."""

PACKAGE = "headrace_sandbox.guest"

HERE = Path(guest.__file__).parent


COMPILE = """
import base64, importlib.util, json, marshal, sys
head = importlib.util.MAGIC_NUMBER + bytes(12)
code = {name: compile(text, name, "exec", dont_inherit=True) for name, text in json.load(sys.stdin).items()}
json.dump({name: base64.b64encode(head + marshal.dumps(code)).decode() for name, code in code.items()}, sys.stdout)
"""
"""Compiles modules: JSON in, with their texts by where they are inside, and JSON out."""

COMPILE_LIMITS = Limits(wall_s=60.0, kept_bytes=4 << 20)

Run = Callable[[Command, Limits], Awaitable[ExecResult]]


def sources(made: Descriptors, *modules: str) -> dict[str, int]:
    """Descriptors to read these modules from, by where each of them is inside."""
    package = PACKAGE.replace(".", "/")
    return {
        f"{FOLDER}/{package}/{name}.py": made.own(bwrap.memory_file((HERE / f"{name}.py").read_bytes()))
        for name in modules
    }


async def compiled(run: Run, *modules: str) -> dict[str, bytes]:
    """These modules for the Python inside, by where each of them is there. ``run`` runs a command in a fresh sandbox.
    Raises SandboxFailure ``sandbox-not-made``."""
    package = PACKAGE.replace(".", "/")
    texts = {f"{FOLDER}/{package}/{name}.py": (HERE / f"{name}.py").read_text() for name in modules}
    command = Command(arguments=[PYTHON, "-I", "-S", "-c", COMPILE], stdin=json.dumps(texts).encode())
    result = await run(command, COMPILE_LIMITS)
    if result.fault:
        raise bwrap.not_made(f"{PYTHON} there does not compile our programs: {result.stderr.text.strip()}")
    return {f"{name}c": base64.b64decode(code) for name, code in json.loads(result.stdout.text).items()}


def mounts(files: Mapping[str, int]) -> Iterator[str]:
    """bubblewrap's arguments for the files."""
    for path, descriptor in files.items():
        yield from ("--perms", "0444", "--ro-bind-data", f"{descriptor}", path)


def command(module: str, *arguments: str, python: str = PYTHON) -> list[str]:
    """The command that runs a module."""
    run = f"import sys; sys.path.append({FOLDER!r}); import {PACKAGE}.{module} as module; module.main()"
    return [python, "-I", "-S", "-c", run, *arguments]
