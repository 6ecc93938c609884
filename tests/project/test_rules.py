"""The rules of tests/conftest.py, applied to a small separate suite."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.check_tree import ROOT

CONFTEST = """
from tests.components import LEAST_TESTS, PARTS, Part
from tests.conftest import *
from tests.conftest import _nothing_left_behind

PARTS.clear()
PARTS["absent"] = Part(lambda: False, "apt-get install absent")
LEAST_TESTS.clear()
LEAST_TESTS["sample"] = {least}
"""

INI = """
[pytest]
testpaths = tests
markers =
    component(name): a part
"""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    (tmp_path / "tests" / "sample").mkdir(parents=True)
    (tmp_path / "pytest.ini").write_text(INI)
    (tmp_path / "tests" / "conftest.py").write_text(CONFTEST.format(least=1))
    return tmp_path


def _pytest(suite: Path, code: str, *arguments: str, ci: bool) -> subprocess.CompletedProcess[str]:
    (suite / "tests" / "sample" / "test_sample.py").write_text(code)
    environment = {name: value for name, value in os.environ.items() if name != "CI"}
    environment |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **({"CI": "true"} if ci else {})}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *arguments],
        cwd=suite,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


NEEDS_ABSENT = """
import pytest

@pytest.mark.component("absent")
def test_with_a_part():
    pass
"""


def test_a_missing_part_skips_a_test_with_the_command_that_installs_it(suite: Path) -> None:
    result = _pytest(suite, NEEDS_ABSENT, ci=False)
    assert result.returncode == 0
    assert "absent is missing here; install it with: apt-get install absent" in result.stdout


def test_a_missing_part_fails_a_test_under_ci(suite: Path) -> None:
    result = _pytest(suite, NEEDS_ABSENT, ci=True)
    assert result.returncode == 1
    assert "absent is missing here; install it with: apt-get install absent" in result.stdout


def test_a_complete_run_under_ci_fails_when_a_component_ran_too_few_tests(suite: Path) -> None:
    (suite / "tests" / "conftest.py").write_text(CONFTEST.format(least=2))
    passing = "def test_one():\n    pass\n"
    result = _pytest(suite, passing, ci=True)
    assert result.returncode == 1
    assert "component sample: 1 tests ran, a complete run has at least 2" in result.stdout
    assert _pytest(suite, passing, "-k", "one", ci=True).returncode == 0
    assert _pytest(suite, passing, ci=False).returncode == 0


def test_a_process_that_outlives_the_suite_fails_it(suite: Path, tmp_path: Path) -> None:
    escaping = f"""
import subprocess

def test_escape():
    with open({str(tmp_path / "pid")!r}, "w") as file:
        subprocess.run(["sh", "-c", "sleep 60 >/dev/null 2>&1 & echo $!"], stdout=file, check=True)
"""
    result = _pytest(suite, escaping, ci=False)
    pid = int((tmp_path / "pid").read_text())
    os.kill(pid, 9)
    assert result.returncode == 1
    assert f"left running: process {pid} " in result.stdout
    assert "started by tests/sample/test_sample.py::test_escape" in result.stdout
