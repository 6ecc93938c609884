"""Verdict files: the reward that a grader wrote for a task, read only after the grader succeeded.

* The file holds one decimal number in the declared range, in ASCII, and at most one line end. Nothing else is a reward.
* A grader that did not exit with 0, or left no file, gave no verdict: a failure, never a reward of 0.
* Anything at the file's path is removed before the grader starts: a submission cannot write a verdict.
* A failure carries the end of the grader's output.

The guarantee: a number that was there before the grader, or that the grader's exit code did not confirm, is never
taken as a verdict. In a fresh sandbox (``grade_by_file``) the submission runs only if the grader starts it.
Not guaranteed: a session of a persistent sandbox may have left a background process that writes there after the grader,
so close sessions first. A grader that runs the submission in its own sandbox shares its user with it, so the submission
may write the file itself. Such a grader should only inspect the submission's files, or test it by cases (``grade``).
"""

from __future__ import annotations

import re
from typing import Protocol

from headrace.errors import EnvironmentFailure, SandboxFailure
from headrace_sandbox.host.layout import SCRATCH
from headrace_sandbox.result import ExecResult, Limits
from headrace_sandbox.runtimes.base import Sandbox, SandboxCommand, Template

VERDICT = "verdict"
"""The verdict file, below the scratch folder; a grader's environment names it as VERDICT."""

WORK = "work"
"""The folder with a submission's files, in a fresh sandbox; a grader's environment names it as WORK."""

SPARE_S = 600.0
"""Seconds that a fresh sandbox lives beyond the time limit of its grader, which may wait for processors."""

MOST_BYTES = 64
"""Largest size of a verdict file: more than any number needs."""

TAIL_CHARACTERS = 2000
"""Characters of the grader's output that a failure quotes."""

REMOVE = 'chmod u+rwx "$2"; [ -L "$1" ] || chmod -R u+rwx -- "$1"; rm -rf -- "$1"'
"""A shell script; old content may be folders that even their owner cannot change without chmod."""

_NUMBER = re.compile(rb"-?[0-9]{1,17}(\.[0-9]{1,17})?\n?")


class SandboxOpener(Protocol):
    """The interface of a runtime, or of a pool, that opens sandboxes."""

    async def open(self, template: Template, ttl_s: float) -> Sandbox: ...


async def grade_by_file(
    runtime: SandboxOpener,
    work: bytes,
    grader: SandboxCommand,
    limits: Limits,
    *,
    lowest: float = 0.0,
    highest: float = 1.0,
) -> float:
    """The reward for a submission's files (``work``, a tar archive), graded in a fresh sandbox that has only them and
    the grader's files.

    Raises EnvironmentFailure ``no-verdict`` or ``bad-verdict``, and SandboxFailure.
    """
    sandbox = await runtime.open(Template(limits=limits), limits.wall_s + SPARE_S)
    try:
        await sandbox.upload(work, WORK)
        return await verdict_of(sandbox, grader, limits, lowest=lowest, highest=highest)
    finally:
        await sandbox.close()


async def verdict_of(
    sandbox: Sandbox, grader: SandboxCommand, limits: Limits, *, lowest: float = 0.0, highest: float = 1.0
) -> float:
    """The reward that a grader gives in a persistent sandbox. Raises as ``grade_by_file``.

    Close its sessions before: their background processes share a user with the grader, and could write the file.
    """
    await _remove(sandbox)
    command = SandboxCommand(
        arguments=grader.arguments,
        stdin=grader.stdin,
        files=grader.files,
        environment={"VERDICT": VERDICT, "WORK": WORK, **grader.environment},
    )
    result = await sandbox.run(command, limits)
    if result.fault:
        raise _no_verdict(f"The grader failed: {_describe_end(result)}.", result)
    try:
        content = await sandbox.read(VERDICT, MOST_BYTES)
    except SandboxFailure as failure:
        if failure.kind == "no-such-file":
            raise _no_verdict("The grader ended and left no verdict.", result) from failure
        if failure.kind in ("file-too-large", "bad-path"):  # "bad-path": a folder, a link or a pipe is in its place
            raise _bad_verdict(failure.detail, result) from failure
        raise
    return _read(content, result, lowest, highest)


def _read(content: bytes, result: ExecResult, lowest: float, highest: float) -> float:
    if not content:
        raise _no_verdict("The grader left an empty verdict.", result)
    if not _NUMBER.fullmatch(content):
        raise _bad_verdict(f"{content!r} is not a decimal number", result)
    reward = float(content)
    if not lowest <= reward <= highest:
        raise _bad_verdict(f"{reward:g} is outside {lowest:g} to {highest:g}", result)
    return reward


async def _remove(sandbox: Sandbox) -> None:
    command = SandboxCommand(arguments=["sh", "-c", REMOVE, "sh", VERDICT, SCRATCH])
    result = await sandbox.run(command, Limits(wall_s=10.0))
    if result.fault:
        raise _no_verdict("The old content at the path of the verdict could not be removed.", result)


def _no_verdict(detail: str, result: ExecResult) -> EnvironmentFailure:
    """The failure ``no-verdict``; another attempt may succeed."""
    return _failure(detail, result, "no-verdict", retryable=True)


def _bad_verdict(why: str, result: ExecResult) -> EnvironmentFailure:
    return _failure(f"The grader's verdict cannot be read: {why}.", result, "bad-verdict", retryable=False)


def _failure(detail: str, result: ExecResult, kind: str, *, retryable: bool) -> EnvironmentFailure:
    log_tail = f"{result.stdout.text}\n{result.stderr.text}".strip()[-TAIL_CHARACTERS:]
    hint = f"The end of the grader's log: {log_tail}" if log_tail else "The grader wrote no log."
    return EnvironmentFailure(detail, hint=hint, kind=kind, retryable=retryable)


def _describe_end(result: ExecResult) -> str:
    if result.lost:
        return f"its sandbox was lost ({result.lost})"
    if result.limit is not None:
        return f"it ran into its limit of {result.limit}"
    return f"signal {result.signal}" if result.signal is not None else f"exit code {result.exit_code}"
