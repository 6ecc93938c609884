"""Archives that nobody trusts: read into plain entries, or refused whole.

* Refused are absolute paths, paths and links that lead out, devices, pipes, sparse files, the bits setuid and setgid,
  names that cannot be, more entries or bytes than are allowed, and what grows too much when it is unpacked.
* Nothing is written here, and no more is unpacked than is allowed.
* Reading takes time by the size of an archive alone: not by into how many streams it was packed, nor by how its headers
  are nested.
* Of what a tar says of an entry, only its path, kind, content, target and whether it is executable are taken.
* A hard link to an earlier file of the archive is that file's content once more; any other is refused.
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
"""How much larger an archive may be unpacked than packed; text packs by 3 to 10, and zeros by 1,000."""

FREE_BYTES = 1 << 20
"""An archive that is no larger than this unpacked may have packed as well as it could."""

BLOCK_BYTES = 512
"""Of tar: an entry has a header of at least one, and its content is filled up to whole ones."""

HEADERS_BYTES = 8 * BLOCK_BYTES
"""Of one entry: longer names and numbers have headers of their own."""

MOST_PATH_BYTES, MOST_NAME_BYTES, MOST_DEEP = 4000, 255, 100

STEP_BYTES = 256 << 10

MOST_STREAMS = 10_000
"""One after the other, as some tools pack in blocks; each costs a step."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One entry. ``path`` is relative, without '.' and '..'. ``target`` is that of a link, relative to its folder."""

    path: str
    kind: EntryKind
    content: bytes = b""
    executable: bool = False
    target: str = ""


def entries_of(archive: bytes, most_bytes: int, most_entries: int = MOST_ENTRIES) -> list[Entry]:
    """What a tar archive holds; it may be packed by gzip, bzip2 or xz. ``most_bytes``: of all files together. Raises
    SandboxFailure ``bad-archive`` or ``archive-too-large``."""
    plain = _unpacked(archive, most_bytes + most_entries * HEADERS_BYTES + 20 * BLOCK_BYTES)
    entries: dict[str, Entry] = {}
    total, count = 0, 0
    try:
        with tarfile.open(fileobj=io.BytesIO(plain), mode="r:", errorlevel=1) as tar:
            while (member := tar.next()) is not None:
                count += 1
                total += member.size if member.isreg() else 0
                if count > most_entries:
                    raise too_large(f"more than {most_entries} entries")
                if total > most_bytes:
                    raise too_large(f"more than {most_bytes} bytes")
                path = _path_of(member.name)
                if path:
                    entries[path] = _entry(tar, member, path, entries)
                    total += len(entries[path].content) if member.islnk() else 0
    except (tarfile.TarError, ValueError, OverflowError, EOFError, UnicodeError, RecursionError) as error:
        raise bad(f"it cannot be read: {error}") from error
    if total > most_bytes:
        raise too_large(f"more than {most_bytes} bytes")
    return _consistent(entries)


def tar_of(entries: Sequence[Entry]) -> bytes:
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


def listed(entries: Sequence[Entry]) -> tuple[list[dict[str, Any]], bytes]:
    """As ``guest/files.py`` takes them: a list without content, and all content."""
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


def from_listed(packed: bytes) -> list[Entry]:
    """From what ``guest/files.py`` gives: a line with the list, then all content. It comes out of a sandbox, so it is
    not believed. Raises SandboxFailure ``bad-archive``."""
    line, _, content = packed.partition(b"\n")
    entries, at = {}, 0
    try:
        for item in json.loads(line):
            path = _path_of(str(item["path"]).encode(errors="replace").decode())
            size = int(item["size_bytes"])
            if not path or item["kind"] not in ("file", "folder") or not 0 <= size <= len(content) - at:
                raise bad("its list is wrong")
            entries[path] = Entry(
                path=path, kind=item["kind"], content=content[at : at + size], executable=bool(item["executable"])
            )
            at += size
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise bad(f"its list cannot be read: {error}") from error
    return list(entries.values())


def bad(why: str) -> SandboxFailure:
    """The failure of an archive that is refused."""
    return SandboxFailure(f"The archive is refused: {why}.", kind="bad-archive", retryable=False)


def too_large(what: str) -> SandboxFailure:
    """The failure of an archive that is too large."""
    return SandboxFailure(f"The archive is refused: it has {what}.", kind="archive-too-large", retryable=False)


# Packed archives ------------------------------------------------------------------------------------------------------


