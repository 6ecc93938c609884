"""The command ``headrace sandbox``, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.component("bubblewrap")

HEADRACE = [str(Path(sys.executable).parent / "headrace"), "sandbox"]


def headrace(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    settings = {"capture_output": True, "text": True, "timeout": 60, "stdin": subprocess.DEVNULL, **options}
    return subprocess.run([*HEADRACE, *arguments], check=False, **settings)


def test_run_exits_as_the_command_did() -> None:
    run = headrace("run", "--", "sh", "-c", "read line; echo got $line; exit 3", stdin=None, input="hello\n")
    assert (run.stdout, run.returncode) == ("got hello\n", 3)
    assert headrace("run", "--", "sh", "-c", "kill -TERM $$").returncode == 128 + 15


def test_an_unknown_option_is_not_taken_for_the_command() -> None:
    for arguments in (["--runtme", "bubblewrap", "--", "true"], ["--memory", "1", "true"]):
        refused = headrace("run", *arguments)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert "No such option" in refused.stderr
        assert arguments[0] in refused.stderr
    assert headrace("run", "sh", "-c", "exit 4").returncode == 4
    assert headrace("run", "--", "--runtme").returncode == 127


def test_run_exits_with_127_if_the_command_does_not_exist() -> None:
    outcome = headrace("run", "--", "nosuch")
    assert (outcome.stdout, outcome.returncode) == ("", 127)
    assert "nosuch" in outcome.stderr


def test_run_copies_only_the_given_files(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("print(open('two').read())")
    (tmp_path / "two").write_text("hello")
    files = ["--file", str(tmp_path / "one.py"), "--file", str(tmp_path / "two")]
    outcome = headrace("run", *files, "--", "python3", "one.py")
    assert (outcome.stdout, outcome.returncode) == ("hello\n", 0)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "two").write_text("another")
    twice = headrace("run", *files, "--file", str(tmp_path / "other" / "two"), "--", "true")
    assert (twice.returncode, "Two files are named two" in twice.stderr) == (2, True)
    assert headrace("run", "--file", str(tmp_path / "nothing"), "--", "true").returncode == 2


def test_run_exits_with_124_after_a_limit_and_names_it() -> None:
    outcome = headrace("run", "--time-s", "0.5", "--", "sleep", "60")
    assert (outcome.returncode, outcome.stderr) == (124, "Stopped at its limit of time.\n")
    reports = json.loads(headrace("run", "--time-s", "0.5", "--json", "--", "sleep", "60").stdout)
    assert (reports["limit"], reports["fault"], reports["isolation"]["runtime"]) == ("time", "limit", "bubblewrap")


def test_run_exits_with_70_after_a_fault_of_ours() -> None:
    outcome = headrace("run", "--", "true", env={"PATH": "/nowhere"})
    assert outcome.returncode == 70
    assert "bwrap is not installed" in outcome.stderr


def test_conformance_exits_with_1_if_an_outcome_is_not_the_expected_one() -> None:
    lines = json.loads(headrace("conformance", "--runtime", "bubblewrap", "--case", "8", "--json").stdout)
    assert [(line["column"], line["found"], line["ok"]) for line in lines] == [
        ("bubblewrap", "contained", True),
        ("bubblewrap code", "contained", True),
    ]
    report = headrace("conformance", "--runtime", "bubblewrap", "--case", "12b")
    assert report.stdout.endswith("2 cases, 0 not as expected\n")
    assert report.returncode == 0
    unknown = headrace("conformance", "--runtime", "bubblewrap", "--case", "99")
    assert (unknown.returncode, "Unknown case: 99" in unknown.stderr) == (2, True)
