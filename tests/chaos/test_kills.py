"""Everything dies in every phase, and the power is cut: nothing acknowledged is lost, doubled or changed.

The long form is ``make chaos``. Each campaign is a process of its own, for it forks all others.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.campaign import ANY_MOMENT
from tests.chaos.roles import PHASES
from tests.e2e.processes import ROOT

WITHIN_S = 600
"""For the kills of a campaign. How many there are is given and not how long they take: half a minute on an idle
machine, minutes on a busy one."""

pytestmark = pytest.mark.timeout(WITHIN_S + 180)


def campaign(folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Exit code and report."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.chaos", "--json"),
            *("--folder", folder, "--within-s", f"{WITHIN_S}"),
            *options,
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=WITHIN_S + 150,
        cwd=ROOT,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_kills_and_power_cuts_in_every_phase_lose_nothing_and_double_nothing(tmp_path: Path) -> None:
    code, report = campaign(tmp_path / "chaos", "--kills", "24", "--seed", "1", "--pace", "1")
    assert report["wrong"] == []
    assert code == 0
    for role, phases in PHASES.items():
        for phase in phases:
            assert report["kills"][f"{role} {phase}"] >= 1, phase
    assert sum(count for name, count in report["kills"].items() if name.endswith(ANY_MOMENT)) >= 1
    assert sum(report["kills"].values()) >= 24
    # What happened in between: a campaign in which nothing was going on would prove nothing.
    assert report["cuts"] >= 5
    assert report["cut_bytes"] > 0
    assert report["records"] > 100
    assert report["acks"] > 5
    assert report["assets"] > 10
    assert report["redelivered"] >= 1


def test_too_few_kills_and_a_phase_without_any_are_findings(tmp_path: Path) -> None:
    code, report = campaign(tmp_path / "chaos", "--kills", "24", "--within-s", "0.1")
    assert code == 1
    killed = sum(report["kills"].values())
    assert f"only {killed} of 24 kills within 0.1 s" in report["wrong"]
    for role, phases in PHASES.items():
        for phase in phases:
            if not report["kills"].get(f"{role} {phase}"):
                assert f"no {role} died while {phase}" in report["wrong"]
    assert len(report["wrong"]) > 10


@pytest.mark.parametrize(
    ("mutant", "finding"),
    [
        ("answers-before-sync", "lost|other bytes|accepted . times|cannot be fetched"),
        ("acks-before-sync", "the ack of batch .* was answered and is lost|acked under . leases"),
        ("names-not-synced", "lost|other bytes|accepted . times|cannot be fetched"),
    ],
)
def test_the_checker_finds_what_is_said_before_it_is_on_disk(tmp_path: Path, mutant: str, finding: str) -> None:
    code, report = campaign(tmp_path / "chaos", "--mutant", mutant, "--kills", "4")
    assert code == 1
    assert any(re.search(finding, line) for line in report["wrong"]), report
