"""Progress of long operations on a data directory."""

from __future__ import annotations

from collections.abc import Callable

OnProgress = Callable[[int, int], None]
"""Called with the bytes done so far and the total."""
