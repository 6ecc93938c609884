"""The runtime bubblewrap in a process with too few descriptors, and with very many."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Awaitable, Callable

import pytest

from headrace.errors import SandboxFailure
from headrace_sandbox.result import Limits
from headrace_sandbox.runtimes.base import PythonProgram, Sandbox, SandboxCommand, Template
from headrace_sandbox.runtimes.bubblewrap.runtime import BubblewrapRuntime
from tests.leaks import descriptors
from tests.sandbox.host.open_files import MOST_NEEDED, only_descriptors

pytestmark = pytest.mark.component("bubblewrap")

LIMITS = Limits(wall_s=20.0)

TRUE = SandboxCommand(arguments=["true"])

MANY = 1100


async def fresh(runtime: BubblewrapRuntime, sandbox: Sandbox) -> None:
    assert (await runtime.run(TRUE, LIMITS)).fault == ""


async def forked(runtime: BubblewrapRuntime, sandbox: Sandbox) -> None:
    assert (await runtime.run_code(PythonProgram(code=""), LIMITS)).fault == ""


async def persistent(runtime: BubblewrapRuntime, sandbox: Sandbox) -> None:
    assert (await sandbox.run(TRUE, LIMITS)).fault == ""


async def opened(runtime: BubblewrapRuntime, sandbox: Sandbox) -> None:
    await (await runtime.open(Template(), 60.0)).close()


async def session(runtime: BubblewrapRuntime, sandbox: Sandbox) -> None:
    await (await sandbox.session("bash")).close()


@pytest.mark.parametrize("call", [fresh, forked, persistent, opened, session])
async def test_a_call_without_enough_descriptors_is_our_failure_and_leaks_none(
    call: Callable[[BubblewrapRuntime, Sandbox], Awaitable[None]],
) -> None:
    runtime = BubblewrapRuntime()
    sandbox = await runtime.open(Template(), 300.0)
    await call(runtime, sandbox)
    before, failures = descriptors(collect=True), []
    for more in range(MOST_NEEDED):
        try:
            with only_descriptors(more):
                await call(runtime, sandbox)
        except SandboxFailure as failure:
            failures.append(failure)
    await call(runtime, sandbox)
    assert failures
    assert all(failure.retryable for failure in failures)
    assert descriptors() == before
    await runtime.close()


@pytest.mark.parametrize("call", [fresh, forked, persistent, opened, session])
async def test_sandboxes_work_in_a_process_with_more_than_a_thousand_descriptors(
    call: Callable[[BubblewrapRuntime, Sandbox], Awaitable[None]],
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, MANY + 1000), hard))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(MANY):
            stack.callback(os.close, os.open("/dev/null", os.O_RDONLY))
        runtime = BubblewrapRuntime()
        sandbox = await runtime.open(Template(), 300.0)
        await call(runtime, sandbox)
        await runtime.close()
