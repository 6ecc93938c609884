"""Versions of a run's policy: lineages, and how far behind a version is.

* Rows may carry versions that were announced, or the next one; a learner loads weights and then announces them, so rows
  that are sampled in between carry the next version before the announcement arrives.
* Distance counts along the path from the current version back to the root; a version that a rewind left is off the
  path.
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.errors import InvalidRequest, VersionUnknown
from headrace.trajectory import Version

Span = tuple[tuple[int, int, int], ...]
"""The part of a group's versions that decides whether it is out of bound: by lineage the lowest and the highest
``n``."""


class Versions:
    """All lineages of a run, and the current version."""

    __slots__ = ("forks", "now", "tops")

    def __init__(self) -> None:
        self.now = Version(0, 0)
        #: The version that each lineage forked from; None for the first.
        self.forks: list[Version | None] = [None]
        #: The highest n announced in each lineage.
        self.tops: list[int] = [0]

    def announce(self, version: Version, fork: Version | None) -> None:
        """Make a version the current one; with ``fork``, the first of a new lineage."""
        while len(self.forks) <= version.lineage:
            # The fork may be lost in the log. Then it is as early as possible, so that no row that a rewind left counts
            # as on the path.
            self.forks.append(Version(len(self.forks) - 1, 0))
            self.tops.append(0)
        if fork is not None:
            self.forks[version.lineage] = fork
        self.tops[version.lineage] = max(self.tops[version.lineage], version.n)
        self.now = version

    def distance(self, version: Version) -> int | None:
        """Versions between this one and the current one; None if it is off the path. A version ahead is 0 behind."""
        now = self.now
        if version.lineage == now.lineage:
            return max(0, now.n - version.n)
        lineage, top = now.lineage, now.n
        while lineage != version.lineage:
            fork = self.forks[lineage]
            if fork is None or version.lineage > lineage:
                return None
            lineage, top = fork
        return now.n - version.n if version.n <= top else None

    def bound_violation(self, span: Span, bound: int) -> str:
        """``rewound`` if a version is off the path, ``stale`` if one is more than ``bound`` behind; else empty."""
        now = self.now
        stale = ""
        for lineage, low, high in span:
            if lineage != now.lineage and self.distance(Version(lineage, high)) is None:
                return "rewound"
            if now.n - low > bound:
                stale = "stale"
        return stale

    def require_known(self, version: Version) -> None:
        """Raise VersionUnknown for a version that no engine can have had."""
        if version.lineage < len(self.tops):
            fork = self.forks[version.lineage]
            if (fork.n if fork else 0) <= version.n <= self.tops[version.lineage] + 1:
                return
        raise VersionUnknown(
            f"Version {version} was never announced; the current version is {self.now}.",
            hint="Announce each version as soon as its weights are loaded. If another run has trained the policy "
            "server, close that run and restart the server.",
        )


def span_of(versions: Iterable[Version]) -> Span:
    """The span of some versions."""
    distinct = set(versions)
    if len(distinct) == 1:
        ((lineage, n),) = distinct
        return ((lineage, n, n),)
    bounds: dict[int, tuple[int, int]] = {}
    for lineage, n in distinct:
        low, high = bounds.get(lineage, (n, n))
        bounds[lineage] = (min(low, n), max(high, n))
    return tuple((lineage, *bounds[lineage]) for lineage in sorted(bounds))


def parse_version(text: str) -> Version:
    """Read the text form; raises InvalidRequest."""
    try:
        return Version.parse(text)
    except ValueError as error:
        raise InvalidRequest(f"{error}.") from error
