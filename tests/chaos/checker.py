"""The checker of campaigns: that of ``tests/e2e``, and that everything which was granted came to its one end."""

from __future__ import annotations

from pathlib import Path

from headrace import Client
from tests.e2e.checker import Findings
from tests.e2e.checker import check as check_run
from tests.e2e.recorder import Acknowledged

__all__ = ["Findings", "check"]


def check(url: str, run: str, data: Path, seen: Acknowledged, *, finished: bool = True) -> Findings:
    """All that the checker of ``tests/e2e`` looks at; of a run that is ``finished``, every granted episode has its
    record."""
    found = check_run(url, run, data, seen)
    if finished:
        with Client(url, keepalive=False) as client:
            ended = {item.episode for item in client.trajectories(run)}
        found.wrong += [f"episode {episode} was granted and has no record" for episode in sorted(seen.granted - ended)]
    return found
