"""Every process dies in every phase, and the power is cut: nothing acknowledged is lost, duplicated or changed.

The full run is ``make chaos``. Each campaign is a process of its own, because it forks all others.
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
"""Seconds for the kills of a campaign. Their number is fixed, not their duration: half a minute on an idle machine,
minutes on a busy one."""

pytestmark = pytest.mark.timeout(WITHIN_S + 180)


def campaign(folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    """Run a campaign; returns its exit code and report."""
    process = subprocess.run(
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
    assert process.stdout, process.stderr
    return process.returncode, json.loads(process.stdout)


def test_kills_and_power_cuts_in_every_phase_lose_and_duplicate_nothing(tmp_path: Path) -> None:
    code, report = campaign(tmp_path / "chaos", "--kills", "24", "--seed", "1", "--pace", "1")
    assert report["violations"] == []
    assert code == 0
    for role, phases in PHASES.items():
        for phase in phases:
            assert report["kills"][f"{role} {phase}"] >= 1, phase
    assert sum(count for name, count in report["kills"].items() if name.endswith(ANY_MOMENT)) >= 1
    assert sum(report["kills"].values()) >= 24
    # A campaign during which no work happens would prove nothing.
    assert report["cuts"] >= 5
    assert report["cut_bytes"] > 0
    assert report["records"] > 100
    assert report["acks"] > 5
    assert report["assets"] > 10
    assert report["redelivered"] >= 1


def test_too_few_kills_and_a_phase_without_any_are_violations(tmp_path: Path) -> None:
    code, report = campaign(tmp_path / "chaos", "--kills", "24", "--within-s", "0.1")
    assert code == 1
    killed = sum(report["kills"].values())
    assert f"only {killed} of 24 kills within 0.1 s" in report["violations"]
    for role, phases in PHASES.items():
        for phase in phases:
            if not report["kills"].get(f"{role} {phase}"):
                assert f"no {role} died while {phase}" in report["violations"]
    assert len(report["violations"]) > 10


@pytest.mark.parametrize(
    ("fault", "violation"),
    [
        ("answers-before-sync", "lost|other bytes|accepted . times|cannot be fetched"),
        ("acks-before-sync", "the ack of batch .* was answered and is lost|acked under . leases"),
        ("names-not-synced", "lost|other bytes|accepted . times|cannot be fetched"),
    ],
)
def test_the_checker_finds_responses_that_are_sent_before_the_data_is_on_disk(
    tmp_path: Path, fault: str, violation: str
) -> None:
    code, report = campaign(tmp_path / "chaos", "--fault", fault, "--kills", "4")
    assert code == 1
    assert any(re.search(violation, line) for line in report["violations"]), report
