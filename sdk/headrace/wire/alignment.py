"""Alignment of the parts of records, frames and bodies."""

from __future__ import annotations

ALIGNMENT = 64
"""Alignment in bytes: a cache line, and enough for any vector instruction."""


def padded(size: int) -> int:
    """``size`` rounded up to a multiple of ``ALIGNMENT``."""
    return size + -size % ALIGNMENT
