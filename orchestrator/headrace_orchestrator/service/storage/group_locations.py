"""Where the records of a group are, in few bytes: a service may hold millions of them.

* A group's records come back by their ids, in the order in which they were stored.
* A record takes some 30 bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from headrace_orchestrator.buffer.log.location import Location
from headrace_orchestrator.buffer.log.log import Relocations

_ENTRY = struct.Struct("<QIi")
"""Position, length in bytes, and bytes of the id that follows as text; ``_UUID`` for an id of 16 bytes."""

_UUID = -1
_UUID_BYTES, _UUID_CHARS = 16, 36


class GroupLocations:
    """A group in flight: how many episodes it was admitted with, and the places of its usable records."""

    __slots__ = ("expected", "packed")

    def __init__(self, expected: int, packed: bytes = b"") -> None:
        self.expected = expected
        self.packed = packed

    def add(self, trajectory: str, location: Location) -> None:
        """A record was stored."""
        short = _uuid(trajectory)
        name = short or trajectory.encode()
        size = _UUID if short else len(name)
        self.packed += _ENTRY.pack(location.position, location.length, size) + name

    @property
    def first_file(self) -> int:
        """The file of the first record, which is the oldest: records are stored, and moved, in order. There is one."""
        position, length, _ = _ENTRY.unpack_from(self.packed)
        return Location.at(position, length).file

    def files(self) -> Iterator[int]:
        """The file of each record."""
        packed, start = self.packed, 0  # which another thread may change
        while start < len(packed):
            position, length, size = _ENTRY.unpack_from(packed, start)
            yield Location.at(position, length).file
            start += _ENTRY.size + (_UUID_BYTES if size == _UUID else size)

    def move(self, moves: Relocations) -> None:
        """Records were stored elsewhere than was meant."""
        moved = [(id, moves.get(at.position, at)) for id, at in self]
        self.packed = b""
        for id, at in moved:
            self.add(id, at)

    def __iter__(self) -> Iterator[tuple[str, Location]]:
        start = 0
        while start < len(self.packed):
            position, length, size = _ENTRY.unpack_from(self.packed, start)
            start += _ENTRY.size
            end = start + (_UUID_BYTES if size == _UUID else size)
            name = self.packed[start:end]
            yield _text(name) if size == _UUID else name.decode(), Location.at(position, length)
            start = end

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GroupLocations) and (self.expected, self.packed) == (other.expected, other.packed)

    __hash__ = None  # type: ignore[assignment]  # it changes


def _uuid(id: str) -> bytes:
    """The 16 bytes of an id that is a UUID as Headrace writes them; nothing for any other."""
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
