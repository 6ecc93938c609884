"""A process that has no descriptors left."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Awaitable, Callable, Iterator

import pytest

from headrace.errors import SandboxFailure
from headrace_sandbox.host.descriptors import Descriptors, is_readable
from headrace_sandbox.result import Limits
from headrace_sandbox.runtimes.base import Command, PythonProgram, Sandbox, Template
from headrace_sandbox.runtimes.bubblewrap.runtime import Bubblewrap

pytestmark = pytest.mark.component("bubblewrap")

LIMITS = Limits(wall_s=20.0)

TRUE = Command(arguments=["true"])

MANY = 1100

NEEDED = 24
"""More descriptors than any of the calls needs at a time."""


async def fresh(runtime: Bubblewrap, sandbox: Sandbox) -> None:
    assert (await runtime.run(TRUE, LIMITS)).fault == ""


async def forked(runtime: Bubblewrap, sandbox: Sandbox) -> None:
    assert (await runtime.run_code(PythonProgram(code=""), LIMITS)).fault == ""


async def living(runtime: Bubblewrap, sandbox: Sandbox) -> None:
    assert (await sandbox.run(TRUE, LIMITS)).fault == ""


async def opening(runtime: Bubblewrap, sandbox: Sandbox) -> None:
    await (await runtime.open(Template(), 60.0)).close()


async def session(runtime: Bubblewrap, sandbox: Sandbox) -> None:
    await (await sandbox.session("bash")).close()


@contextlib.contextmanager
def only(more: int) -> Iterator[None]:
    """So many more descriptors can be opened, and no others."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(map(int, os.listdir("/proc/self/fd"))) + 1
    filled = [os.open("/dev/null", os.O_RDONLY)]
    while filled[-1] < most:
        filled.append(os.open("/dev/null", os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (most + 1 + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in filled:
            os.close(descriptor)


@pytest.mark.parametrize("call", [fresh, forked, living, opening, session])
async def test_a_call_that_finds_no_descriptor_is_our_failure_and_leaves_none_open(
    call: Callable[[Bubblewrap, Sandbox], Awaitable[None]],
) -> None:
    runtime = Bubblewrap()
    sandbox = await runtime.open(Template(), 300.0)
    await call(runtime, sandbox)
    before, failures = len(os.listdir("/proc/self/fd")), []
    for more in range(NEEDED):
        try:
            with only(more):
                await call(runtime, sandbox)
        except SandboxFailure as failure:
            failures.append(failure)
    await call(runtime, sandbox)
    assert failures
    assert all(failure.retryable for failure in failures)
    assert len(os.listdir("/proc/self/fd")) == before
    await runtime.close()


@pytest.mark.parametrize("call", [fresh, forked, living, opening, session])
async def test_a_process_with_more_than_a_thousand_descriptors_has_sandboxes_too(
    call: Callable[[Bubblewrap, Sandbox], Awaitable[None]],
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, MANY + 1000), hard))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(MANY):
            stack.callback(os.close, os.open("/dev/null", os.O_RDONLY))
        runtime = Bubblewrap()
        sandbox = await runtime.open(Template(), 300.0)
        await call(runtime, sandbox)
        await runtime.close()


def test_one_end_of_a_leash_tells_that_nobody_holds_the_other() -> None:
    with Descriptors() as made:
        ours, theirs = made.leash()
        copy = os.dup(theirs)
        assert os.read(copy, 1) == b""
        made.close(theirs)
        assert not is_readable(ours)
        os.close(copy)
        assert is_readable(ours)


def test_what_is_given_is_left_open_and_the_rest_is_not() -> None:
    with Descriptors() as made:
        reads, writes = made.pipe()
        made.give(writes)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reads)
    os.close(writes)
