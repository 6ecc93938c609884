"""The frames of a log file.

* A frame comes back as it was packed; its payload starts at a multiple of 64 bytes in the file.
* A flipped byte costs at most the frame that it is in: reading goes on at the next frame.
* A control frame is stored twice and survives damage to either copy.
* A torn tail, an append that never finished, is told from damage inside.
* A read is checked against its checksum, and a mismatch names file and offset.
* A file opens with its head: what log it belongs to, where it goes on from, and the live control state at that point.
* A file that was sealed ends with its footer, whose digest covers every frame before it.
* A file of a format that this code does not know is refused, and the format is named.

A frame, little-endian, padded with zeros to a multiple of 64 bytes after the header and after the payload::

    [ "HRLOGFRM" | type u16, copy u16, length u64 | header crc32c u32 | payload crc32c u32 | payload ]

The header's checksum covers the bytes before it. ``control``, ``file_head`` and ``footer`` frames are two such frames
back to back, of copy 0 and 1. That mends flipped bytes; a bad block of the disk that holds both copies of a short frame
loses it, and is reported as damage. Checksums need the package google-crc32c (``headrace[offline]``).
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
"""The version of the format that this code writes, and the only one that it reads."""

HEADER_BYTES = 64
"""Bytes from the start of a frame to its payload."""

_MAGIC = b"HRLOGFRM"
_FIELDS = struct.Struct("<8sHHQ")
_HEADER = struct.Struct(f"<{_FIELDS.size}sII36x")
_CHECKED_BYTES = _FIELDS.size + 2 * 4
"""So much of a header says something; the rest is zeros."""
_SEARCH_BYTES = 1 << 20
"""How much is read at a time while looking for the next frame."""


class FrameType(IntEnum):
    """What a payload is."""

    FILE_HEAD = 1
    """A ``FileHead``. Stored twice."""
    CONTROL = 2
    """Control records. Stored twice."""
    TRAJECTORY = 3
    """One trajectory record, as it was submitted."""
    BATCH = 4
    """A batch's body up to its records."""
    FOOTER = 5
    """A ``Footer``. Stored twice."""


_TWICE = frozenset((FrameType.FILE_HEAD, FrameType.CONTROL, FrameType.FOOTER))
_COPIES = [2 if kind in _TWICE else 1 for kind in range(len(FrameType) + 1)]
"""By type: an index is cheaper than the hash of an enum's member, for each frame that is written."""


class FileHead(msgspec.Struct, frozen=True, kw_only=True):
    """How a file begins.

    ``log``: id of the log, the same in all of its files. ``number``: of this file. ``epoch``: of its writer.
    ``before_bytes``: how much of the file before this one counts; what lies behind that was never acknowledged, and may
    be stored again in this one. ``state``: the live control state at this point; None: the file goes on from the one
    before.
    """

    format: int = FORMAT
    log: str
    number: int
    epoch: int
    before_bytes: int
    state: bytes | None


class Footer(msgspec.Struct, frozen=True, kw_only=True):
    """How a sealed file ends: what is in it, so that nothing of it can be missing unseen.

    ``places``: by frame type, the offsets of its frames in units of 64 bytes, u32 little-endian. ``digest``: SHA-256
    over the headers (of copy 0) of all frames before this one, in order; a header holds its payload's checksum.
    ``opened_ms``, ``sealed_ms``: Unix times in milliseconds at which the file was opened for writing, last, and sealed.
    """

    places: dict[int, bytes]
    digest: bytes
    opened_ms: int
    sealed_ms: int

    def count(self, kind: FrameType) -> int:
        """Frames of that type."""
        return len(self.places.get(kind, b"")) // _PLACE_BYTES

    def offsets(self, kind: FrameType) -> list[int]:
        """Offsets in the file of the frames of that type, in bytes, ascending."""
        places = array("I", self.places.get(kind, b""))
        return [place * ALIGNMENT for place in places]


class Frame(NamedTuple):
    """A whole frame. ``offset`` and ``size`` are in bytes of the file, both copies included; ``checksum`` is the
    payload's. ``recovered``: one copy was damaged."""

    type: FrameType
    offset: int
    size: int
    payload: bytes
    checksum: int
    recovered: bool = False


