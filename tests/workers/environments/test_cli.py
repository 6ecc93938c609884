"""``headrace env``, as used by the author of an environment."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import headrace
from headrace.errors import SetupError, UnknownEnvironment
from headrace_workers.environments.cli import env

FAULTY = """
import headrace

class Faulty:
    def reset(self, seed=None):
        return "Go.", {}

    def step(self, action):
        return "", float("nan"), True, False, {}

headrace.register("test-env-cli:%s", Faulty)
"""


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[tuple[str, str]]:
    name = f"faulty_of_{tmp_path.name}"
    file = tmp_path / f"{name}.py"
    file.write_text(FAULTY % name)
    yield f"test-env-cli:{name}", str(file)
    sys.modules.pop(name, None)


def test_list_names_every_id_that_a_worker_on_this_machine_knows() -> None:
    result = CliRunner().invoke(env, ["list", "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout) == headrace.registered()
    assert "game:Nim-v0" in json.loads(result.stdout)


def test_check_confirms_that_an_environment_keeps_the_protocol_and_exits_with_0() -> None:
    result = CliRunner().invoke(env, ["check", "math:Arithmetic-v0", "--action", r"\boxed{4}"])
    assert (result.exit_code, result.stdout) == (0, "math:Arithmetic-v0 keeps the protocol.\n")


def test_check_prints_each_violation_of_the_protocol_and_exits_with_1(faulty: tuple[str, str]) -> None:
    environment, file = faulty
    result = CliRunner().invoke(env, ["check", environment, "--import", file, "--json"])
    assert result.exit_code == 1
    assert [problem["check"] for problem in json.loads(result.stdout)] == ["step-returns"]


def test_check_of_an_unknown_id_is_a_separate_error() -> None:
    result = CliRunner().invoke(env, ["check", "nowhere:Known"])
    assert isinstance(result.exception, UnknownEnvironment)


@pytest.mark.parametrize("kwargs", ["{", "[1]"])
def test_kwargs_that_are_not_a_json_object_are_a_usage_error(kwargs: str) -> None:
    result = CliRunner().invoke(env, ["check", "game:Nim-v0", "--kwargs", kwargs])
    assert result.exit_code == 2
    assert "--kwargs" in result.stderr


def test_an_environment_that_cannot_be_made_is_an_error_with_the_constructors_message() -> None:
    result = CliRunner().invoke(env, ["check", "game:Nim-v0", "--kwargs", '{"colour": 1}'])
    assert isinstance(result.exception, SetupError)
    assert "colour" in str(result.exception)
    assert "--kwargs" in result.exception.hint


def test_the_help_of_check_has_its_example_on_a_separate_line() -> None:
    lines = CliRunner().invoke(env, ["check", "--help"]).stdout.splitlines()
    example = lines[lines.index("  Example:") + 1]
    assert example.endswith(r"--action '\boxed{1}' --action '\boxed{3}'")


BROKEN = """
import os, time, headrace

class Exits:
    def reset(self, seed=None):
        return "Go.", {}

    def step(self, action):
        os._exit(3)

class Hangs(Exits):
    def step(self, action):
        print("I hang.")
        time.sleep(1e6)

headrace.register("test-env-cli:Exits", Exits)
headrace.register("test-env-cli:Hangs", Hangs)
"""


@pytest.mark.parametrize(
    ("environment", "violation"),
    [
        ("test-env-cli:Exits", r"returns: step('\\boxed{1}') ended the process: exit status 3"),
        ("test-env-cli:Hangs", r"returns: step('\\boxed{1}') did not return within 3 s"),
    ],
)
def test_check_names_the_call_that_ends_the_process_or_never_returns(
    environment: str, violation: str, tmp_path: Path
) -> None:
    file = tmp_path / "broken.py"
    file.write_text(BROKEN)
    command = ["check", environment, "--import", str(file), "--action", r"\boxed{1}", "--call-timeout", "3"]
    done = subprocess.run(
        [sys.executable, "-m", "headrace_orchestrator.cli", "env", *command], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (1, violation + "\n")
