"""A module whose import takes half a second of CPU time."""

from __future__ import annotations

from tests.workers.bounded_calls.work import compute

compute(0.5)


def answer() -> int:
    """Return at once."""
    return 42
