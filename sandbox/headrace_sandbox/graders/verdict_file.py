"""Verdict files: what a grader wrote about a task, read strictly, after it ended well.

* The file holds one decimal number in the declared range, in ASCII, and at most one line end. Nothing else is a reward.
* A grader that did not end with 0, or left no file, gave no verdict: a failure, never a reward of 0.
* What stands in the file's place before the grader starts is removed: what a submission wrote is no verdict.
* A failure carries the end of what the grader said.

What is promised: a number that was there before the grader, or that the grader did not stand by with its exit code, is
no verdict. In a fresh sandbox (``grade_by_file``) nothing of the submission runs but what the grader starts. What is
not: a session of a sandbox that lives may have left something in the background, which writes there after the grader;
close sessions first. And a grader that runs the submission in its own sandbox shares its user with it, and the
submission may write what the grader would. Let such a grader look at what the submission left, or ask it by cases
(``grade``).
"""

from __future__ import annotations

import re
from typing import Protocol

from headrace.errors import EnvironmentFailure, SandboxFailure
from headrace_sandbox.host.layout import SCRATCH
from headrace_sandbox.result import ExecResult, Limits
from headrace_sandbox.runtimes.base import Command, Sandbox, Template

VERDICT = "verdict"
"""Where a grader writes, below the scratch folder; and what its environment names as VERDICT."""

WORK = "work"
"""The folder with what a submission left, in a fresh sandbox; its environment names it as WORK."""

SPARE_S = 60.0
"""For a fresh sandbox to live beyond the time of its grader."""

MOST_BYTES = 64
"""Of a verdict file: more than any number needs."""

TAIL_CHARACTERS = 2000
"""Of what a grader said that a failure quotes."""

REMOVE = 'chmod u+rwx "$2"; [ -L "$1" ] || chmod -R u+rwx -- "$1"; rm -rf -- "$1"'
"""For a shell: what was left may be folders that even their user may not change."""

_NUMBER = re.compile(rb"-?[0-9]{1,17}(\.[0-9]{1,17})?\n?")


class SandboxOpener(Protocol):
    """What opens sandboxes: a runtime, or what stands for one."""

    async def open(self, template: Template, ttl_s: float) -> Sandbox: ...


async def grade_by_file(
    runtime: SandboxOpener, work: bytes, grader: Command, limits: Limits, *, lowest: float = 0.0, highest: float = 1.0
) -> float:
    """The reward that a grader gives what a submission left (``work``, a tar archive), in a fresh sandbox that holds
    nothing else but the grader's files.

    Raises EnvironmentFailure ``no-verdict`` or ``bad-verdict``, and SandboxFailure.
    """
    sandbox = await runtime.open(Template(limits=limits), limits.wall_s + SPARE_S)
    try:
        await sandbox.upload(work, WORK)
        return await verdict_of(sandbox, grader, limits, lowest=lowest, highest=highest)
    finally:
        await sandbox.close()


async def verdict_of(
    sandbox: Sandbox, grader: Command, limits: Limits, *, lowest: float = 0.0, highest: float = 1.0
) -> float:
    """The reward that a grader gives in a sandbox that lives. Raises as ``grade_by_file``.

    Close its sessions before: what they left in the background shares its user with the grader, and could write there.
    """
    await _remove(sandbox)
    command = Command(
        arguments=grader.arguments,
        stdin=grader.stdin,
        files=grader.files,
        environment={"VERDICT": VERDICT, "WORK": WORK, **grader.environment},
    )
    result = await sandbox.run(command, limits)
    if result.fault:
        raise _no_verdict(f"The grader did not end well: {_how(result)}.", result)
    try:
        content = await sandbox.read(VERDICT, MOST_BYTES)
    except SandboxFailure as failure:
        if failure.kind == "no-such-file":
            raise _no_verdict("The grader ended and left no verdict.", result) from failure
        if failure.kind in ("file-too-large", "bad-path"):  # a bad path is a folder, a link or a pipe in its place
            raise _bad_verdict(failure.detail, result) from failure
        raise
    return _read(content, result, lowest, highest)


def _read(content: bytes, result: ExecResult, lowest: float, highest: float) -> float:
    if not content:
        raise _no_verdict("The grader left an empty verdict.", result)
    if not _NUMBER.fullmatch(content):
        raise _bad_verdict(f"{content!r} is no decimal number", result)
    reward = float(content)
    if not lowest <= reward <= highest:
        raise _bad_verdict(f"{reward:g} is outside {lowest:g} to {highest:g}", result)
    return reward


async def _remove(sandbox: Sandbox) -> None:
    command = Command(arguments=["sh", "-c", REMOVE, "sh", VERDICT, SCRATCH])
    result = await sandbox.run(command, Limits(wall_s=10.0))
    if result.fault:
        raise _no_verdict("What stood in the verdict's place could not be removed.", result)


def _no_verdict(detail: str, result: ExecResult) -> EnvironmentFailure:
    """Another try may give one."""
    return _failure(detail, result, "no-verdict", retryable=True)


def _bad_verdict(why: str, result: ExecResult) -> EnvironmentFailure:
    return _failure(f"The grader's verdict cannot be read: {why}.", result, "bad-verdict", retryable=False)


def _failure(detail: str, result: ExecResult, kind: str, *, retryable: bool) -> EnvironmentFailure:
    said = f"{result.stdout.text}\n{result.stderr.text}".strip()[-TAIL_CHARACTERS:]
    hint = f"The end of the grader's log: {said}" if said else "The grader said nothing."
    return EnvironmentFailure(detail, hint=hint, kind=kind, retryable=retryable)


def _how(result: ExecResult) -> str:
    if result.lost:
        return f"its sandbox was lost ({result.lost})"
    if result.limit is not None:
        return f"it ran into its limit of {result.limit}"
    return f"signal {result.signal}" if result.signal is not None else f"exit code {result.exit_code}"
