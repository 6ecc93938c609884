"""Persistent containers: commands, sessions, files, and their end."""

from __future__ import annotations

import asyncio
import io
import secrets
import tarfile
import time
from collections.abc import AsyncIterator

import pytest

from headrace.errors import SandboxFailure
from headrace_sandbox.conformance.leftovers import pids_with_mark
from headrace_sandbox.result import ExecResult, Limits
from headrace_sandbox.runtimes.base import FileInfo, Sandbox, SandboxCommand, Template
from headrace_sandbox.runtimes.docker.daemon import Daemon
from headrace_sandbox.runtimes.docker.runtime import DockerRuntime
from headrace_sandbox.runtimes.docker.sandbox import DockerSandbox
from tests.sandbox.runtimes.bubblewrap.test_background_processes import CASES as G15
from tests.sandbox.runtimes.docker.fixtures import DockerSetup
from tests.sandbox.runtimes.docker.test_runtime import containers

pytestmark = pytest.mark.component("docker")

LIMITS = Limits(wall_s=30.0)


@pytest.fixture
async def runtime(docker: DockerSetup) -> AsyncIterator[DockerRuntime]:
    made = DockerRuntime(docker.daemon.host, docker.python)
    yield made
    await made.close()


@pytest.fixture
async def sandbox(runtime: DockerRuntime) -> Sandbox:
    return await runtime.open(Template(files={"given/x.txt": b"given"}), 300.0)


def shell(script: str) -> SandboxCommand:
    return SandboxCommand(arguments=["bash", "-c", script])


def output_text(result: ExecResult) -> str:
    assert (result.fault, result.stderr.text, result.lost) == ("", "", None)
    return result.stdout.text


def daemon(mark: str) -> str:
    return f"(setsid bash -c 'exec -a {mark} sleep 300' >/dev/null 2>&1 &)"


async def until_marked(mark: str, *, wait_gone: bool = False) -> None:
    async with asyncio.timeout(10):
        while bool(pids_with_mark(mark)) is wait_gone:
            await asyncio.sleep(0.02)


async def test_commands_share_files_and_leave_nothing_else(sandbox: Sandbox) -> None:
    mark = secrets.token_hex(8)
    script = f"{daemon(mark)}; cat given/x.txt; echo more >y; until grep -qa {mark} /proc/*/cmdline; do :; done"
    assert output_text(await sandbox.run(shell(script), LIMITS)) == "given"
    await until_marked(mark, wait_gone=True)
    given = SandboxCommand(
        arguments=["bash", "-c", "cat; cat y a/b; echo $X; exit 3"], stdin=b"in ", files={"a/b": b"file "}
    )
    result = await sandbox.run(given, LIMITS)
    assert (result.stdout.text, result.exit_code, result.fault) == ("in more\nfile \n", 3, "program")


async def test_a_command_that_exceeds_its_time_is_ended_inside_and_its_sandbox_goes_on(sandbox: Sandbox) -> None:
    mark = secrets.token_hex(8)
    for script in (f"{daemon(mark)}; echo so far; sleep 300", f"{daemon(mark)}; kill -9 $PPID; sleep 300"):
        result = await sandbox.run(shell(script), Limits(wall_s=1.5))
        assert (result.exit_code, result.lost) == (None, None)
        assert not pids_with_mark(mark)
    assert output_text(await sandbox.run(shell("cat given/x.txt"), LIMITS)) == "given"
    loud = await sandbox.run(shell("yes"), Limits(output_bytes=1 << 20))
    assert (loud.limit, loud.lost) == ("output", None)


async def test_a_session_keeps_its_state_while_commands_run_beside_it(sandbox: Sandbox) -> None:
    mark = secrets.token_hex(8)
    bash, python = await asyncio.gather(sandbox.session("bash"), sandbox.session("python"))
    assert output_text(await bash.run(f"cd given; X=5; {daemon(mark)}", LIMITS)) == ""
    assert output_text(await python.run("x = 6\nx * 7", LIMITS)) == "42\n"
    await until_marked(mark)
    mark_of_command = secrets.token_hex(8)
    assert (
        output_text(await sandbox.run(shell(f"{daemon(mark_of_command)}; sleep 0.3; echo beside"), LIMITS))
        == "beside\n"
    )
    assert not pids_with_mark(mark_of_command)
    slow = await sandbox.run(shell("sleep 300"), Limits(wall_s=0.5))
    assert (slow.limit, slow.lost) == ("time", None)
    assert output_text(await bash.run("pwd; echo $X", LIMITS)) == "/scratch/given\n5\n"
    assert pids_with_mark(mark)
    late = await python.run("print('so far', flush=True)\nimport time\ntime.sleep(60)", Limits(wall_s=0.5))
    assert (late.limit, late.stdout.text, late.lost) == ("time", "so far\n", None)
    assert output_text(await python.run("x", LIMITS)) == "6\n"
    await bash.close()
    assert not pids_with_mark(mark)
    assert output_text(await python.run("x + 1", LIMITS)) == "7\n"


