"""Guest modules as read-only files of a sandbox of bubblewrap.

* Their content comes from memory, so the mounts do not show where the modules lie on this machine.
* Modules that are started often are compiled once, by the Python inside, in a sandbox of its own.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping

from headrace_sandbox.host.descriptors import Descriptors, memory_file
from headrace_sandbox.result import ExecResult, Limits
from headrace_sandbox.runtimes.base import SandboxCommand
from headrace_sandbox.runtimes.bubblewrap.bwrap import sandbox_not_made
from headrace_sandbox.runtimes.shared.guest_modules import PACKAGE, PYTHON, guest_text

FOLDER = "/headrace"
"""The folder of the modules inside."""

COMPILE = """
import base64, importlib.util, json, marshal, sys
head = importlib.util.MAGIC_NUMBER + bytes(12)
code = {name: compile(text, name, "exec", dont_inherit=True) for name, text in json.load(sys.stdin).items()}
json.dump({name: base64.b64encode(head + marshal.dumps(code)).decode() for name, code in code.items()}, sys.stdout)
"""
"""Compiles modules: JSON in, texts by path inside, and JSON out."""

COMPILE_LIMITS = Limits(wall_s=60.0, kept_bytes=4 << 20)

RunCommand = Callable[[SandboxCommand, Limits], Awaitable[ExecResult]]


def source_files(descriptors: Descriptors, *modules: str) -> dict[str, int]:
    """Descriptors to read these modules from, by path inside."""
    return {_path(name): descriptors.own(memory_file(guest_text(name).encode())) for name in modules}


async def compile_modules(run: RunCommand, *modules: str) -> dict[str, bytes]:
    """The modules compiled for the Python inside, by path inside. ``run`` runs a command in a fresh sandbox. Raises
    SandboxFailure ``sandbox-not-made``."""
    texts = {_path(name): guest_text(name) for name in modules}
    command = SandboxCommand(arguments=[PYTHON, "-I", "-S", "-c", COMPILE], stdin=json.dumps(texts).encode())
    result = await run(command, COMPILE_LIMITS)
    if result.fault:
        raise sandbox_not_made(f"{PYTHON} there does not compile our programs: {result.stderr.text.strip()}")
    return {f"{name}c": base64.b64decode(code) for name, code in json.loads(result.stdout.text).items()}


def file_mounts(files: Mapping[str, int]) -> Iterator[str]:
    """bubblewrap's arguments for files. ``files``: descriptors to read them from, by path inside."""
    for path, descriptor in files.items():
        yield from ("--perms", "0444", "--ro-bind-data", f"{descriptor}", path)


def module_command(module: str, *arguments: str, python: str = PYTHON) -> list[str]:
    """The command inside that runs a module."""
    run = f"import sys; sys.path.append({FOLDER!r}); import {PACKAGE}.{module} as module; module.main()"
    return [python, "-I", "-S", "-c", run, *arguments]


def _path(module: str) -> str:
    return f"{FOLDER}/{PACKAGE.replace('.', '/')}/{module}.py"
