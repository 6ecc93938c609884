"""The frames of a log file.

* A frame is read as it was packed; its payload starts at a multiple of 64 bytes in the file.
* A flipped byte affects at most the frame that it is in: reading continues at the next frame.
* A control frame is stored twice and survives damage to either copy.
* A torn tail, from an append that never finished, is distinguished from damage.
* A read is checked against its checksum, and a mismatch names file and offset.
* A file begins with its head: the log that it belongs to, the point where it continues, and the control state there.
* A sealed file ends with its footer, whose digest covers every frame before it.
* A file of an unknown format is refused, and the error names the format.

A frame, little-endian, padded with zeros to a multiple of 64 bytes after the header and after the payload::

    [ "HRLOGFRM" | type u16, copy u16, length u64 | header crc32c u32 | payload crc32c u32 | payload ]

The header's checksum covers the bytes before it. ``control``, ``file_head`` and ``footer`` frames are two such frames
back to back, with copy 0 and 1. This repairs flipped bytes. A bad disk block that holds both copies of a short frame
loses the frame, and is reported as damage. Checksums need the package google-crc32c (``headrace[offline]``).
"""

from __future__ import annotations

import functools
import hashlib
import os
import struct
from array import array
from collections.abc import Callable, Iterator
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import msgspec

from headrace.errors import CorruptRecord, MissingExtra, UnknownLogFormat
from headrace.wire.alignment import ALIGNMENT, padded

FORMAT = 1
"""The format version that this code writes, and the only one that it reads."""

HEADER_BYTES = 64
"""Bytes from the start of a frame to its payload."""

MAGIC = b"HRLOGFRM"
_FIELDS = struct.Struct("<8sHHQ")
_HEADER = struct.Struct(f"<{_FIELDS.size}sII36x")
_CHECKED_BYTES = _FIELDS.size + 2 * 4
"""Used bytes of a header; the rest is zeros."""
_SEARCH_BYTES = 1 << 20
"""Bytes read at a time in the search for the next frame."""


class FrameType(IntEnum):
    """The content of a frame's payload."""

    FILE_HEAD = 1
    """A ``FileHead``. Stored twice."""
    CONTROL = 2
    """Scheduler events. Stored twice."""
    TRAJECTORY = 3
    """A trajectory record as it was submitted."""
    BATCH = 4
    """The body of a batch up to its records."""
    FOOTER = 5
    """A ``Footer``. Stored twice."""


_TWICE = frozenset((FrameType.FILE_HEAD, FrameType.CONTROL, FrameType.FOOTER))
_COPIES = [2 if kind in _TWICE else 1 for kind in range(len(FrameType) + 1)]
"""Number of copies by type. A list is used because indexing is cheaper than hashing an enum member."""


class FileHead(msgspec.Struct, frozen=True, kw_only=True):
    """The first frame of a file.

    ``log``: id of the log, the same in all of its files. ``number``: number of this file. ``epoch``: epoch of its
    writer. ``before_bytes``: valid bytes of the previous file; the bytes after them were never acknowledged, and may be
    stored again in this file. ``state``: the control state at this point; None: the file continues the previous one.
    """

    format: int = FORMAT
    log: str
    number: int
    epoch: int
    before_bytes: int
    state: bytes | None


class Footer(msgspec.Struct, frozen=True, kw_only=True):
    """The last frame of a sealed file: an index of its frames, so that a missing frame is detected.

    ``places``: by frame type, the offsets of its frames in units of 64 bytes, u32 little-endian. ``digest``: SHA-256
    over the headers (of copy 0) of all frames before this one, in order; a header holds its payload's checksum.
    ``opened_ms``, ``sealed_ms``: Unix times in milliseconds when the file was last opened for writing, and sealed.
    """

    places: dict[int, bytes]
    digest: bytes
    opened_ms: int
    sealed_ms: int


