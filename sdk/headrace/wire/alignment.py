"""Where things begin in records, frames and bodies."""

from __future__ import annotations

ALIGNMENT = 64
"""Bytes. A cache line, and as much as any vector instruction asks for."""


def padded(size: int) -> int:
    """The next multiple of ``ALIGNMENT``."""
    return size + -size % ALIGNMENT
