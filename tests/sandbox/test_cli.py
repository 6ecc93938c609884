"""``headrace sandbox``, as its own process."""

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
    given = {"capture_output": True, "text": True, "timeout": 60, "stdin": subprocess.DEVNULL, **options}
    return subprocess.run([*HEADRACE, *arguments], check=False, **given)


def test_run_ends_as_the_command_did() -> None:
    said = headrace("run", "--", "sh", "-c", "read line; echo got $line; exit 3", stdin=None, input="hello\n")
    assert (said.stdout, said.returncode) == ("got hello\n", 3)
    assert headrace("run", "--", "sh", "-c", "kill -TERM $$").returncode == 128 + 15


def test_run_ends_with_127_where_there_is_no_such_command() -> None:
    ended = headrace("run", "--", "nosuch")
    assert (ended.stdout, ended.returncode) == ("", 127)
    assert "nosuch" in ended.stderr


def test_run_brings_along_the_files_that_are_named(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("print(open('two').read())")
    (tmp_path / "two").write_text("hello")
    files = ["--file", str(tmp_path / "one.py"), "--file", str(tmp_path / "two")]
    ended = headrace("run", *files, "--", "python3", "one.py")
    assert (ended.stdout, ended.returncode) == ("hello\n", 0)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "two").write_text("another")
    twice = headrace("run", *files, "--file", str(tmp_path / "other" / "two"), "--", "true")
    assert (twice.returncode, "Two files are named two" in twice.stderr) == (2, True)
    assert headrace("run", "--file", str(tmp_path / "nothing"), "--", "true").returncode == 2


def test_run_ends_with_124_after_a_limit_and_names_it() -> None:
    ended = headrace("run", "--time-s", "0.5", "--", "sleep", "60")
    assert (ended.returncode, ended.stderr) == (124, "Ended by its limit of time.\n")
    told = json.loads(headrace("run", "--time-s", "0.5", "--json", "--", "sleep", "60").stdout)
    assert (told["limit"], told["fault"], told["isolation"]["runtime"]) == ("time", "limit", "bubblewrap")


def test_run_ends_with_70_where_it_was_our_fault() -> None:
    ended = headrace("run", "--", "true", env={"PATH": "/nowhere"})
    assert ended.returncode == 70
    assert "bwrap is not installed" in ended.stderr


def test_conformance_compares_what_came_of_a_case_with_the_table() -> None:
    lines = json.loads(headrace("conformance", "--runtime", "bubblewrap", "--case", "8", "--json").stdout)
    assert [(line["column"], line["found"], line["ok"]) for line in lines] == [
        ("bubblewrap", "contained", True),
        ("bubblewrap code", "contained", True),
    ]
    shown = headrace("conformance", "--runtime", "bubblewrap", "--case", "12b")
    assert shown.stdout.endswith("2 cases, 0 not as expected\n")
    assert shown.returncode == 0
    unknown = headrace("conformance", "--runtime", "bubblewrap", "--case", "99")
    assert (unknown.returncode, "Unknown case: 99" in unknown.stderr) == (2, True)