class Frame(NamedTuple):
    """A complete frame. ``offset`` and ``size`` are in bytes and include both copies; ``checksum`` is the payload's.
    ``recovered``: one copy was damaged."""

    type: FrameType
    offset: int
    size: int
    payload: bytes
    checksum: int
    recovered: bool = False


class Damage(NamedTuple):
    """Bytes that are not a frame.

    ``torn``: an append at the end of the file that never finished, and so was never acknowledged; truncate the file to
    ``offset`` before appending. ``type`` is known if the header is intact.
    """

    offset: int
    size: int
    problem: str
    torn: bool = False
    type: FrameType | None = None


class _Header(NamedTuple):
    type: FrameType
    copy: int
    length: int
    payload_crc: int

    @property
    def copy_size(self) -> int:
        return HEADER_BYTES + padded(self.length)

    @property
    def size(self) -> int:
        return self.copy_size * _COPIES[self.type]


class FooterBuilder:
    """Builds a footer while frames are placed or read in order."""

    def __init__(self, opened_ms: int) -> None:
        self.digest = hashlib.sha256()
        """Digest of the added headers."""
        self._opened_ms = opened_ms
        self._places = [array("I") for _ in _COPIES]

    def place(self, kind: FrameType, offset: int) -> None:
        """Add the next frame, whose header does not exist yet; ``with_digest`` completes the footer later."""
        self._places[kind].append(offset // ALIGNMENT)

    def add(self, kind: FrameType, offset: int, header: bytes | memoryview) -> None:
        """Add the next frame, with the 64 bytes of its first header."""
        self.place(kind, offset)
        self.digest.update(header)

    def add_read(self, frame: Frame) -> None:
        """Add the next frame that was read."""
        self.add(frame.type, frame.offset, header_of(frame))

    def footer(self, sealed_ms: int) -> Footer:
        """The footer of the frames so far; if they were only placed, ``with_digest`` sets the digest."""
        return Footer(
            places={kind: places.tobytes() for kind, places in enumerate(self._places) if places},
            digest=self.digest.digest(),
            opened_ms=self._opened_ms,
            sealed_ms=sealed_ms,
        )

    def matches(self, footer: Footer) -> bool:
        """True if the footer describes the frames so far."""
        return self.footer(footer.sealed_ms) == msgspec.structs.replace(footer, opened_ms=self._opened_ms)


def header_of(frame: Frame) -> bytes:
    """The first header of a frame, 64 bytes."""
    return _pack_header(frame.type, 0, len(frame.payload), frame.checksum)


def with_digest(footer: bytes, digest: bytes) -> bytes:
    """Set the digest in a footer's payload; its size does not change."""
    return _encoder.encode(msgspec.structs.replace(parse_footer(footer), digest=digest))


def pack_frame(kind: FrameType, payload: bytes | memoryview) -> list[bytes | memoryview]:
    """The buffers of a frame in order, for ``writev``; the first is its header. Raises MissingExtra."""
    checksum = crc32c(bytes(payload))
    length = len(payload)
    padding = (bytes(-length % ALIGNMENT),) if length % ALIGNMENT else ()
    buffers: list[bytes | memoryview] = [_pack_header(kind, 0, length, checksum), payload, *padding]
    if kind in _TWICE:
        buffers += [_pack_header(kind, 1, length, checksum), payload, *padding]
    return buffers


def frame_bytes(kind: FrameType, length: int) -> int:
    """Size in bytes in the file of a frame with a payload of ``length`` bytes."""
    return (HEADER_BYTES + padded(length)) * _COPIES[kind]


def parse_head(payload: bytes) -> FileHead:
    """Decode a file's head. Raises UnknownLogFormat, or msgspec.MsgspecError if it is invalid."""
    number = _format_decoder.decode(payload).format
    if number != FORMAT:
        raise UnknownLogFormat(
            f"The log has format {number}; this version of Headrace reads format {FORMAT}.",
            hint="Use the version of Headrace that wrote it.",
            format=number,
        )
    return _head_decoder.decode(payload)


def parse_footer(payload: bytes) -> Footer:
    """Decode a file's footer. Raises msgspec.MsgspecError if it is invalid."""
    return _footer_decoder.decode(payload)


def read_head(stream: BinaryIO) -> FileHead | None:
    """Read the head of a file; None if it is damaged or missing. Raises UnknownLogFormat."""
    first = next(scan(stream), None)
    if not isinstance(first, Frame) or first.type is not FrameType.FILE_HEAD or first.offset:
        return None
    return parse_head(first.payload)


def scan(stream: BinaryIO, *, start: int = 0, end: int | None = None) -> Iterator[Frame | Damage]:
    """All frames and damage in a log file, in order, from the frame at offset ``start`` up to offset ``end``, in bytes.

    The stream must be seekable.
    """
    size = stream.seek(0, os.SEEK_END)
    end = size if end is None else min(end, size)
    offset = start
    while offset < end:
        header = _header_at(stream, offset)
        if header is None or header.copy:
            items = _resynchronize(stream, offset, end)
        else:
            items = [_frame_at(stream, offset, header, end)]
        for item in items:
            yield item
            offset = item.offset + item.size


def read_payload(descriptor: int, offset: int, length: int, *, name: str) -> bytes:
    """Read the payload of ``length`` bytes of the frame at ``offset``. Raises CorruptRecord, which names the file."""
    # Two reads, since slicing the header off a long frame would copy the payload.
    header = _parse_header(os.pread(descriptor, HEADER_BYTES, offset))
    payload = os.pread(descriptor, length, offset + HEADER_BYTES)
    problem = ""
    if header is None:
        problem = "the frame header is missing"
    elif header.length != length or len(payload) != length:
        problem = f"it has {min(header.length, len(payload))} bytes, not {length}"
    elif crc32c(payload) != header.payload_crc:
        problem = "its checksum does not match"
    if problem:
        raise CorruptRecord(
            f"The record at offset {offset} of {name} is damaged: {problem}.",
            hint="Only this record is lost. `headrace fsck` lists all damage.",
            file=name,
            offset=offset,
        )
    return payload


def is_padded_with_zeros(path: Path, frame: Frame) -> bool:
    """True if the padding of a frame, which no checksum covers, is all zeros."""
    size = frame.size // (2 if frame.type in _TWICE else 1)
    begin, end = _CHECKED_BYTES, HEADER_BYTES + len(frame.payload)
    with open(path, "rb", buffering=0) as stream:
        for copy in range(frame.offset, frame.offset + frame.size, size):
            for start, stop in ((begin, HEADER_BYTES), (end, size)):
                stream.seek(copy + start)
                if any(stream.read(stop - start)):
                    return False
    return True


class _Format(msgspec.Struct, frozen=True):
    """The field that heads of all formats have."""

    format: int


_format_decoder = msgspec.msgpack.Decoder(_Format)
_head_decoder = msgspec.msgpack.Decoder(FileHead)
_encoder = msgspec.msgpack.Encoder()
_footer_decoder = msgspec.msgpack.Decoder(Footer)


def crc32c(data: bytes) -> int:
    """The CRC-32C of the bytes. Raises MissingExtra."""
    return _checksum()(data)


@functools.cache
def _checksum() -> Callable[[bytes], int]:
    try:
        import google_crc32c
    except ImportError as error:
        raise MissingExtra(
            "The log format needs the package google-crc32c.", hint="Run: pip install headrace[offline]"
        ) from error
    return cast("Callable[[bytes], int]", google_crc32c.value)


def _pack_header(kind: FrameType, copy: int, length: int, checksum: int) -> bytes:
    fields = _FIELDS.pack(MAGIC, kind, copy, length)
    return _HEADER.pack(fields, crc32c(fields), checksum)


def _frame_at(stream: BinaryIO, offset: int, header: _Header, end: int) -> Frame | Damage:
    """Read the frame whose intact first header is at ``offset``."""
    if offset + header.size > end:
        return Damage(offset, end - offset, "the file ends inside a frame", torn=True, type=header.type)
    payload = _payload_at(stream, offset, header)
    if payload is not None:
        recovered = not _second_is_intact(stream, offset, header)
        return Frame(header.type, offset, header.size, payload, header.payload_crc, recovered)
    if header.type in _TWICE:
        second = _header_at(stream, offset + header.copy_size)
        if second is not None and (payload := _payload_at(stream, offset + header.copy_size, second)) is not None:
            return Frame(header.type, offset, header.size, payload, second.payload_crc, recovered=True)
    return Damage(offset, header.size, "the payload's checksum does not match", type=header.type)


def _second_is_intact(stream: BinaryIO, offset: int, header: _Header) -> bool:
    if header.type not in _TWICE:
        return True
    second = _header_at(stream, offset + header.copy_size)
    return second is not None and _payload_at(stream, offset + header.copy_size, second) is not None


def _resynchronize(stream: BinaryIO, start: int, end: int) -> list[Frame | Damage]:
    """Find the next frame after ``start``, where no frame begins.

    Returns the damage before it, or a control frame whose first header is damaged.
    """
    for offset in _magic_offsets(stream, start + ALIGNMENT, end):
        header = _header_at(stream, offset)
        if header is None:
            continue
        if header.copy == 0:
            return [Damage(start, offset - start, "the frame header is missing")]
        first = offset - header.copy_size
        payload = _payload_at(stream, offset, header) if first >= start else None
        if payload is not None:
            frame = Frame(header.type, first, header.size, payload, header.payload_crc, recovered=True)
            return [frame] if first == start else [Damage(start, first - start, "the frame header is missing"), frame]
    # An append writes complete frames of complete blocks: an odd length, or only zeros, is an unfinished append.
    torn = end % ALIGNMENT != 0 or not any(any(block) for block in _blocks(stream, start, end))
    problem = "the file ends inside a frame" if torn else "the frame header is missing"
    return [Damage(start, end - start, problem, torn=torn)]


def _magic_offsets(stream: BinaryIO, start: int, end: int) -> Iterator[int]:
    """Aligned offsets in [start, end) with the magic of a frame."""
    base = start
    for block in _blocks(stream, start, end):
        at = block.find(MAGIC)
        while at >= 0:
            if at % ALIGNMENT == 0:
                yield base + at
            at = block.find(MAGIC, at + 1)
        base += len(block)


def _blocks(stream: BinaryIO, start: int, end: int) -> Iterator[bytes]:
    for offset in range(start, end, _SEARCH_BYTES):
        stream.seek(offset)
        yield stream.read(min(_SEARCH_BYTES, end - offset))


def _header_at(stream: BinaryIO, offset: int) -> _Header | None:
    stream.seek(offset)
    return _parse_header(stream.read(HEADER_BYTES))


def _parse_header(raw: bytes) -> _Header | None:
    """Parse a header; None if it is missing or damaged."""
    if len(raw) < HEADER_BYTES:
        return None
    fields, header_crc, payload_crc = _HEADER.unpack_from(raw)
    magic, kind, copy, length = _FIELDS.unpack(fields)
    if magic != MAGIC or crc32c(fields) != header_crc or kind not in FrameType._value2member_map_:
        return None
    return _Header(FrameType(kind), copy, length, payload_crc)


def _payload_at(stream: BinaryIO, offset: int, header: _Header) -> bytes | None:
    """Read the payload of the copy at ``offset``; None if it is damaged or truncated."""
    stream.seek(offset + HEADER_BYTES)
    payload = stream.read(header.length)
    return payload if len(payload) == header.length and crc32c(payload) == header.payload_crc else None
