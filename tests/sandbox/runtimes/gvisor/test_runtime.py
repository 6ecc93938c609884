"""The runtime gvisor: its own promises, beyond those of every runtime."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import stat
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.errors import SandboxFailure
from headrace_sandbox.host.cgroups.detection import NoDriver
from headrace_sandbox.host.reaper import reap
from headrace_sandbox.host.supervisor import MADE_FOLDER, state_folder, this_supervisor
from headrace_sandbox.result import ExecResult, Limits
from headrace_sandbox.runtimes.base import PythonProgram, SandboxCommand, Template
from headrace_sandbox.runtimes.gvisor.runtime import GvisorRuntime
from headrace_sandbox.runtimes.gvisor.sandbox import GvisorSandbox
from tests.sandbox.runtimes.bubblewrap.test_background_processes import CASES
from tests.sandbox.runtimes.docker.images import rootfs

pytestmark = pytest.mark.component("gvisor")

LIMITS = Limits(wall_s=20.0)


@pytest.fixture
async def gvisor() -> AsyncIterator[GvisorRuntime]:
    runtime = GvisorRuntime()
    yield runtime
    await runtime.close()
    assert kept() == []
    assert sandboxes() == []


def kept() -> list[Path]:
    """The folders of this process's sandboxes."""
    return list((state_folder() / MADE_FOLDER).glob(f"{this_supervisor()}-gvisor-*/*"))


