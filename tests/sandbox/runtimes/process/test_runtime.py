"""The runtime that isolates nothing: the limits that hold, and its report of those that do not."""

from __future__ import annotations

import json
import secrets
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.errors import SandboxFailure
from headrace_sandbox.conformance.leftovers import pids_with_mark
from headrace_sandbox.result import Limits
from headrace_sandbox.runtimes.base import PythonProgram, SandboxCommand, Template
from headrace_sandbox.runtimes.process.runtime import ProcessRuntime
from headrace_sandbox.runtimes.registry import make_runtime, ready_runtime
from tests.leaks import descriptors
from tests.sandbox.host.open_files import MOST_NEEDED, only_descriptors


@pytest.fixture
async def process() -> AsyncIterator[ProcessRuntime]:
    runtime = ProcessRuntime()
    yield runtime
    await runtime.close()


async def test_the_runtime_is_refused_unless_it_is_allowed() -> None:
    for made in (lambda: make_runtime("process"), None):
        with pytest.raises(SandboxFailure) as caught:
            made() if made else await ready_runtime("process")
        assert caught.value.kind == "unsafe"
    assert make_runtime("process", allow_unsafe=True).name == "process"


async def test_every_result_says_that_this_is_not_a_sandbox(process: ProcessRuntime) -> None:
    isolation = (await process.run(SandboxCommand(arguments=["true"]), Limits())).isolation
    assert (isolation.runtime, isolation.is_sandbox) == ("process", False)
    assert not {"memory_bytes", "pids", "cpus", "disk_bytes"} & set(isolation.active)


async def test_our_variables_do_not_reach_a_program_and_its_folder_is_removed(
    process: ProcessRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "x")
    code = "import os, json\nprint(json.dumps([os.getcwd(), dict(os.environ), open('a/b').read()]))"
    result = await process.run_code(
        PythonProgram(code=code, files={"a/b": b"c"}, environment={"GIVEN": "1"}), Limits(wall_s=20)
    )
    folder, variables, content = json.loads(result.stdout.text)
    assert {*variables} - {"LC_CTYPE"} == {"PATH", "HOME", "LANG", "GIVEN"}
    assert (variables["HOME"], content) == (folder, "c")
    assert not Path(folder).exists()


async def test_a_result_has_the_exit_status_that_the_kernel_reported(process: ProcessRuntime) -> None:
    for script, expected in (
        ("exit 7", (7, None, "program")),
        ("kill -TERM $$", (None, 15, "program")),
        ("true", (0, None, "")),
    ):
        result = await process.run(SandboxCommand(arguments=["sh", "-c", script]), Limits(wall_s=20))
        assert (result.exit_code, result.signal, result.fault) == expected
    missing = await process.run(SandboxCommand(arguments=["no-such-program"]), Limits(wall_s=20))
    assert (missing.exit_code, missing.stderr.text) == (127, "no-such-program: No such file or directory\n")


async def test_a_programs_process_group_is_killed_at_its_end(process: ProcessRuntime) -> None:
    mark = secrets.token_hex(8)
    result = await process.run(SandboxCommand(arguments=["bash", "-c", "sleep 300 & echo on", mark]), Limits(wall_s=20))
    assert result.stdout.text == "on\n"
    ended = await process.run(
        SandboxCommand(arguments=["bash", "-c", "(exec -a $0 sleep 300) & cat", mark], stdin=b""), Limits(wall_s=20)
    )
    assert ended.exit_code == 0
    assert not pids_with_mark(mark)


async def test_time_output_and_size_of_files_are_bounded(process: ProcessRuntime) -> None:
    for code, limits, limit in (
        ("while True: pass", Limits(wall_s=0.3), "time"),
        ("while True: print('x' * 1000)", Limits(output_bytes=1 << 20), "output"),
        ("while True: pass", Limits(wall_s=20, cpu_s=0.3), "cpu"),
    ):
        result = await process.run_code(PythonProgram(code=code), limits)
        assert (result.limit, result.fault, result.exit_code) == (limit, "limit", None)
    large = await process.run_code(
        PythonProgram(code="open('x', 'wb').truncate(1 << 40)"), Limits(wall_s=20, file_bytes=1 << 20)
    )
    assert "File too large" in large.stderr.text
    signalled = await process.run(
        SandboxCommand(arguments=["dd", "if=/dev/zero", "of=x", "bs=2M", "count=1"]),
        Limits(wall_s=20, file_bytes=1 << 20),
    )
    assert (signalled.signal, signalled.limit, signalled.fault) == (signal.SIGXFSZ, "disk", "limit")


async def test_usage_is_counted_from_outside(process: ProcessRuntime) -> None:
    result = await process.run_code(PythonProgram(code="for _ in range(3_000_000): pass"), Limits(wall_s=30))
    assert result.usage.cpu_s is not None
    assert result.usage.cpu_s > 0.02


async def test_executions_leave_no_descriptor(process: ProcessRuntime) -> None:
    await process.run(SandboxCommand(arguments=["true"]), Limits())
    before = descriptors(collect=True)
    for _ in range(5):
        await process.run(SandboxCommand(arguments=["true"]), Limits())
    assert descriptors() == before


async def test_a_call_without_enough_descriptors_is_our_failure_and_leaks_none(process: ProcessRuntime) -> None:
    await process.run_code(PythonProgram(code=""), Limits())
    before, failures = descriptors(collect=True), []
    for more in range(MOST_NEEDED):
        try:
            with only_descriptors(more):
                await process.run_code(PythonProgram(code=""), Limits())
        except SandboxFailure as failure:
            failures.append(failure)
    assert failures
    assert all(failure.retryable for failure in failures)
    assert descriptors() == before


async def test_any_processor_time_is_accepted_as_a_limit(process: ProcessRuntime) -> None:
    assert (await process.run(SandboxCommand(arguments=["true"]), Limits(cpu_s=1e300))).exit_code == 0


async def test_persistent_sandboxes_are_not_offered(process: ProcessRuntime) -> None:
    with pytest.raises(SandboxFailure) as caught:
        await process.open(Template(), 60)
    assert caught.value.kind == "not-offered"
