"""Files of a sandbox that lives on, whatever runtime it is of.

* A path is checked here, and followed inside, by the rights of the sandbox's programs: a mistake in either cannot touch
  a file of this machine.
* What comes out of a sandbox is bounded before it is read, and nothing in it is believed.
* An archive is checked whole before anything of it is written.

What is done inside is ``guest/files.py``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from headrace.errors import SandboxFailure
from headrace_sandbox.result import ExecResult, Limits
from headrace_sandbox.runtimes.base import FileInfo, checked_path
from headrace_sandbox.runtimes.shared.archives import Entry, entries_of, from_listed, listed, tar_of

LIST_BYTES = 8 << 20
"""Of a list of files, with their paths."""

LIMITS = Limits(wall_s=60.0, kept_bytes=64 << 10, output_bytes=LIST_BYTES)
"""For what is done with files."""

Do = Callable[[dict[str, Any], bytes, Limits], Awaitable[ExecResult]]
"""Runs ``guest/files.py`` with a request and its input."""


class Files:
    """``do`` runs one request; ``most_bytes`` is the most that the scratch folder holds."""

    def __init__(self, do: Do, most_bytes: int) -> None:
        self._do = do
        self._most_bytes = most_bytes

    async def read(self, path: str, most_bytes: int) -> bytes:
        """A regular file. Raises SandboxFailure ``bad-path``, ``no-such-file``, ``file-too-large``."""
        request = {"op": "read", "path": checked_path(path), "most_bytes": most_bytes}
        return await self._ask(request, answer_bytes=most_bytes)

    async def write(self, path: str, content: bytes) -> None:
        """Write a file, and make the folders above it. Raises SandboxFailure ``bad-path``, ``disk-full``."""
        await self._ask({"op": "write", "path": checked_path(path)}, content)

    async def list(self, path: str = "") -> list[FileInfo]:
        """What a folder holds, sorted by path; bytes of a name that are no UTF-8 are U+FFFD. Raises SandboxFailure."""
        answer = await self._ask({"op": "list", "path": _folder(path)}, answer_bytes=LIST_BYTES)
        try:
            found = [msgspec.convert({**item, "path": str(item["path"])}, FileInfo) for item in json.loads(answer)]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise SandboxFailure(
                f"A list of files cannot be read: {error}.", kind="bad-list", retryable=True
            ) from error
        return sorted(found, key=lambda item: item.path)

    async def upload(self, tar: bytes, path: str = "") -> None:
        """Unpack an archive. Raises SandboxFailure ``bad-archive``, ``archive-too-large``, ``bad-path``,
        ``disk-full``."""
        entries = await asyncio.to_thread(entries_of, tar, self._most_bytes)
        await self._unpack(entries, _folder(path))

    async def download(self, path: str, most_bytes: int) -> bytes:
        """A folder as a tar archive of its files and folders; ``most_bytes`` of all files together. Raises
        SandboxFailure ``file-too-large``, ``bad-path``."""
        request = {"op": "pack", "path": _folder(path), "most_bytes": most_bytes}
        packed = await self._ask(request, answer_bytes=most_bytes + LIST_BYTES)
        return await asyncio.to_thread(lambda: tar_of(from_listed(packed)))

    async def put(self, contents: Mapping[str, bytes]) -> None:
        """Write these files, whose content is given by path. Raises SandboxFailure as ``write``."""
        if contents:
            files = [Entry(path=checked_path(path), kind="file", content=data) for path, data in contents.items()]
            await self._unpack(files, "")

    async def _unpack(self, entries: Sequence[Entry], path: str) -> None:
        items, content = listed(entries)
        await self._ask({"op": "unpack", "path": path, "entries": items}, content)

    async def _ask(self, request: dict[str, Any], content: bytes = b"", answer_bytes: int = 0) -> bytes:
        # A capture keeps as much of the head as of the tail; what fits is whole.
        bounds = msgspec.structs.replace(
            LIMITS, kept_bytes=max(answer_bytes, LIMITS.kept_bytes), output_bytes=answer_bytes + LIMITS.kept_bytes
        )
        result = await self._do(request, content, bounds)
        if result.exit_code == 0 and not result.stdout.truncated:
            return result.stdout.head + result.stdout.tail
        raise _refused(request, result)


class WithFiles:
    """The calls about files that a sandbox has (``runtimes/base.py``), carried out by its ``_files``."""

    _files: Files

    async def read(self, path: str, most_bytes: int) -> bytes:
        """A regular file. Raises SandboxFailure."""
        return await self._files.read(path, most_bytes)

    async def write(self, path: str, content: bytes) -> None:
        """Write a file. Raises SandboxFailure."""
        await self._files.write(path, content)

    async def list(self, path: str = "") -> list[FileInfo]:
        """What a folder holds. Raises SandboxFailure."""
        return await self._files.list(path)

    async def upload(self, tar: bytes, path: str = "") -> None:
        """Unpack an archive. Raises SandboxFailure."""
        await self._files.upload(tar, path)

    async def download(self, path: str, most_bytes: int) -> bytes:
        """A folder as an archive. Raises SandboxFailure."""
        return await self._files.download(path, most_bytes)


def _folder(path: str) -> str:
    return checked_path(path) if path else ""


def _refused(request: dict[str, Any], result: ExecResult) -> SandboxFailure:
    try:
        said = json.loads(result.stderr.head)
        kind, message = str(said["kind"])[:40], str(said["message"])[:500]
    except (ValueError, TypeError, KeyError, RecursionError):
        if result.limit is not None:
            # Files in memory count as the sandbox's memory.
            kind = "disk-full" if result.limit in ("memory", "disk") else "limit"
            message = f"It ran into the sandbox's limit of {result.limit}."
        else:
            kind, message = "files-failed", f"It ended with {result.exit_code}: {result.stderr.text.strip()[-300:]}."
    return SandboxFailure(
        f"{request['op']} of {request['path'] or '.'!r} in the sandbox: {message}",
        kind=kind,
        retryable=result.limit == "time",
    )