def sandboxes(kind: str = "runsc") -> list[int]:
    """Processes of the sandboxes of this process. ``kind``: in their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_text()
        except OSError:
            continue
        if f"/{this_supervisor()}-gvisor-" in line and kind in line:
            found.append(int(folder.name))
    return found


async def shell(runtime: GvisorRuntime, script: str, **limits: float) -> ExecResult:
    return await runtime.run(SandboxCommand(arguments=["sh", "-c", script]), Limits(**{"wall_s": 20.0, **limits}))


async def until(what: str) -> list[int]:
    """Wait for a process of a sandbox of ours whose command line has this."""
    async with asyncio.timeout(30):
        while not (found := sandboxes(what)):
            await asyncio.sleep(0.01)
    return found


async def test_a_sandbox_is_a_kernel_of_its_own(gvisor: GvisorRuntime) -> None:
    result = await shell(gvisor, "cat /proc/version; id -u; ls /; ls /tmp /sys")
    assert os.uname().release not in result.stdout.text
    assert "Linux version 4.4.0" in result.stdout.text
    assert "\n1000\n" in result.stdout.text
    assert result.isolation.versions["platform"] == "systrap"
    assert result.isolation.versions["runsc"]


async def test_python_runs_with_its_files_input_and_arguments(gvisor: GvisorRuntime) -> None:
    program = PythonProgram(
        code="import sys, helper\nprint(sys.argv[1:], helper.x, len(sys.stdin.read()), open('a/b').read())",
        arguments=["one"],
        stdin=b"i" * 300_000,
        files={"helper.py": b"x = 7", "a/b": b"deep"},
        environment={"X": "1"},
    )
    result = await gvisor.run_code(program, LIMITS)
    assert (result.stdout.text, result.stderr.text, result.fault) == ("['one'] 7 300000 deep\n", "", "")


@pytest.mark.parametrize(
    ("script", "exit_code", "number"),
    [("exit 137", 137, None), ("kill -9 $$", None, 9), ("kill -SEGV $$", None, 11), ("no-such-program", 127, None)],
)
async def test_an_exit_code_is_not_taken_for_a_signal(
    gvisor: GvisorRuntime, script: str, exit_code: int | None, number: int | None
) -> None:
    result = await shell(gvisor, script)
    assert (result.exit_code, result.signal, result.fault) == (exit_code, number, "program")


async def test_any_finite_time_is_accepted(gvisor: GvisorRuntime) -> None:
    assert (await gvisor.run(SandboxCommand(arguments=["true"]), Limits(wall_s=1e300))).exit_code == 0


async def test_a_command_that_exceeds_its_time_is_killed_and_its_output_is_kept(gvisor: GvisorRuntime) -> None:
    result = await shell(gvisor, "trap '' TERM INT; echo so far; sleep 60 & wait; sleep 60", wall_s=1.0)
    assert (result.limit, result.exit_code, result.signal, result.stdout.text) == ("time", None, None, "so far\n")


async def test_a_background_child_does_not_delay_a_result(gvisor: GvisorRuntime) -> None:
    result = await shell(gvisor, "setsid sleep 60 & sleep 60 & echo started")
    assert (result.stdout.text, result.fault) == ("started\n", "")
    assert result.wall_s < 10


@pytest.mark.component("cgroups")
async def test_memory_of_all_processes_together_is_bounded(gvisor: GvisorRuntime) -> None:
    code = "import os\nfor _ in range(4):\n    if os.fork() == 0:\n        break\nheld = bytearray(60 << 20)\nos.wait()"
    result = await gvisor.run_code(PythonProgram(code=code), Limits(wall_s=20.0, memory_bytes=64 << 20))
    assert (result.limit, result.fault, result.lost) == ("memory", "limit", None)
    assert (await shell(gvisor, "echo fine")).stdout.text == "fine\n"


async def test_processes_are_bounded_inside_and_the_kernel_survives_it(gvisor: GvisorRuntime) -> None:
    code = "import os, time\nwhile True:\n    if os.fork() == 0:\n        time.sleep(60)\n        os._exit(0)"
    result = await gvisor.run_code(PythonProgram(code=code), Limits(wall_s=20.0, pids=32))
    assert "Resource temporarily unavailable" in result.stderr.text
    assert (result.exit_code, result.limit, result.fault) == (1, "pids", "limit")


async def test_a_command_that_fails_in_a_full_sandbox_ran_into_its_disk(gvisor: GvisorRuntime) -> None:
    sandbox = await gvisor.open(Template(limits=Limits(disk_bytes=1 << 20)), 60.0)
    session = await sandbox.session("bash")
    assert (await session.run("false", LIMITS)).limit is None
    result = await sandbox.run(SandboxCommand(arguments=["sh", "-c", "head -c 2000000 /dev/zero >x; exit 3"]), LIMITS)
    assert (result.exit_code, result.limit, result.fault) == (3, "disk", "limit")
    result = await session.run("false", LIMITS)
    assert (result.exit_code, result.limit, result.fault) == (1, "disk", "limit")
    assert (await sandbox.run(SandboxCommand(arguments=["true"]), LIMITS)).limit is None
    result = await sandbox.run(SandboxCommand(arguments=["sh", "-c", "rm x; exit 3"]), LIMITS)
    assert (result.exit_code, result.limit, result.fault) == (3, None, "program")
    await sandbox.close()


@pytest.mark.component("cgroups")
async def test_a_kernel_that_the_machine_refuses_a_thread_ran_into_the_limit_of_its_program(
    gvisor: GvisorRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace_sandbox.runtimes.gvisor.kernel.KERNEL_THREADS", 120)
    monkeypatch.setattr("headrace_sandbox.runtimes.gvisor.kernel.THREADS_PER_PROCESS", 0)
    forks = "import os, time\nwhile True:\n    if os.fork() == 0:\n        time.sleep(60)"
    sandbox = await gvisor.open(Template(limits=Limits(pids=400, memory_bytes=1 << 30)), 60.0)
    result = await sandbox.run(SandboxCommand(arguments=["python3", "-c", forks]), LIMITS)
    assert (result.limit, result.exit_code, result.fault) == ("pids", None, "program")
    assert "limit of processes" in (result.lost or "")


async def test_without_control_groups_rlimits_inside_bound() -> None:
    runtime = GvisorRuntime(NoDriver())
    code = "held = [bytearray(10_000_000) for _ in range(1000)]"
    result = await runtime.run_code(PythonProgram(code=code), LIMITS)
    assert "MemoryError" in result.stderr.text
    assert "memory_bytes" not in result.isolation.active
    await runtime.close()
    assert sandboxes() == []


async def test_a_sandbox_that_is_killed_from_outside_is_a_failure_of_ours(gvisor: GvisorRuntime) -> None:
    running = asyncio.ensure_future(shell(gvisor, "echo here; sleep 60"))
    (kernel,) = await until("runsc-sandbox")
    # The program may or may not have started: it is ours either way.
    os.kill(kernel, signal.SIGKILL)
    with pytest.raises(SandboxFailure) as caught:
        await running
    assert caught.value.kind in ("sandbox-lost", "sandbox-not-made")
    assert caught.value.retryable


async def test_a_cancelled_call_leaves_nothing(gvisor: GvisorRuntime) -> None:
    running = asyncio.ensure_future(shell(gvisor, "sleep 60"))
    await until("runsc-sandbox")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert sandboxes() == []


async def test_a_sandbox_ends_with_its_supervisor() -> None:
    code = """