class Damage(NamedTuple):
    """Bytes that are no frame. ``torn``: they are an append that never finished, at the end of the file, so nobody was
    told that it is stored; cut the file at ``offset`` before appending. ``type`` is known if the header is intact."""

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
    """What a footer says, gathered while the frames are placed or read in order."""

    def __init__(self, opened_ms: int) -> None:
        self.digest = hashlib.sha256()
        """Over the headers that were added."""
        self._opened_ms = opened_ms
        self._places = [array("I") for _ in _COPIES]

    def place(self, kind: FrameType, offset: int) -> None:
        """The next frame, whose header is yet to be made: ``with_digest`` tells the footer of it."""
        self._places[kind].append(offset // ALIGNMENT)

    def add(self, kind: FrameType, offset: int, header: bytes | memoryview) -> None:
        """The next frame, with the 64 bytes of its first header."""
        self.place(kind, offset)
        self.digest.update(header)

    def add_read(self, frame: Frame) -> None:
        """The next frame, as it was read."""
        self.add(frame.type, frame.offset, header_of(frame))

    def footer(self, sealed_ms: int) -> Footer:
        """The footer of the frames so far; ``with_digest`` puts in the digest where they were only placed."""
        return Footer(
            places={kind: places.tobytes() for kind, places in enumerate(self._places) if places},
            digest=self.digest.digest(),
            opened_ms=self._opened_ms,
            sealed_ms=sealed_ms,
        )

    def matches(self, footer: Footer) -> bool:
        """Whether the frames so far are those that the footer speaks of."""
        return self.footer(footer.sealed_ms) == msgspec.structs.replace(footer, opened_ms=self._opened_ms)


def header_of(frame: Frame) -> bytes:
    """The first header of a frame that was read, 64 bytes."""
    return _pack_header(frame.type, 0, len(frame.payload), frame.checksum)


def with_digest(footer: bytes, digest: bytes) -> bytes:
    """A footer's payload with that digest; it stays as long as it was."""
    return _encoder.encode(msgspec.structs.replace(parse_footer(footer), digest=digest))


def pack_frame(kind: FrameType, payload: bytes | memoryview) -> list[bytes | memoryview]:
    """The buffers of a frame, in order, for ``writev``; the first is its header. Raises MissingExtra."""
    checksum = crc32c(bytes(payload))
    length = len(payload)
    padding = (bytes(-length % ALIGNMENT),) if length % ALIGNMENT else ()
    buffers: list[bytes | memoryview] = [_pack_header(kind, 0, length, checksum), payload, *padding]
    if kind in _TWICE:
        buffers += [_pack_header(kind, 1, length, checksum), payload, *padding]
    return buffers


def frame_bytes(kind: FrameType, length: int) -> int:
    """Size in the file of a frame whose payload is that long."""
    return (HEADER_BYTES + padded(length)) * _COPIES[kind]


def parse_head(payload: bytes) -> FileHead:
    """A file's head. Raises UnknownLogFormat, or msgspec.MsgspecError if it is none."""
    found = _format_decoder.decode(payload).format
    if found != FORMAT:
        raise UnknownLogFormat(
            f"The log is of format {found}; this version of Headrace reads format {FORMAT}.",
            hint="Use the version of Headrace that wrote it.",
            format=found,
        )
    return _head_decoder.decode(payload)


def parse_footer(payload: bytes) -> Footer:
    """A file's footer. Raises msgspec.MsgspecError if it is none."""
    return _footer_decoder.decode(payload)


def read_head(stream: BinaryIO) -> FileHead | None:
    """The head of a file, or None where it is damaged or missing. Raises UnknownLogFormat."""
    found = next(scan(stream), None)
    if not isinstance(found, Frame) or found.type is not FrameType.FILE_HEAD or found.offset:
        return None
    return parse_head(found.payload)


def scan(stream: BinaryIO, *, start: int = 0, end: int | None = None) -> Iterator[Frame | Damage]:
    """Everything in a log file, in order: all of it, or from the frame that starts at ``start``, or up to ``end``; both
    are offsets in bytes. The stream must be seekable."""
    size = stream.seek(0, os.SEEK_END)
    end = size if end is None else min(end, size)
    offset = start
    while offset < end:
        header = _header_at(stream, offset)
        if header is None or header.copy:
            found = _resynchronize(stream, offset, end)
        else:
            found = [_frame_at(stream, offset, header, end)]
        for item in found:
            yield item
            offset = item.offset + item.size


def read_payload(descriptor: int, offset: int, length: int, *, name: str) -> bytes:
    """The payload of ``length`` bytes of the frame at ``offset``. Raises CorruptRecord, which names the file."""
    # Two reads: to cut the header off a long frame would copy all of it.
    header = _parse_header(os.pread(descriptor, HEADER_BYTES, offset))
    payload = os.pread(descriptor, length, offset + HEADER_BYTES)
    problem = ""
    if header is None:
        problem = "there is no frame header"
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
    """Whether the bytes that fill a frame up, which no checksum covers, are as they were written."""
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
    """What heads of all formats have."""

    format: int


_PLACE_BYTES = array("I").itemsize
_format_decoder = msgspec.msgpack.Decoder(_Format)
_head_decoder = msgspec.msgpack.Decoder(FileHead)
_encoder = msgspec.msgpack.Encoder()
_footer_decoder = msgspec.msgpack.Decoder(Footer)


def crc32c(data: bytes) -> int:
    """CRC-32C of the bytes. Raises MissingExtra."""
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
    fields = _FIELDS.pack(_MAGIC, kind, copy, length)
    return _HEADER.pack(fields, crc32c(fields), checksum)


def _frame_at(stream: BinaryIO, offset: int, header: _Header, end: int) -> Frame | Damage:
    """The frame whose intact first header is at ``offset``."""
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
    """What is at ``start``, where no frame begins: damage up to the next frame, or the second copy of a control frame
    whose first header is gone."""
    for offset in _magic_offsets(stream, start + ALIGNMENT, end):
        header = _header_at(stream, offset)
        if header is None:
            continue
        if header.copy == 0:
            return [Damage(start, offset - start, "there is no frame header")]
        first = offset - header.copy_size
        payload = _payload_at(stream, offset, header) if first >= start else None
        if payload is not None:
            frame = Frame(header.type, first, header.size, payload, header.payload_crc, recovered=True)
            return [frame] if first == start else [Damage(start, first - start, "there is no frame header"), frame]
    # An append writes whole frames of whole blocks: an odd length or nothing but zeros is one that never finished.
    torn = end % ALIGNMENT != 0 or not any(any(block) for block in _blocks(stream, start, end))
    problem = "the file ends inside a frame" if torn else "there is no frame header"
    return [Damage(start, end - start, problem, torn=torn)]


def _magic_offsets(stream: BinaryIO, start: int, end: int) -> Iterator[int]:
    """Aligned positions in [start, end) that begin like a frame."""
    base = start
    for block in _blocks(stream, start, end):
        at = block.find(_MAGIC)
        while at >= 0:
            if at % ALIGNMENT == 0:
                yield base + at
            at = block.find(_MAGIC, at + 1)
        base += len(block)


def _blocks(stream: BinaryIO, start: int, end: int) -> Iterator[bytes]:
    for offset in range(start, end, _SEARCH_BYTES):
        stream.seek(offset)
        yield stream.read(min(_SEARCH_BYTES, end - offset))


def _header_at(stream: BinaryIO, offset: int) -> _Header | None:
    stream.seek(offset)
    return _parse_header(stream.read(HEADER_BYTES))


def _parse_header(raw: bytes) -> _Header | None:
    """The header, or None if these bytes are none or damaged."""
    if len(raw) < HEADER_BYTES:
        return None
    fields, header_crc, payload_crc = _HEADER.unpack_from(raw)
    magic, kind, copy, length = _FIELDS.unpack(fields)
    if magic != _MAGIC or crc32c(fields) != header_crc or kind not in FrameType._value2member_map_:
        return None
    return _Header(FrameType(kind), copy, length, payload_crc)


def _payload_at(stream: BinaryIO, offset: int, header: _Header) -> bytes | None:
    """The payload of the copy at ``offset``, or None if it is damaged or cut short."""
    stream.seek(offset + HEADER_BYTES)
    payload = stream.read(header.length)
    return payload if len(payload) == header.length and crc32c(payload) == header.payload_crc else None
