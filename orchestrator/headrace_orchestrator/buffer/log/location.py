"""Locations of frames in the log."""

from __future__ import annotations

from typing import NamedTuple

OFFSET_BITS = 40
"""Bits of a position that hold the offset in its file: files are far smaller than a tebibyte."""


class Location(NamedTuple):
    """The location of a payload: number of the file, offset of its frame, length of the payload in bytes."""

    file: int
    offset: int
    length: int

    @property
    def position(self) -> int:
        """A single number that grows along the log."""
        return self.file << OFFSET_BITS | self.offset

    @classmethod
    def from_position(cls, position: int, length: int) -> Location:
        """The location of a payload of this length whose frame begins at a position."""
        return cls(position >> OFFSET_BITS, position & ((1 << OFFSET_BITS) - 1), length)


def start_of(file: int) -> int:
    """The position at which a file begins."""
    return file << OFFSET_BITS


def file_at(position: int) -> int:
    """The number of the file that a position is in."""
    return position >> OFFSET_BITS
