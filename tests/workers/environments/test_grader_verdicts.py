"""G17: a grader's verdict is a reward only if it is valid; any other is a failure with the grader's log."""

from __future__ import annotations

import io
import tarfile
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headrace.environment import Step
from headrace.errors import EnvironmentFailure
from headrace_sandbox.graders import grade_by_file, verdict_of
from headrace_sandbox.result import Limits
from headrace_sandbox.runtimes.base import SandboxCommand, Template
from headrace_workers.environment_context import EnvironmentContext
from headrace_workers.sandboxes import WorkerSandbox
from tests.workers.fakes import Script, failure_of, play, say
from tests.workers.runtimes import bubblewrap

pytestmark = pytest.mark.component("bubblewrap")

LIMITS = Limits(wall_s=1.0)

SUBMISSION = "printf 1 > verdict; mkdir -p work; printf 1 > work/verdict"
"""A policy's program that writes a forged verdict into its sandbox."""


@pytest.fixture
async def sandbox() -> AsyncIterator[WorkerSandbox]:
    made = bubblewrap()
    yield made
    await made.close()


class TerminalTask:
    """Environment whose action is a script, graded by another script."""

    def __init__(self, grader: str) -> None:
        self.environment_context: EnvironmentContext | None = None
        self.grader = grader

    def reset(self, seed: int | None = None) -> Any:
        return "Do it.", {}

    async def step(self, action: str) -> Step:
        assert self.environment_context is not None
        sandbox = await self.environment_context.sandbox.open(Template(), 60.0)
        try:
            await sandbox.run(shell(action), LIMITS)
            return Step("", await verdict_of(sandbox, shell(self.grader), LIMITS), True, False, {})
        finally:
            await sandbox.close()


def shell(script: str) -> SandboxCommand:
    return SandboxCommand(arguments=["/bin/sh", "-c", script])


def writes(content: str, end: str = "exit 0") -> str:
    octal = "".join(f"\\{byte:03o}" for byte in content.encode())
    return f"echo the log of the grader; printf '{octal}' > $VERDICT; {end}"


NO, BAD = ("environment", "no-verdict", True), ("environment", "bad-verdict", False)

GRADERS: dict[str, tuple[str, Any]] = {
    "1": (writes("1"), 1.0),
    "1 and a line end": (writes("1\n"), 1.0),
    "0": (writes("0"), 0.0),
    "0.25": (writes("0.25"), 0.25),
    "none, ends with 0": ("echo the log of the grader", NO),
    "none, ends with 1": ("echo the log of the grader; exit 1", NO),
    "empty": (writes(""), NO),
    "10": (writes("10"), BAD),
    "1abc": (writes("1abc"), BAD),
    "nan": (writes("nan"), BAD),
    "inf": (writes("inf"), BAD),
    "1e999": (writes("1e999"), BAD),
    "a fullwidth 1": (writes("１"), BAD),
    "-0.5": (writes("-0.5"), BAD),
    "JSON": (writes('{"reward": null}'), BAD),
    "two lines": (writes("1\n\n"), BAD),
    "spaces": (writes(" 1"), BAD),
    "2 MiB of 1": ("echo the log of the grader; head -c 2097152 /dev/zero | tr '\\0' 1 > $VERDICT", BAD),
    "a folder": ("echo the log of the grader; mkdir $VERDICT", BAD),
    "a link": ("echo the log of the grader; echo 1 > other; ln -s other $VERDICT", BAD),
    "1, killed by the limit of time": (writes("1", "sleep 60"), NO),
    "1, ends with 137": (writes("1", "exit 137"), NO),
    "1, kills itself": (writes("1", "kill -9 $$"), NO),
    "one that the submission wrote, and the grader crashes": ("echo the log of the grader; exit 1", NO),
    "one that the submission wrote, and the grader does nothing": ("echo the log of the grader", NO),
}


@pytest.mark.parametrize("name", GRADERS)
async def test_g17_a_verdict_is_a_reward_only_if_it_is_one(sandbox: WorkerSandbox, name: str) -> None:
    grader, expected = GRADERS[name]
    record = await play(Script(say(SUBMISSION)), lambda: TerminalTask(grader), sandbox=sandbox)
    if isinstance(expected, float):
        (turn,) = record.segments[0].turns
        assert (record.status, turn.reward) == ("finished", expected)
        return
    assert failure_of(record) == expected
    assert record.segments == [], "no reward of any kind"
    assert record.failure is not None
    assert "the log of the grader" in record.failure.message


@pytest.mark.parametrize(
    "left",
    [
        "mkdir verdict; touch verdict/x; chmod 500 verdict",
        "mkdir verdict verdict/a; touch verdict/a/b; chmod 0 verdict/a verdict",
        "chmod 500 .",
        "chmod 0 .",
        "ln -s / verdict",
        "ln -s /nowhere verdict",
        "mkfifo verdict",
    ],
)
async def test_a_submission_cannot_turn_a_verdict_of_0_into_a_failure(sandbox: WorkerSandbox, left: str) -> None:
    opened = await (await sandbox.runtime()).open(Template(), 60.0)
    await opened.run(shell(left), LIMITS)
    assert await verdict_of(opened, shell(writes("0")), LIMITS) == 0.0
    await opened.close()


def archive(**files: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content.encode()))
    return buffer.getvalue()


async def test_files_of_a_submission_are_graded_in_a_fresh_sandbox_with_the_graders_files(
    sandbox: WorkerSandbox,
) -> None:
    runtime = await sandbox.runtime()
    grader = SandboxCommand(
        arguments=["/bin/sh", "grader.sh"],
        files={"grader.sh": b"grep -q fixed $WORK/file && printf 1 > $VERDICT || printf 0 > $VERDICT"},
    )
    fixed = archive(file="fixed", verdict="1", **{"grader.sh": "printf 1 > $VERDICT"})
    assert await grade_by_file(runtime, fixed, grader, LIMITS) == 1.0
    broken = archive(file="broken", verdict="1", **{"grader.sh": "printf 1 > $VERDICT"})
    assert await grade_by_file(runtime, broken, grader, LIMITS) == 0.0


async def test_the_range_of_rewards_is_declared(sandbox: WorkerSandbox) -> None:
    runtime = await sandbox.runtime()
    grader = shell(writes("-2.5"))
    assert await grade_by_file(runtime, archive(), grader, LIMITS, lowest=-3, highest=0) == -2.5
    with pytest.raises(EnvironmentFailure, match="outside -1 to 0"):
        await grade_by_file(runtime, archive(), grader, LIMITS, lowest=-1, highest=0)
