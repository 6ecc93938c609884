"""The services on the oldest supported version of uvicorn; all other tests run on the newest."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import uvicorn

from headrace.server.uvicorn_protocol import UVICORN_RANGE
from scripts.check_tree import ROOT
from tests.components import UVICORN_FLOOR

HTTP_TESTS = (
    "tests/sdk/server/test_process.py",
    "tests/sdk/server/test_uvicorn_protocol.py",
    "tests/orchestrator/api/test_http.py",
    "tests/orchestrator/test_server.py",
    "tests/sandbox/service/test_service.py",
)

FLOOR, CEILING = re.findall(r"\d+\.\d+", UVICORN_RANGE)


def test_these_tests_run_on_the_newest_uvicorn_of_the_range():
    major, minor = map(int, CEILING.split("."))
    assert uvicorn.__version__.startswith(f"{major}.{minor - 1}.")


@pytest.mark.component("uvicorn-floor")
@pytest.mark.timeout(600)
def test_the_http_tests_pass_on_the_oldest_uvicorn_of_the_range():
    environment = {**os.environ, "PYTHONPATH": str(UVICORN_FLOOR)}
    version = _python("-c", "import uvicorn; print(uvicorn.__version__)", environment=environment)
    assert version.stdout.startswith(f"{FLOOR}.")
    result = _python("-m", "pytest", "-q", "-p", "no:cacheprovider", *HTTP_TESTS, environment=environment)
    assert result.returncode == 0, result.stdout[-5000:]


def _python(*arguments: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=590)
