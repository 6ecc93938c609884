"""Reads untrusted archives into plain entries, or refuses them whole.

* It refuses absolute paths, paths and links that lead out, devices, pipes, sparse files, the bits setuid and setgid,
  impossible names, more entries or bytes than allowed, and archives that grow too much when unpacked.
* It writes no file, and unpacks no more than allowed.
* The reading time depends only on the size of an archive, not on the number of its streams or the nesting of its
  headers.
* Of an entry's metadata, only path, kind, target and the executable bit are used.
* A hard link to an earlier file of the archive becomes a copy of that file; any other hard link is refused.
"""

from __future__ import annotations

import bz2
import io
import itertools
import json
import lzma
import tarfile
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import msgspec

from headrace.errors import SandboxFailure

EntryKind = Literal["file", "folder", "link"]

MOST_ENTRIES = 10_000

MOST_RATIO = 200
"""Largest ratio of unpacked to packed size; text packs by 3 to 10, and zeros by 1,000."""

UNCHECKED_BYTES = 1 << 20
"""The ratio does not matter for an archive of at most this size unpacked."""

BLOCK_BYTES = 512
"""Tar's block: an entry has a header of at least one, and its content is padded to whole ones."""

ENTRY_HEADER_BYTES = 8 * BLOCK_BYTES
"""Allowed headers of one entry: longer names and numbers have headers of their own."""

MOST_PATH_BYTES, MOST_NAME_BYTES, MOST_DEPTH = 4000, 255, 100

STEP_BYTES = 256 << 10

MOST_STREAMS = 10_000
"""Most packed streams in sequence, as made by tools that pack in blocks."""


class ArchiveEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An entry. ``path`` is relative, without '.' and '..'. ``target``: of a link, relative to its folder."""

    path: str
    kind: EntryKind
    content: bytes = b""
    executable: bool = False
    target: str = ""


def entries_of(archive: bytes, most_bytes: int, most_entries: int = MOST_ENTRIES) -> list[ArchiveEntry]:
    """The entries of a tar archive, which may be packed by gzip, bzip2 or xz. ``most_bytes``: of all files together.
    Raises SandboxFailure ``bad-archive`` or ``archive-too-large``."""
    plain = _unpacked(archive, most_bytes + most_entries * ENTRY_HEADER_BYTES + 20 * BLOCK_BYTES)
    entries: dict[str, ArchiveEntry] = {}
    total, count = 0, 0
    try:
        with tarfile.open(fileobj=io.BytesIO(plain), mode="r:", errorlevel=1) as tar:
            while (member := tar.next()) is not None:
                count += 1
                total += member.size if member.isreg() else 0
                if count > most_entries:
                    raise archive_too_large(f"more than {most_entries} entries")
                if total > most_bytes:
                    raise archive_too_large(f"more than {most_bytes} bytes")
                path = _path_of(member.name)
                if path:
                    entries[path] = _entry(tar, member, path, entries)
                    total += len(entries[path].content) if member.islnk() else 0
    except (tarfile.TarError, ValueError, OverflowError, EOFError, UnicodeError, RecursionError) as error:
        raise bad_archive(f"it cannot be read: {error}") from error
    if total > most_bytes:
        raise archive_too_large(f"more than {most_bytes} bytes")
    return _consistent(entries)


def tar_of(entries: Sequence[ArchiveEntry]) -> bytes:
    """A tar archive, always the same for the same entries."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for entry in entries:
            info = tarfile.TarInfo(entry.path)
            info.size = len(entry.content)
            info.mode = 0o755 if entry.executable or entry.kind == "folder" else 0o644
            info.type = {"file": tarfile.REGTYPE, "folder": tarfile.DIRTYPE, "link": tarfile.SYMTYPE}[entry.kind]
            info.linkname = entry.target
            tar.addfile(info, io.BytesIO(entry.content))
    return file.getvalue()


def pack_listing(entries: Sequence[ArchiveEntry]) -> tuple[list[dict[str, Any]], bytes]:
    """The entries as ``guest/files.py`` takes them: a list without content, and all content."""
    items = [
        {
            "path": entry.path,
            "kind": entry.kind,
            "size_bytes": len(entry.content),
            "executable": entry.executable,
            "target": entry.target,
        }
        for entry in entries
    ]
    return items, b"".join(entry.content for entry in entries)


def entries_of_listing(packed: bytes) -> list[ArchiveEntry]:
    """The entries that ``guest/files.py`` packed: a line with the list, then all content. They come from a sandbox, so
    they are validated. Raises SandboxFailure ``bad-archive``."""
    line, _, content = packed.partition(b"\n")
    entries, at = {}, 0
    try:
        for item in json.loads(line):
            path = _path_of(str(item["path"]).encode(errors="replace").decode())
            size = int(item["size_bytes"])
            if not path or item["kind"] not in ("file", "folder") or not 0 <= size <= len(content) - at:
                raise bad_archive("its list is wrong")
            entries[path] = ArchiveEntry(
                path=path, kind=item["kind"], content=content[at : at + size], executable=bool(item["executable"])
            )
            at += size
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise bad_archive(f"its list cannot be read: {error}") from error
    return list(entries.values())


def bad_archive(reason: str) -> SandboxFailure:
    """The failure of an archive that is refused."""
    return SandboxFailure(f"The archive is refused: {reason}.", kind="bad-archive", retryable=False)


def archive_too_large(excess: str) -> SandboxFailure:
    """The failure of an archive that is too large."""
    return SandboxFailure(f"The archive is refused: it has {excess}.", kind="archive-too-large", retryable=False)


# Packed archives ------------------------------------------------------------------------------------------------------


