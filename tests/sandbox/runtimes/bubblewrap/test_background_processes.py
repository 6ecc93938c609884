"""G15: background processes delay neither a command nor a cell, and end with the command, or with the session."""

from __future__ import annotations

import secrets

import pytest

from headrace_sandbox.conformance.leftovers import pids_with_mark
from headrace_sandbox.result import Limits
from headrace_sandbox.runtimes.base import Sandbox, SandboxCommand, Session, Template
from headrace_sandbox.runtimes.bubblewrap.runtime import BubblewrapRuntime
from tests.sandbox.runtimes.helpers import pids_marked

pytestmark = pytest.mark.component("bubblewrap")


CASES = pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("sleep 300 & echo started", "started\n"),
        ("python3 -m http.server 8123 & echo started", "started\n"),
        ("(sleep 2; echo late) & echo first", "first\n"),
        ("setsid sleep 300 >/dev/null 2>&1 & echo x", "x\n"),
        ("nohup sh -c 'while :; do echo y; sleep 0.01; done' & echo x", "x\n"),
        ('read -r line; echo "[$line]"', "[]\n"),
        ("cat", ""),
    ],
)


@CASES
async def test_a_background_process_does_not_delay_a_command(
    fresh: BubblewrapRuntime, script: str, expected: str
) -> None:
    mark = secrets.token_hex(8)
    command = SandboxCommand(arguments=["bash", "-c", script, mark])
    result = await fresh.run(command, Limits(wall_s=5.0))
    assert result.exit_code == 0, result.stderr.text
    assert result.limit is None
    assert result.stdout.text.replace("y\n", "") == expected
    assert not pids_with_mark(mark)


async def test_a_command_that_waits_for_a_pipe_exceeds_its_time(fresh: BubblewrapRuntime) -> None:
    mark = secrets.token_hex(8)
    command = SandboxCommand(arguments=["bash", "-c", "exec -a $0 sleep 300 | cat", mark])
    result = await fresh.run(command, Limits(wall_s=2.0))
    assert (result.limit, result.exit_code, result.fault) == ("time", None, "limit")
    assert not pids_with_mark(mark)


# A persistent shell -----------------------------------------------------------------------------------------------


@pytest.fixture
async def shell(fresh: BubblewrapRuntime) -> tuple[Sandbox, Session, str]:
    """A sandbox, a shell in it, and a mark in the environment of its processes."""
    mark = secrets.token_hex(8)
    sandbox = await fresh.open(Template(environment={"MARK": mark}), 120.0)
    return sandbox, await sandbox.session("bash"), mark


@CASES
async def test_a_background_process_does_not_delay_a_cell(
    shell: tuple[Sandbox, Session, str], script: str, expected: str
) -> None:
    _, session, mark = shell
    result = await session.run(script, Limits(wall_s=5.0))
    assert (result.exit_code, result.limit, result.lost) == (0, None, None)
    assert result.stdout.text.replace("y\n", "") == expected
    assert result.wall_s < 4  # 1 s on a quiet machine
    assert (await session.run("echo next", Limits(wall_s=5.0))).stdout.text == "next\n"
    assert pids_marked(mark)
    await session.close()
    assert not pids_marked(mark)


async def test_a_cell_that_waits_for_a_pipe_exceeds_its_time_and_the_shell_goes_on(
    shell: tuple[Sandbox, Session, str],
) -> None:
    _, session, mark = shell
    result = await session.run("x=1; sleep 300 | cat", Limits(wall_s=2.0))
    assert (result.limit, result.exit_code, result.fault, result.lost) == ("time", None, "limit", None)
    assert (await session.run("echo $x; jobs -p", Limits(wall_s=5.0))).stdout.text == "1\n"
    assert len(pids_marked(mark)) == 1  # the shell
    await session.close()
    assert not pids_marked(mark)


async def test_late_output_of_a_background_process_is_dropped_and_the_process_goes_on(
    shell: tuple[Sandbox, Session, str],
) -> None:
    _, session, _ = shell
    late = "(until [ -e go ]; do sleep 0.01; done; yes | head -c 1000000; echo late; touch written) & echo first"
    assert (await session.run(late, Limits(wall_s=5.0))).stdout.text == "first\n"
    wait = "touch go; until [ -e written ]; do sleep 0.01; done; echo second"
    assert (await session.run(wait, Limits(wall_s=20.0))).stdout.text == "second\n"


async def test_a_background_server_serves_later_cells_and_commands(
    shell: tuple[Sandbox, Session, str],
) -> None:
    sandbox, session, _ = shell
    await session.run("echo page >index.html; python3 -m http.server 8123 &", Limits(wall_s=5.0))
    get = """
import time, urllib.request
for _ in range(500):
    try:
        print(urllib.request.urlopen('http://127.0.0.1:8123/').read().decode(), end='')
        break
    except OSError:
        time.sleep(0.02)
"""
    for _ in range(2):
        result = await sandbox.run(SandboxCommand(arguments=["python3", "-I", "-c", get]), Limits(wall_s=20.0))
        assert (result.stdout.text, result.stderr.text) == ("page\n", "")


async def test_a_background_process_survives_a_stopped_cell(
    shell: tuple[Sandbox, Session, str],
) -> None:
    _, session, mark = shell
    await session.run("sleep 300 & echo $! >pid", Limits(wall_s=5.0))
    result = await session.run("sh -c 'trap \"\" INT; while :; do :; done'", Limits(wall_s=0.5))
    assert result.limit == "time"
    assert (await session.run("kill -0 $(cat pid) && echo lives", Limits(wall_s=5.0))).stdout.text == "lives\n"
    assert len(pids_marked(mark)) == 2