import asyncio
from headrace_sandbox.result import Limits
from headrace_sandbox.runtimes.base import SandboxCommand
from headrace_sandbox.host.supervisor import this_supervisor
from headrace_sandbox.runtimes.gvisor.runtime import GvisorRuntime
print(this_supervisor(), flush=True)
asyncio.run(GvisorRuntime().run(SandboxCommand(arguments=["sleep", "300"]), Limits(wall_s=300)))
"""
    supervisor = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None
    mark = f"/{supervisor.stdout.readline().strip()}-gvisor-"

    def processes() -> list[Path]:
        return [path for path in Path("/proc").glob("[0-9]*/cmdline") if mark in _read(path)]

    async with asyncio.timeout(30):
        while not any("runsc-sandbox" in _read(path) for path in processes()):
            await asyncio.sleep(0.01)
        supervisor.kill()
        supervisor.wait()
        supervisor.stdout.close()
        while processes():
            await asyncio.sleep(0.01)
    folder = state_folder() / MADE_FOLDER / mark.strip("/").removesuffix("-")
    assert list(folder.parent.glob(f"{folder.name}-*"))
    reap()
    assert not list(folder.parent.glob(f"{folder.name}-*"))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


# Persistent sandboxes -----------------------------------------------------------------------------------------------


@pytest.fixture
async def sandbox(gvisor: GvisorRuntime) -> GvisorSandbox:
    return await gvisor.open(Template(files={"given": b"given"}, limits=Limits(memory_bytes=128 << 20, pids=24)), 120.0)


def command(script: str) -> SandboxCommand:
    return SandboxCommand(arguments=["bash", "-c", script])


async def test_commands_share_files_and_leave_nothing_else(sandbox: GvisorSandbox) -> None:
    script = "cat given; echo more >y; setsid sleep 300 >/dev/null 2>&1 & (sleep 300; true) & exit 3"
    result = await sandbox.run(command(script), LIMITS)
    assert (result.stdout.text, result.exit_code) == ("given", 3)
    result = await sandbox.run(command("cat y; cat /proc/[0-9]*/comm; true"), LIMITS)
    assert result.stdout.text.split() == ["more", "python3", "bash"]


async def test_a_command_that_exceeds_its_time_is_killed_inside_too(sandbox: GvisorSandbox) -> None:
    loop = "trap '' TERM; (while :; do echo >>beat; sleep 0.02; done) & echo so far; sleep 300"
    result = await sandbox.run(command(loop), Limits(wall_s=1.0))
    assert (result.limit, result.stdout.text, result.lost) == ("time", "so far\n", None)
    first = await sandbox.run(command("wc -l <beat; sleep 0.5; wc -l <beat"), LIMITS)
    once, again = first.stdout.text.splitlines()
    assert once == again != "0"


async def test_output_of_concurrent_commands_is_kept_apart(sandbox: GvisorSandbox) -> None:
    async def lines(word: str) -> ExecResult:
        script = f"for i in $(seq 300); do echo {word}-$i-{'x' * 400}; done"
        return await sandbox.run(command(script), Limits(wall_s=60.0, kept_bytes=1 << 20))

    for word, result in zip("abc", await asyncio.gather(*map(lines, "abc")), strict=True):
        assert result.stdout.text.splitlines() == [f"{word}-{n}-{'x' * 400}" for n in range(1, 301)]


async def test_large_output_is_truncated_and_the_sandbox_goes_on(sandbox: GvisorSandbox) -> None:
    result = await sandbox.run(command("yes"), Limits(wall_s=20.0, output_bytes=4 << 20, kept_bytes=100))
    assert (result.limit, result.fault, len(result.stdout.head)) == ("output", "limit", 50)
    assert (await sandbox.run(command("echo fine"), LIMITS)).stdout.text == "fine\n"


async def test_sessions_keep_their_state_and_end_with_a_reset(sandbox: GvisorSandbox) -> None:
    shell, python = await sandbox.session("bash"), await sandbox.session("python")
    await shell.run("x=5; sleep 300 &", LIMITS)
    assert (await shell.run("echo $x; false", LIMITS)).exit_code == 1
    result = await shell.run("sleep 300", Limits(wall_s=0.5))
    assert (result.limit, result.lost) == ("time", None)
    assert (await shell.run("echo $x $(jobs -r | wc -l)", LIMITS)).stdout.text == "5 1\n"
    await python.run("import json\nx = 6", LIMITS)
    result = await python.run("while True:\n    pass", Limits(wall_s=0.5))
    assert (result.limit, "KeyboardInterrupt" in result.stderr.text) == ("time", True)
    assert (await python.run("json.dumps(x * 7)", LIMITS)).stdout.text == "'42'\n"
    await sandbox.run(command("rm given; mkdir d; touch /dev/shm/x; ipcmk -Q"), LIMITS)
    await sandbox.reset()
    assert [found.path for found in await sandbox.list()] == ["given"]
    result = await sandbox.run(command("ls /dev/shm; set -- /proc/[0-9]*; echo $#; ipcs -q | grep -c 0x"), LIMITS)
    assert result.stdout.text.split() == ["2", "0"]
    with pytest.raises(SandboxFailure, match="closed"):
        await shell.run("true", LIMITS)


async def test_a_background_process_does_not_delay_a_cell_and_ends_with_its_session(
    sandbox: GvisorSandbox,
) -> None:
    for script, expected in CASES.args[1]:
        result = await sandbox.run(command(script), Limits(wall_s=10.0))
        assert (result.exit_code, result.limit) == (0, None), script
        assert result.stdout.text.replace("y\n", "") == expected
        session = await sandbox.session("bash")
        result = await session.run(script, Limits(wall_s=10.0))
        assert (result.exit_code, result.limit, result.lost) == (0, None, None), script
        assert result.stdout.text.replace("y\n", "") == expected
        await session.close()
    session = await sandbox.session("bash")
    await session.run("while :; do echo >>beat; sleep 0.02; done & until [ -s beat ]; do :; done", LIMITS)
    result = await session.run("sleep 300 | cat", Limits(wall_s=1.0))
    assert (result.limit, result.fault, result.lost) == ("time", "limit", None)
    await session.close()
    once, again = (await sandbox.run(command("wc -l <beat; sleep 0.5; wc -l <beat"), LIMITS)).stdout.text.splitlines()
    assert once == again != "0"


async def test_files_go_in_and_out_and_no_link_is_followed(sandbox: GvisorSandbox) -> None:
    content = bytes(range(256)) * 2000
    await sandbox.write("a/b", content)
    assert await sandbox.read("a/b", len(content)) == content
    await sandbox.upload(await sandbox.download("a", 1 << 20), "copy")
    assert await sandbox.read("copy/b", len(content)) == content
    # gVisor follows a link that is opened as a folder, even where it is asked not to.
    await sandbox.run(command("ln -s / root; ln -s a link"), LIMITS)
    for path in ("root/scratch/given", "link/b"):
        with pytest.raises(SandboxFailure) as caught:
            await sandbox.read(path, 1 << 20)
        assert caught.value.kind == "bad-path"
        with pytest.raises(SandboxFailure):
            await sandbox.write(path, b"x")


@pytest.mark.component("cgroups")
async def test_without_memory_a_process_is_killed_or_the_sandbox_is_lost_and_later_calls_say_so(
    sandbox: GvisorSandbox,
) -> None:
    session = await sandbox.session("bash")
    hungry = "python3 -c 'held = [bytearray(10_000_000) for _ in range(1000)]'"
    result = await session.run(hungry, LIMITS)
    assert (result.limit, result.fault, result.lost) == ("memory", "limit", None)
    assert (await session.run("echo ok", LIMITS)).stdout.text == "ok\n"
    many = "for i in $(seq 8); do (python3 -c 'held = bytearray(40 << 20); import time; time.sleep(9)') & done; wait"
    result = await session.run(many, LIMITS)
    assert (result.limit, result.fault) == ("memory", "program")
    assert "limit of memory" in (result.lost or "")
    assert (await session.run("echo ok", LIMITS)).lost == result.lost
    assert (await sandbox.run(command("echo ok"), LIMITS)).lost == result.lost
    with pytest.raises(SandboxFailure) as caught:
        await sandbox.read("given", 10)
    assert (caught.value.kind, caught.value.retryable) == ("sandbox-lost", False)


async def test_a_fork_bomb_in_a_session_is_refused_and_the_session_goes_on(sandbox: GvisorSandbox) -> None:
    session = await sandbox.session("bash")
    forks = "import os, time\nwhile True:\n    if os.fork() == 0:\n        time.sleep(300)"
    result = await sandbox.run(SandboxCommand(arguments=["python3", "-c", forks]), LIMITS)
    assert (result.limit, result.fault) == ("pids", "limit")
    assert (await session.run("echo fine", LIMITS)).stdout.text == "fine\n"


async def test_a_sandbox_ends_at_its_expiry_by_itself(gvisor: GvisorRuntime) -> None:
    sandbox = await gvisor.open(Template(), 2.0)
    with pytest.raises(SandboxFailure) as caught:
        await sandbox.run(command("sleep 300"), LIMITS)
    assert (caught.value.kind, caught.value.retryable) == ("expired", True)
    async with asyncio.timeout(20):
        while sandboxes("runsc-sandbox"):
            await asyncio.sleep(0.01)


async def test_an_image_is_a_folder_with_the_files_of_a_system_and_is_not_changed(
    gvisor: GvisorRuntime, tmp_path: Path
) -> None:
    with pytest.raises(SandboxFailure) as caught:
        await gvisor.open(Template(image=str(tmp_path)), 60.0)
    assert caught.value.kind == "bad-image"
    image = tmp_path / "image"
    with tarfile.open(fileobj=io.BytesIO(rootfs(["bash", "python3", "cat", "rm"]))) as tar:
        tar.extraction_filter = lambda member, path: member  # unchanged, because it is trusted
        tar.extractall(image)
    (image / "etc" / "motd").write_text("of the image\n")
    sandbox = await gvisor.open(Template(image=str(image), files={"given": b"given\n"}), 60.0)
    script = "cat /etc/motd given; echo x >/tmp/x; echo x >/scratch/x; ! rm /etc/motd && ! type ls"
    result = await sandbox.run(command(script), LIMITS)
    assert (result.stdout.text, result.exit_code) == ("of the image\ngiven\n", 0)
    assert not list(image.glob("tmp/*"))
    assert not list(image.glob("scratch/*"))


async def test_no_program_reaches_the_process_that_reports_its_end(sandbox: GvisorSandbox) -> None:
    code = """