class _Decompressor(Protocol):
    """The standard library's decompressor interface."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int = -1, /) -> bytes: ...


class _GzipDecompressor:
    """zlib's decompressor, with the interface of the others."""

    def __init__(self) -> None:
        self._inner = zlib.decompressobj(wbits=31)

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data

    def decompress(self, data: bytes, max_length: int = -1, /) -> bytes:
        return self._inner.decompress(self._inner.unconsumed_tail + data, max_length)


DECOMPRESSORS: tuple[tuple[bytes, Callable[[], _Decompressor]], ...] = (
    (b"\x1f\x8b", _GzipDecompressor),
    (b"BZh", bz2.BZ2Decompressor),
    (b"\xfd7zXZ\x00", lzma.LZMADecompressor),
)
"""Decompressors by the first bytes of an archive."""


def _unpacked(archive: bytes, most_bytes: int) -> bytes:
    make = next((make for magic, make in DECOMPRESSORS if archive.startswith(magic)), None)
    if make is None:
        if len(archive) > most_bytes:
            raise archive_too_large(f"{len(archive)} bytes")
        return archive
    bound = min(most_bytes, max(UNCHECKED_BYTES, MOST_RATIO * len(archive)))
    unpacked, streams = bytearray(), 0
    source = io.BytesIO(archive)
    try:
        while data := _next_data(source):
            streams += 1
            if streams > MOST_STREAMS:
                raise bad_archive(f"it is packed into more than {MOST_STREAMS} streams")
            decompressor = make()
            while not decompressor.eof:
                piece = decompressor.decompress(data, STEP_BYTES)
                unpacked += piece
                if len(unpacked) > bound:
                    raise archive_too_large(f"more than {bound} bytes unpacked, from {len(archive)}")
                data = b"" if piece or decompressor.eof else source.read(STEP_BYTES)
                if not piece and not data and not decompressor.eof:
                    raise bad_archive("it ends early")
            source.seek(-len(decompressor.unused_data), io.SEEK_CUR)
    except (zlib.error, OSError, lzma.LZMAError, EOFError) as error:
        raise bad_archive(f"it cannot be unpacked: {error}") from error
    return bytes(unpacked)


def _next_data(source: io.BytesIO) -> bytes:
    """The next bytes, without the zeros that may pad streams."""
    while data := source.read(STEP_BYTES):
        if data := data.lstrip(b"\0"):
            return data
    return b""


# Entries --------------------------------------------------------------------------------------------------------------


def _path_of(name: str) -> str:
    """The path of an entry, without './' and a last '/'; empty for the folder itself."""
    path = name.rstrip("/")
    while path.startswith("./"):
        path = path[2:].lstrip("/")
    if path in ("", "."):
        if name.startswith("/"):
            raise bad_archive(f"{name!r} is absolute")
        return ""
    parts = path.split("/")
    if path.startswith("/"):
        raise bad_archive(f"{name[:200]!r} is absolute")
    if "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise bad_archive(f"{name[:200]!r} leads out of the folder, or is not a plain path")
    if len(parts) > MOST_DEPTH + 1:
        raise bad_archive(f"{name[:200]!r} lies in more than {MOST_DEPTH} folders")
    if any(len(part.encode(errors="surrogateescape")) > MOST_NAME_BYTES for part in parts):
        raise bad_archive(f"{name[:200]!r} has too long a name")
    if len(path.encode(errors="surrogateescape")) > MOST_PATH_BYTES:
        raise bad_archive(f"{name[:200]!r} is too long")
    return path


def _entry(tar: tarfile.TarFile, member: tarfile.TarInfo, path: str, before: dict[str, ArchiveEntry]) -> ArchiveEntry:
    if member.mode & 0o6000:
        raise bad_archive(f"{path!r} has the bit setuid or setgid")
    executable = bool(member.mode & 0o111)
    if member.issparse():
        raise bad_archive(f"{path!r} is a sparse file")
    if member.isdir():
        return ArchiveEntry(path=path, kind="folder")
    if member.isreg():
        content = tar.extractfile(member)
        data = content.read() if content is not None else b""
        if len(data) != member.size:
            raise bad_archive(f"{path!r} ends early")
        return ArchiveEntry(path=path, kind="file", content=data, executable=executable)
    if member.issym():
        return ArchiveEntry(path=path, kind="link", target=_target(path, member.linkname))
    if member.islnk():
        earlier = before.get(_path_of(member.linkname))
        if earlier is None or earlier.kind != "file":
            raise bad_archive(f"{path!r} is a hard link to something other than an earlier file of the archive")
        return msgspec.structs.replace(earlier, path=path)
    raise bad_archive(f"{path!r} is a device, a pipe, or of an unknown kind")


def _target(path: str, target: str) -> str:
    """The target of a link, which must lie within the folder that the archive is unpacked to. It must go up first and
    then down: a later '..' would follow other links, and could lead elsewhere."""
    if not target or "\0" in target or len(target.encode(errors="surrogateescape")) > MOST_PATH_BYTES:
        raise bad_archive(f"{path!r} is a link to an impossible target")
    parts = [part for part in target.split("/") if part not in ("", ".")]
    ups = len(list(itertools.takewhile(lambda part: part == "..", parts)))
    if target.startswith("/") or ups > path.count("/") or ".." in parts[ups:]:
        raise bad_archive(f"{path!r} is a link that leads out, to {target[:200]!r}")
    return target


def _consistent(entries: dict[str, ArchiveEntry]) -> list[ArchiveEntry]:
    """The entries, none of which lies below a file or a link."""
    for path in entries:
        above = path
        while "/" in above:
            above = above.rpartition("/")[0]
            if above in entries and entries[above].kind != "folder":
                raise bad_archive(f"{path!r} lies below {above!r}, which is not a folder")
    return list(entries.values())
