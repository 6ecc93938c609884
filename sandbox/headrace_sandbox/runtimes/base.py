"""What a runtime is: it runs a command in isolation, and says what isolates it.

* A fault of a runtime raises SandboxFailure; it never becomes a result.
* A runtime that fails its self-test is refused; nothing weaker takes its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from headrace.errors import SandboxFailure
from headrace_sandbox.bwrap import SCRATCH
from headrace_sandbox.result import ExecResult, Isolation, Limits


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """What to run. ``arguments``: program first. ``files``: content by path below the scratch folder. The environment
    has ``environment`` and nothing else but PATH, HOME and LANG."""

    arguments: Sequence[str]
    stdin: bytes = b""
    files: Mapping[str, bytes] = {}
    environment: Mapping[str, str] = {}


class Runtime(Protocol):
    """Runs commands, each in a sandbox of its own."""

    isolation: Isolation
    """What isolates."""

    async def run(self, command: Command, limits: Limits) -> ExecResult:
        """Run it to its end. Raises SandboxFailure; cancelling the call kills it."""
        ...


def checked_path(path: str) -> str:
    """The path, which is below the scratch folder. Raises SandboxFailure ``bad-path`` for one that leads out of it."""
    parts = path.split("/")
    if not path or "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise SandboxFailure(
            f"{path!r} is no path below {SCRATCH}.",
            hint="Give a relative path without '.' and '..'.",
            kind="bad-path",
            retryable=False,
        )
    return path
