"""G14: the result distinguishes a program that breaks its own sandbox from a sandbox that was broken from outside."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import SandboxFailure
from headrace_sandbox.result import Limits
from headrace_sandbox.runtimes.base import Runtime, Sandbox, SandboxCommand, Template
from headrace_sandbox.runtimes.bubblewrap.sandbox import BubblewrapSandbox
from headrace_sandbox.runtimes.docker.sandbox import DockerSandbox
from headrace_sandbox.runtimes.gvisor.sandbox import GvisorSandbox
from headrace_sandbox.runtimes.registry import make_runtime
from tests.sandbox.runtimes.break_attempts import AGAIN, ATTEMPTS, HARMLESS, OUTCOMES, TIMES

LIMITS = Limits(wall_s=20.0)

SHORT = Limits(wall_s=4.0)
"""The time limit of attempts that would take minutes where files are slow."""

DOCS = Path(__file__).parents[3] / "docs" / "sandbox.md"


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.component(name)) for name in OUTCOMES])
async def runtime(request: pytest.FixtureRequest) -> AsyncIterator[Runtime]:
    made = make_runtime(request.param)
    yield made
    await made.close()


async def said(sandbox: Sandbox, attempt: str) -> list[tuple[str | None, str]]:
    """The results of the attempt and of the calls after it: ``lost``, and the output."""
    session = await sandbox.session("bash")
    results = [await session.run(attempt, SHORT), *[await session.run(AGAIN, LIMITS) for _ in range(TIMES)]]
    return [(result.lost, result.stdout.text) for result in results]


@pytest.mark.parametrize("attempt", ATTEMPTS)
async def test_a_program_that_breaks_its_sandbox_is_contained_or_reported_to_have_lost_it(
    runtime: Runtime, attempt: str
) -> None:
    sandbox = await runtime.open(Template(), 120.0)
    results = await said(sandbox, ATTEMPTS[attempt])
    lost = [why for why, _ in results if why is not None]
    assert ("lost" if lost else "contained") == OUTCOMES[runtime.name][attempt], lost
    if lost:
        first = next(n for n, (why, _) in enumerate(results) if why is not None)
        assert first <= 1
        results = results[first:]
    assert [text for _, text in results[1:]] == ["ok\n"] * (len(results) - 1)
    after = await sandbox.run(SandboxCommand(arguments=["/bin/echo", "fine"]), LIMITS)
    assert (after.stdout.text, after.fault) == ("fine\n", "")


async def test_a_sandbox_that_is_killed_from_outside_is_our_failure(runtime: Runtime) -> None:
    sandbox = await runtime.open(Template(), 120.0)
    session = await sandbox.session("bash")
    assert (await session.run(HARMLESS, LIMITS)).fault == ""
    await kill_from_outside(sandbox)
    calls: list[Any] = [
        lambda: session.run(AGAIN, LIMITS),
        lambda: sandbox.run(SandboxCommand(arguments=["echo", "ok"]), LIMITS),
        lambda: sandbox.session("bash"),
        sandbox.list,
        lambda: session.run(AGAIN, LIMITS),
    ]
    for call in calls:
        with pytest.raises(SandboxFailure) as caught:
            await call()
        assert (caught.value.kind, caught.value.retryable) == ("sandbox-lost", True)
    await sandbox.close()


def test_the_docs_have_the_table_of_outcomes() -> None:
    text = DOCS.read_text()
    for runtime, outcomes in OUTCOMES.items():
        column = [name.strip() for name in table_rows(text)[0]].index(f"`{runtime}`")
        found = {row[0].strip().strip("`"): row[column].strip() for row in table_rows(text)[2:]}
        assert found == {ATTEMPTS[attempt].replace("|", "\\|"): outcome for attempt, outcome in outcomes.items()}


def table_rows(text: str) -> list[list[str]]:
    _, _, after = text.partition("<!-- G14 -->\n")
    lines = after.split("\n\n", 1)[0].splitlines()
    return [line.replace("\\|", "\0").strip("|").replace("\0", "\\|").split(" | ") for line in lines]


async def kill_from_outside(sandbox: Sandbox) -> None:
    """Kill its process 1."""
    if isinstance(sandbox, DockerSandbox):
        assert sandbox._container is not None
        await sandbox._container.kill()
        return
    if isinstance(sandbox, GvisorSandbox):
        assert sandbox._kernel is not None
        sandbox._kernel._process.kill()
        async with asyncio.timeout(20):
            while not sandbox._kernel.guest.is_gone:
                await asyncio.sleep(0.01)
        return
    assert isinstance(sandbox, BubblewrapSandbox)
    assert sandbox._init is not None
    signal.pidfd_send_signal(sandbox._init._pidfd, signal.SIGKILL)
    async with asyncio.timeout(20):
        while sandbox._init.is_alive:
            await asyncio.sleep(0.01)