import os
print(os.getresuid(), os.listdir('/proc/self/fd'))
for number in (1, 2, 9, 10, 11, 15, 19):
    try:
        os.kill(1, number)
        print('sent', number)
    except PermissionError:
        pass
for attempt in (lambda: os.seteuid(0), lambda: open('/proc/1/mem', 'r+b'), lambda: os.listdir('/proc/1/root')):
    try:
        attempt()
        print('done')
    except PermissionError:
        pass
"""
    result = await sandbox.run(SandboxCommand(arguments=["python3", "-c", code]), LIMITS)
    assert result.stdout.text == "(1000, 1000, 1000) ['0', '1', '2', '3']\n"
    session = await sandbox.session("bash")
    assert (await session.run("kill -9 1; kill -9 -1; echo alive", LIMITS)).stdout.text == "alive\n"


# A runsc that does not work -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", ["exit 1", "sleep 300", "echo runsc version release-20221219.0"])
async def test_a_runsc_that_does_not_work_is_refused(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "runsc"
    broken.write_text(f'#!/bin/sh\n[ "$1" != --version ] || {{ echo runsc version old; exit; }}\n{script}\n')
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("HEADRACE_RUNSC", str(broken))
    monkeypatch.setattr("headrace_sandbox.runtimes.gvisor.connection.READY_S", 2.0)
    runtime = GvisorRuntime()
    with pytest.raises(SandboxFailure, match="gVisor could not make a sandbox") as caught:
        await runtime.run(SandboxCommand(arguments=["true"]), LIMITS)
    assert "make parts" in caught.value.hint
    await runtime.close()
    assert kept() == []


def test_a_missing_runsc_is_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_RUNSC", "/nonexistent/runsc")
    with pytest.raises(SandboxFailure, match="runsc is not installed at /nonexistent/runsc") as caught:
        GvisorRuntime()
    assert (caught.value.kind, caught.value.retryable) == ("runtime-missing", False)