class _Unpacker(Protocol):
    """Of the standard library."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int = -1, /) -> bytes: ...


class _Gzip:
    """The one of zlib, with the interface of the others."""

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


PACKERS: tuple[tuple[bytes, Callable[[], _Unpacker]], ...] = (
    (b"\x1f\x8b", _Gzip),
    (b"BZh", bz2.BZ2Decompressor),
    (b"\xfd7zXZ\x00", lzma.LZMADecompressor),
)
"""By how they begin."""


def _unpacked(archive: bytes, most_bytes: int) -> bytes:
    make = next((make for magic, make in PACKERS if archive.startswith(magic)), None)
    if make is None:
        if len(archive) > most_bytes:
            raise too_large(f"{len(archive)} bytes")
        return archive
    bound = min(most_bytes, max(FREE_BYTES, MOST_RATIO * len(archive)))
    found, streams = bytearray(), 0
    source = io.BytesIO(archive)
    try:
        while data := _filled(source):
            streams += 1
            if streams > MOST_STREAMS:
                raise bad(f"it is packed into more than {MOST_STREAMS} streams")
            unpacker = make()
            while not unpacker.eof:
                piece = unpacker.decompress(data, STEP_BYTES)
                found += piece
                if len(found) > bound:
                    raise too_large(f"more than {bound} bytes unpacked, from {len(archive)}")
                data = b"" if piece or unpacker.eof else source.read(STEP_BYTES)
                if not piece and not data and not unpacker.eof:
                    raise bad("it ends early")
            source.seek(-len(unpacker.unused_data), io.SEEK_CUR)
    except (zlib.error, OSError, lzma.LZMAError, EOFError) as error:
        raise bad(f"it cannot be unpacked: {error}") from error
    return bytes(found)


def _filled(source: io.BytesIO) -> bytes:
    """The next bytes, without the zeros that streams may be filled up with."""
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
            raise bad(f"{name!r} is absolute")
        return ""
    parts = path.split("/")
    if path.startswith("/"):
        raise bad(f"{name[:200]!r} is absolute")
    if "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise bad(f"{name[:200]!r} leads out of the folder, or is no plain path")
    if len(parts) > MOST_DEEP + 1:
        raise bad(f"{name[:200]!r} lies in more than {MOST_DEEP} folders")
    if any(len(part.encode(errors="surrogateescape")) > MOST_NAME_BYTES for part in parts):
        raise bad(f"{name[:200]!r} has too long a name")
    if len(path.encode(errors="surrogateescape")) > MOST_PATH_BYTES:
        raise bad(f"{name[:200]!r} is too long")
    return path


def _entry(tar: tarfile.TarFile, member: tarfile.TarInfo, path: str, before: dict[str, Entry]) -> Entry:
    if member.mode & 0o6000:
        raise bad(f"{path!r} has the bit setuid or setgid")
    executable = bool(member.mode & 0o111)
    if member.issparse():
        raise bad(f"{path!r} is a sparse file")
    if member.isdir():
        return Entry(path=path, kind="folder")
    if member.isreg():
        content = tar.extractfile(member)
        data = content.read() if content is not None else b""
        if len(data) != member.size:
            raise bad(f"{path!r} ends early")
        return Entry(path=path, kind="file", content=data, executable=executable)
    if member.issym():
        return Entry(path=path, kind="link", target=_target(path, member.linkname))
    if member.islnk():
        earlier = before.get(_path_of(member.linkname))
        if earlier is None or earlier.kind != "file":
            raise bad(f"{path!r} is a hard link to what is no earlier file of the archive")
        return msgspec.structs.replace(earlier, path=path)
    raise bad(f"{path!r} is a device, a pipe, or of an unknown kind")


def _target(path: str, target: str) -> str:
    """The target of a link, which is within the folder that the archive is unpacked to. It goes up first and then down:
    whoever goes up again from another link may be elsewhere than it looks."""
    if not target or "\0" in target or len(target.encode(errors="surrogateescape")) > MOST_PATH_BYTES:
        raise bad(f"{path!r} is a link to nothing that can be")
    parts = [part for part in target.split("/") if part not in ("", ".")]
    ups = len(list(itertools.takewhile(lambda part: part == "..", parts)))
    if target.startswith("/") or ups > path.count("/") or ".." in parts[ups:]:
        raise bad(f"{path!r} is a link that leads out, to {target[:200]!r}")
    return target


def _consistent(entries: dict[str, Entry]) -> list[Entry]:
    """Nothing lies below a file or a link."""
    for path in entries:
        above = path
        while "/" in above:
            above = above.rpartition("/")[0]
            if above in entries and entries[above].kind != "folder":
                raise bad(f"{path!r} lies below {above!r}, which is no folder")
    return list(entries.values())
