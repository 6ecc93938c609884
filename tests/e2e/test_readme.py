"""The README's first example, as it is printed, beside the service that the README starts."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from headrace import Client

README = Path(__file__).parents[2] / "README.md"
UP = [
    sys.executable,
    "-m",
    "headrace_orchestrator.cli",
    "up",
    "--tiny-policy",
    "--port",
    "0",
    "--tiny-policy-port",
    "0",
]


@pytest.mark.timeout(300)
def test_the_first_example_of_the_readme_learns_and_samples_nothing_in_vain(tmp_path: Path):
    example = README.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    command = [*UP, "--data", str(tmp_path / "data"), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        try:
            page = next(line for line in map(json.loads, service.stdout) if "policy_endpoint" in line)
            assert "http://127.0.0.1:8471" in example
            printed = subprocess.run(
                [sys.executable, "-c", example.replace("http://127.0.0.1:8471", page["policy_endpoint"])],
                env={**os.environ, "HEADRACE_URL": page["url"]},
                cwd=tmp_path,
                capture_output=True,
                text=True,
                check=True,
                timeout=240,
            ).stdout
            with Client(page["url"]) as client:
                status = client.run("first")
        finally:
            service.send_signal(signal.SIGTERM)
            service.stdout.read()
    guesses = [float(number) for number in re.findall(r"step \d+: ([\d.]+) guesses", printed)]
    assert (len(guesses), status.version) == (20, "0.20")
    assert set(status.groups.retired) <= {"acked", "closed"}
    assert statistics.fmean(guesses[-5:]) < statistics.fmean(guesses[:5])
