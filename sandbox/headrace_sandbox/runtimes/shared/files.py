"""Files of a persistent sandbox, for every runtime.

* A path is checked here, and resolved inside with the rights of the sandbox's programs: a mistake in either cannot
  touch a file of this machine.
* Data from a sandbox is bounded before it is read, and validated.
* An archive is checked whole before any of it is written.

The part inside is ``guest/files.py``.
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
from headrace_sandbox.runtimes.shared.archives import ArchiveEntry, entries_of, entries_of_listing, pack_listing, tar_of

LIST_BYTES = 8 << 20
"""Largest list of files, with their paths."""

LIMITS = Limits(wall_s=60.0, kept_bytes=64 << 10, output_bytes=LIST_BYTES)
"""The limits of a file request."""

RunFileRequest = Callable[[dict[str, Any], bytes, Limits], Awaitable[ExecResult]]
"""Runs ``guest/files.py`` with a request and its input."""


class SandboxFiles:
    """Reads and writes files. ``run_request`` runs one request; ``most_bytes`` is the size of the scratch folder."""

    def __init__(self, run_request: RunFileRequest, most_bytes: int) -> None:
        self._run_request = run_request
        self._most_bytes = most_bytes

    async def read(self, path: str, most_bytes: int) -> bytes:
        """A regular file. Raises SandboxFailure ``bad-path``, ``no-such-file``, ``file-too-large``."""
        request = {"op": "read", "path": checked_path(path), "most_bytes": most_bytes}
        return await self._request(request, answer_bytes=most_bytes)

    async def write(self, path: str, content: bytes) -> None:
        """Write a file, and make the folders above it. Raises SandboxFailure ``bad-path``, ``disk-full``."""
        await self._request({"op": "write", "path": checked_path(path)}, content)

    async def list(self, path: str = "") -> list[FileInfo]:
        """The entries of a folder, sorted by path; bytes of a name that are not UTF-8 become U+FFFD. Raises
        SandboxFailure."""
        listing = await self._request({"op": "list", "path": _checked_folder(path)}, answer_bytes=LIST_BYTES)
        try:
            entries = [msgspec.convert({**item, "path": str(item["path"])}, FileInfo) for item in json.loads(listing)]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise SandboxFailure(
                f"A list of files cannot be read: {error}.", kind="bad-list", retryable=True
            ) from error
        return sorted(entries, key=lambda item: item.path)

    async def upload(self, tar: bytes, path: str = "") -> None:
        """Unpack an archive. Raises SandboxFailure ``bad-archive``, ``archive-too-large``, ``bad-path``,
        ``disk-full``."""
        entries = await asyncio.to_thread(entries_of, tar, self._most_bytes)
        await self._unpack(entries, _checked_folder(path))

    async def download(self, path: str, most_bytes: int) -> bytes:
        """A folder as a tar archive of its files and folders; ``most_bytes`` of all files together. Raises
        SandboxFailure ``file-too-large``, ``bad-path``."""
        request = {"op": "pack", "path": _checked_folder(path), "most_bytes": most_bytes}
        packed = await self._request(request, answer_bytes=most_bytes + LIST_BYTES)
        return await asyncio.to_thread(lambda: tar_of(entries_of_listing(packed)))

    async def put(self, contents: Mapping[str, bytes]) -> None:
        """Write these files: content by path. Raises SandboxFailure as ``write``."""
        if contents:
            files = [
                ArchiveEntry(path=checked_path(path), kind="file", content=data) for path, data in contents.items()
            ]
            await self._unpack(files, "")

    async def _unpack(self, entries: Sequence[ArchiveEntry], path: str) -> None:
        items, content = pack_listing(entries)
        await self._request({"op": "unpack", "path": path, "entries": items}, content)

    async def _request(self, request: dict[str, Any], content: bytes = b"", answer_bytes: int = 0) -> bytes:
        # A capture that fits is kept whole.
        bounds = msgspec.structs.replace(
            LIMITS, kept_bytes=max(answer_bytes, LIMITS.kept_bytes), output_bytes=answer_bytes + LIMITS.kept_bytes
        )
        result = await self._run_request(request, content, bounds)
        if result.exit_code == 0 and not result.stdout.truncated:
            return result.stdout.head + result.stdout.tail
        raise _request_failed(request, result)


class FileCalls:
    """The file calls of a ``Sandbox``, carried out by its ``_files``."""

    _files: SandboxFiles

    async def read(self, path: str, most_bytes: int) -> bytes:
        """A regular file. Raises SandboxFailure."""
        return await self._files.read(path, most_bytes)

    async def write(self, path: str, content: bytes) -> None:
        """Write a file. Raises SandboxFailure."""
        await self._files.write(path, content)

    async def list(self, path: str = "") -> list[FileInfo]:
        """The entries of a folder. Raises SandboxFailure."""
        return await self._files.list(path)

    async def upload(self, tar: bytes, path: str = "") -> None:
        """Unpack an archive. Raises SandboxFailure."""
        await self._files.upload(tar, path)

    async def download(self, path: str, most_bytes: int) -> bytes:
        """A folder as an archive. Raises SandboxFailure."""
        return await self._files.download(path, most_bytes)


def _checked_folder(path: str) -> str:
    return checked_path(path) if path else ""


def _request_failed(request: dict[str, Any], result: ExecResult) -> SandboxFailure:
    try:
        error = json.loads(result.stderr.head)
        kind, message = str(error["kind"])[:40], str(error["message"])[:500]
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
