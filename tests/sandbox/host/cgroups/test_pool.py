"""Control groups that are used again."""

from __future__ import annotations

import os
import subprocess

import pytest

from headrace_sandbox.host.cgroups.detection import find_driver
from headrace_sandbox.host.cgroups.pool import CgroupPool
from headrace_sandbox.result import Limits

pytestmark = pytest.mark.component("cgroups")


def test_a_group_is_used_again_and_its_counts_restart() -> None:
    groups = CgroupPool(find_driver())
    first = groups.acquire_blocking(Limits())
    groups.release_blocking(first)
    assert groups.acquire_blocking(Limits(pids=3)) is first
    assert (first.usage().memory_kills, first.usage().refused_pids) == (0, 0)
    groups.release_blocking(first)
    groups.close()


def test_a_process_that_was_not_reaped_does_not_reduce_the_next_programs_limit() -> None:
    groups = CgroupPool(find_driver())
    first = groups.acquire_blocking(Limits())
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as unreaped:
        first.add(unreaped.pid)
        assert unreaped.stdin is not None
        unreaped.stdin.close()
        os.waitid(os.P_PID, unreaped.pid, os.WEXITED | os.WNOWAIT)
        groups.release_blocking(first)
        second = groups.acquire_blocking(Limits(pids=2))
        assert second is first
        command = ["sh", "-c", "read line; /bin/echo forked; true"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as forks:
            second.add(forks.pid)
            assert forks.communicate(b"go\n")[0] == b"forked\n"
    groups.release_blocking(second)
    groups.close()