async def test_the_result_of_a_cell_that_ends_its_session_says_lost(sandbox: Sandbox) -> None:
    session = await sandbox.session("bash")
    result = await session.run("kill -9 -1", LIMITS)
    assert result.lost is not None
    assert result.fault == "program"
    assert output_text(await session.run("echo again", LIMITS)) == "again\n"


async def test_files_are_written_and_read_with_the_rights_of_programs(sandbox: Sandbox) -> None:
    await sandbox.write("a/b.bin", bytes(range(256)) * 100)
    assert await sandbox.read("a/b.bin", 25_600) == bytes(range(256)) * 100
    assert output_text(await sandbox.run(shell("mkfifo p; ln -s /etc l; wc -c <a/b.bin"), LIMITS)) == "25600\n"
    assert [(info.path, info.kind) for info in await sandbox.list()] == [
        ("a", "folder"),
        ("given", "folder"),
        ("l", "other"),
        ("p", "other"),
    ]
    assert await sandbox.list("given") == [FileInfo(path="given/x.txt", kind="file", size_bytes=5)]
    for path, kind in (("p", "bad-path"), ("l/passwd", "bad-path"), ("none", "no-such-file"), ("../x", "bad-path")):
        with pytest.raises(SandboxFailure) as caught:
            await sandbox.read(path, 100)
        assert caught.value.kind == kind
    packed = await sandbox.download("a", 1 << 20)
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        assert archive.getnames() == ["b.bin"]
    await sandbox.upload(packed, "copy")
    assert len(await sandbox.read("copy/b.bin", 1 << 20)) == 25_600
    with pytest.raises(SandboxFailure) as caught:
        await sandbox.write("large", bytes(20 << 20))
    assert caught.value.kind == "disk-full"


async def test_a_reset_restores_the_first_state(sandbox: Sandbox) -> None:
    session = await sandbox.session("bash")
    mark = secrets.token_hex(8)
    await session.run(f"echo >made; rm given/x.txt; {daemon(mark)}", LIMITS)
    await until_marked(mark)
    await sandbox.reset()
    assert not pids_with_mark(mark)
    assert [info.path for info in await sandbox.list()] == ["given"]
    assert await sandbox.read("given/x.txt", 100) == b"given"
    with pytest.raises(SandboxFailure) as caught:
        await session.run("echo", LIMITS)
    assert caught.value.kind == "closed"


async def test_a_program_whose_files_use_up_the_memory_is_never_our_failure(runtime: DockerRuntime) -> None:
    limits = Limits(memory_bytes=64 << 20, disk_bytes=256 << 20, file_bytes=1 << 30)
    sandbox = await runtime.open(Template(limits=limits), 300.0)
    result = await sandbox.run(shell("cat /dev/zero >x"), LIMITS)
    assert result.limit == "memory"
    for _ in range(6):
        after = await sandbox.run(SandboxCommand(arguments=["echo", "ok"]), LIMITS)
        assert after.lost is not None or after.limit == "memory" or after.stdout.text == "ok\n"
        assert after.stdout.text in ("", "ok\n")


async def test_a_container_ends_itself_at_its_expiry_and_with_its_supervisor(
    docker: DockerSetup, runtime: DockerRuntime
) -> None:
    sandbox = await runtime.open(Template(), 3.0)
    assert isinstance(sandbox, DockerSandbox)
    held = await runtime.open(Template(), 300.0)
    assert isinstance(held, DockerSandbox)
    assert held._container is not None
    assert held._container._init_input is not None
    held._container._init_input.end()  # as the kernel does for a process that was killed
    async with asyncio.timeout(20):
        while any(entry["State"] == "running" for entry in await containers(docker.daemon.host)):
            await asyncio.sleep(0.05)
    with pytest.raises(SandboxFailure) as caught:
        await sandbox.run(shell("echo"), LIMITS)
    assert caught.value.kind == "expired"
    with pytest.raises(SandboxFailure) as caught:
        await held.run(shell("echo"), LIMITS)
    assert caught.value.kind == "sandbox-lost"


