"""G15: what a command leaves in the background holds nobody up, and does not outlive it."""

from __future__ import annotations

import secrets

import pytest

from headrace_sandbox.result import Limits
from headrace_sandbox.runtimes.base import Command
from headrace_sandbox.runtimes.bubblewrap import Bubblewrap
from tests.sandbox.test_hostile import lives

pytestmark = pytest.mark.component("bubblewrap")


@pytest.mark.parametrize(
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
async def test_G15_a_background_process_holds_nobody_up(  # noqa: N802
    fresh: Bubblewrap, script: str, expected: str
) -> None:
    mark = secrets.token_hex(8)
    command = Command(arguments=["bash", "-c", script, mark])
    result = await fresh.run(command, Limits(wall_s=5.0))
    assert result.exit_code == 0, result.stderr.text
    assert result.limit is None
    assert result.stdout.text.replace("y\n", "") == expected
    assert not lives(mark)


async def test_G15_a_pipe_that_is_waited_for_runs_into_the_limit(fresh: Bubblewrap) -> None:  # noqa: N802
    mark = secrets.token_hex(8)
    command = Command(arguments=["bash", "-c", "exec -a $0 sleep 300 | cat", mark])
    result = await fresh.run(command, Limits(wall_s=2.0))
    assert (result.limit, result.exit_code, result.fault) == ("time", None, "limit")
    assert not lives(mark)
