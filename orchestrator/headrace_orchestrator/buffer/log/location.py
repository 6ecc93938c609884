"""Where a frame is in the log."""

from __future__ import annotations

from typing import NamedTuple

OFFSET_BITS = 40
"""Bits of a position that hold the offset in its file: files are far smaller than a tebibyte."""


class Location(NamedTuple):
    """Where a payload is: number of the file, offset of its frame, length of the payload in bytes."""

    file: int
    offset: int
    length: int

    @property
    def position(self) -> int:
        """One number that grows along the log."""
        return self.file << OFFSET_BITS | self.offset

    @classmethod
    def at(cls, position: int, length: int) -> Location:
        return cls(position >> OFFSET_BITS, position & ((1 << OFFSET_BITS) - 1), length)