async def test_an_image_without_python_takes_commands_and_files_and_names_what_it_lacks(docker: DockerSetup) -> None:
    runtime = DockerRuntime(docker.daemon.host, docker.python)
    sandbox = await runtime.open(Template(image=docker.shell, files={"a/b": b"content"}), 60.0)
    result = await sandbox.run(SandboxCommand(arguments=["cat", "a/b", "c"], files={"c": b"more"}), LIMITS)
    assert output_text(result) == "contentmore"
    mark = secrets.token_hex(8)
    await sandbox.run(
        SandboxCommand(arguments=["sh", "-c", f"setsid sh -c ': {mark}; sleep 300; :' & sleep 0.2"]), LIMITS
    )
    assert not pids_with_mark(mark)
    for call, lacks in ((sandbox.session("bash"), "python3"), (sandbox.read("a/b", 9), "python3")):
        with pytest.raises(SandboxFailure, match=lacks) as caught:
            await call
        assert caught.value.kind == "image-unfit"
    with pytest.raises(SandboxFailure) as caught:
        await runtime.open(Template(image=docker.bare), 60.0)
    assert caught.value.kind == "image-unfit"
    await runtime.close()


async def test_a_background_process_does_not_delay_a_command(runtime: DockerRuntime) -> None:
    sandbox = await runtime.open(Template(), 300.0)
    for script, expected in G15.args[1]:
        mark = secrets.token_hex(8)
        result = await sandbox.run(SandboxCommand(arguments=["bash", "-c", script, mark]), Limits(wall_s=30.0))
        assert (result.exit_code, result.limit, result.lost) == (0, None, None), script
        assert result.stdout.text.replace("y\n", "") == expected
        assert not pids_with_mark(mark)
    waits = SandboxCommand(arguments=["bash", "-c", "exec -a $0 sleep 300 | cat", mark])
    assert (await sandbox.run(waits, Limits(wall_s=1.0))).limit == "time"
    assert not pids_with_mark(mark)
    session = await sandbox.session("bash")
    for script, expected in G15.args[1]:
        cell = await session.run(f"export MARK={mark}; {script}", Limits(wall_s=30.0))
        assert (cell.exit_code in (0, 1), cell.limit, cell.lost) == (True, None, None), script
        assert cell.stdout.text.replace("y\n", "") == expected
    await session.close()
    assert output_text(await sandbox.run(shell(f"grep -sla {mark} /proc/[0-9]*/environ; true"), LIMITS)) == ""


@pytest.mark.parametrize("how", ["killed", "removed"])
async def test_a_sandbox_that_is_ended_from_outside_is_our_failure(
    docker: DockerSetup, sandbox: Sandbox, how: str
) -> None:
    assert isinstance(sandbox, DockerSandbox)
    session = await sandbox.session("bash")
    assert sandbox._container is not None
    name = sandbox._container.name
    daemon_ = Daemon(docker.daemon.host)
    if how == "killed":
        await daemon_.call(lambda client: client.kill(name))
    else:
        await daemon_.call(lambda client: client.remove_container(name, force=True))
    daemon_.close()
    for call in (session.run("echo", LIMITS), sandbox.run(shell("echo"), LIMITS), sandbox.list()):
        with pytest.raises(SandboxFailure) as caught:
            await call
        assert (caught.value.kind, caught.value.retryable) == ("sandbox-lost", True)


async def test_a_closed_runtime_leaves_nothing(docker: DockerSetup) -> None:
    runtime = DockerRuntime(docker.daemon.host, docker.python)
    sandbox = await runtime.open(Template(), 60.0)
    await sandbox.session("python")
    mark = secrets.token_hex(8)
    waits = asyncio.ensure_future(sandbox.run(shell(f"exec -a {mark} sleep 300"), LIMITS))
    await until_marked(mark)
    began = time.monotonic()
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits
    assert time.monotonic() - began < 10
    assert output_text(await sandbox.run(SandboxCommand(arguments=["echo", "ok"]), LIMITS)) == "ok\n"
    await runtime.close()
    assert await containers(docker.daemon.host) == []
    assert docker.daemon.groups() == []
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1
