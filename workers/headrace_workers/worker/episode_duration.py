"""Usual duration of a worker's episodes, which sets how long requests are gathered into batches.

* The gathering time is a share of the usual duration, up to a limit: a request for many costs about as much as for one.
* The usual duration follows recent episodes; before the first one has ended it is zero, and nothing is gathered.
"""

from __future__ import annotations

WEIGHT = 1 / 16
"""Weight of the latest episode in the moving average."""


class EpisodeDuration:
    """Moving average of the duration of episodes, in seconds."""

    def __init__(self) -> None:
        self._usual_s: float | None = None

    def add(self, took_s: float) -> None:
        """Add the duration of an episode."""
        before_s = took_s if self._usual_s is None else self._usual_s
        self._usual_s = before_s + WEIGHT * (took_s - before_s)

    def share_s(self, share: float, longest_s: float) -> float:
        """Return a share of the usual duration, up to ``longest_s``."""
        return min(share * (self._usual_s or 0.0), longest_s)
