"""How long the episodes of a worker take, and so how long what ends may wait for company.

* What waits is a share of an episode's usual time, up to a bound: a request for many costs about as much as for one.
* The usual time follows the last episodes; before the first one has add there is none, and nothing waits.
"""

from __future__ import annotations

WEIGHT = 1 / 16
"""Share of the latest episode in the usual time."""


class EpisodeDuration:
    """The usual time of an episode, in seconds."""

    def __init__(self) -> None:
        self._usual_s: float | None = None

    def add(self, took_s: float) -> None:
        """An episode took so long."""
        before_s = took_s if self._usual_s is None else self._usual_s
        self._usual_s = before_s + WEIGHT * (took_s - before_s)

    def share_s(self, share: float, longest_s: float) -> float:
        """A share of the usual time, up to ``longest_s``."""
        return min(share * (self._usual_s or 0.0), longest_s)
