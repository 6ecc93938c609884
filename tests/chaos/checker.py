"""The checker of campaigns: all checks of ``tests/e2e``, and that every granted episode has its record."""

from __future__ import annotations

from pathlib import Path

from headrace import Client
from tests.e2e.checker import Findings
from tests.e2e.checker import check as check_run
from tests.e2e.recorder import Acknowledged

__all__ = ["Findings", "check"]


def check(url: str, run: str, data: Path, acknowledged: Acknowledged, *, finished: bool = True) -> Findings:
    """Run the checks of ``tests/e2e``; if the run is ``finished``, also that every granted episode has its record."""
    findings = check_run(url, run, data, acknowledged)
    if finished:
        with Client(url, keepalive=False) as client:
            ended = {item.episode for item in client.trajectories(run)}
        findings.violations += [
            f"episode {episode} was granted and has no record" for episode in sorted(acknowledged.granted - ended)
        ]
    return findings
