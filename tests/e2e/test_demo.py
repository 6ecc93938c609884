"""``headrace demo`` as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SECONDS = 600
"""For the demo: it takes twenty on an idle machine, and what it learns does not depend on it."""


@pytest.mark.timeout(SECONDS + 120)
def test_the_demo_learns_and_its_control_does_not() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "headrace_orchestrator.cli", "demo", "--json", "--seconds", f"{SECONDS}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS + 60,
        env={key: value for key, value in os.environ.items() if not key.startswith("HEADRACE_URL")},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["targets"], found["solved"], found["failures"]) == (50, 50, 0)
    assert found["mean_guesses"] <= 5.1
    assert found["mean_guesses"] < found["uniform_guesses"] == pytest.approx(6.18, abs=0.005)
    assert found["binary_search_guesses"] == pytest.approx(4.86, abs=0.005)
    assert found["control"]["mean_guesses"] >= found["first"]["mean_guesses"]
