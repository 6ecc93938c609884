"""Compact storage of the locations of a group's records: a service may hold millions of them.

* A group's records come back by their ids, in the order in which they were stored.
* A record takes some 30 bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from headrace_orchestrator.buffer.log.location import Location, file_at
from headrace_orchestrator.buffer.log.log import Relocations

_ENTRY = struct.Struct("<QIi")
"""Position, length in bytes, and the bytes of the id that follows as text; ``_UUID`` for an id of 16 bytes."""

_UUID = -1
_UUID_BYTES, _UUID_CHARS = 16, 36


class GroupLocations:
    """A group in flight: the number of episodes that it was admitted with, and the locations of its usable records."""

    __slots__ = ("expected", "packed")

    def __init__(self, expected: int, packed: bytes = b"") -> None:
        self.expected = expected
        self.packed = packed

    def add(self, trajectory: str, location: Location) -> None:
        """Add a stored record."""
        short = _uuid(trajectory)
        name = short or trajectory.encode()
        size = _UUID if short else len(name)
        self.packed += _ENTRY.pack(location.position, location.length, size) + name

    @property
    def first_file(self) -> int:
        """The file of the first record, which is the oldest: records are stored, and relocated, in order. The group
        must have a record."""
        position, _, _ = _ENTRY.unpack_from(self.packed)
        return file_at(position)

    def files(self) -> Iterator[int]:
        """The file of each record."""
        packed, start = self.packed, 0  # a copy of the reference, for another thread may change the attribute
        while start < len(packed):
            position, _, size = _ENTRY.unpack_from(packed, start)
            yield file_at(position)
            start += _ENTRY.size + (_UUID_BYTES if size == _UUID else size)

    def relocate(self, relocations: Relocations) -> None:
        """Update the locations of records that moved."""
        moved = [(id, relocations.get(location.position, location)) for id, location in self]
        self.packed = b""
        for id, location in moved:
            self.add(id, location)

    def __iter__(self) -> Iterator[tuple[str, Location]]:
        # Local names: forming a batch reads every location of its groups, which takes a third of its time.
        packed, unpack, entry_bytes = self.packed, _ENTRY.unpack_from, _ENTRY.size
        start = 0
        while start < len(packed):
            position, length, size = unpack(packed, start)
            start += entry_bytes
            end = start + (_UUID_BYTES if size == _UUID else size)
            name = packed[start:end]
            yield _text(name) if size == _UUID else name.decode(), Location.from_position(position, length)
            start = end

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GroupLocations) and (self.expected, self.packed) == (other.expected, other.packed)

    __hash__ = None  # type: ignore[assignment]  # it is mutable


def _uuid(id: str) -> bytes:
    """The 16 bytes of an id that is a UUID in Headrace's spelling; empty for any other id."""
    if len(id) != _UUID_CHARS or id[8:24:5] != "----":
        return b""
    digits = id.replace("-", "")
    try:
        short = bytes.fromhex(digits)
    except ValueError:
        return b""
    return short if len(short) == _UUID_BYTES and short.hex() == digits else b""


def _text(uuid: bytes) -> str:
    text = uuid.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
