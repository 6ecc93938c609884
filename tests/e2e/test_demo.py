"""``headrace demo`` as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SECONDS = 600
"""Time limit of the demo: it takes twenty seconds on an idle machine, and its result does not depend on the time."""


@pytest.mark.timeout(SECONDS + 120)
def test_the_demo_learns_and_its_control_does_not() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "headrace_orchestrator.cli", "demo", "--json", "--seconds", f"{SECONDS}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS + 60,
        env={key: value for key, value in os.environ.items() if not key.startswith("HEADRACE_URL")},
    )
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout.splitlines()[-1])
    assert (result["targets"], result["solved"], result["failures"]) == (50, 50, 0)
    assert result["mean_guesses"] <= 5.1
    assert result["mean_guesses"] < result["uniform_guesses"] == pytest.approx(6.18, abs=0.005)
    assert result["binary_search_guesses"] == pytest.approx(4.86, abs=0.005)
    assert result["control"]["mean_guesses"] >= result["first"]["mean_guesses"]
