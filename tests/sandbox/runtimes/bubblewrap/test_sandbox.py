"""Persistent sandboxes of bubblewrap: commands, limits, and their end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.errors import SandboxFailure
from headrace_sandbox.conformance.leftovers import descendants, mounts, pids_with_mark
from headrace_sandbox.host.cgroups.detection import NoDriver
from headrace_sandbox.result import Limits
from headrace_sandbox.runtimes.base import PythonProgram, Sandbox, SandboxCommand, Template
from headrace_sandbox.runtimes.bubblewrap.runtime import BubblewrapRuntime
from headrace_sandbox.runtimes.bubblewrap.sandbox import BubblewrapSandbox
from tests.leaks import descriptors
from tests.sandbox.runtimes.helpers import LIMITS, detached, output_of, python, wait_until

pytestmark = pytest.mark.component("bubblewrap")


async def test_commands_share_files_and_leave_nothing_else(sandbox: Sandbox) -> None:
    mark = secrets.token_hex(8)
    script = f"{detached(mark)} & cat given/x.txt; echo more >y; until grep -qa {mark} /proc/*/cmdline; do :; done"
    assert output_of(await sandbox.run(SandboxCommand(arguments=["bash", "-c", script]), LIMITS)) == "given"
    assert not pids_with_mark(mark)
    assert output_of(await sandbox.run(SandboxCommand(arguments=["cat", "y"]), LIMITS)) == "more\n"


async def test_a_command_has_its_own_input_files_environment_and_result(sandbox: Sandbox) -> None:
    command = SandboxCommand(
        arguments=["bash", "-c", "cat; cat a/b; echo $X; exit 3"],
        stdin=b"in ",
        files={"a/b": b"file "},
        environment={"X": "x"},
    )
    result = await sandbox.run(command, LIMITS)
    assert (result.stdout.text, result.exit_code, result.fault) == ("in file x\n", 3, "program")
    result = await sandbox.run(python("import os\nos.kill(os.getpid(), 15)"), LIMITS)
    assert (result.signal, result.fault) == (15, "program")
    result = await sandbox.run(SandboxCommand(arguments=["no-such-program"]), LIMITS)
    assert (result.exit_code, result.stderr.text) == (127, "no-such-program: No such file or directory\n")
    result = await sandbox.run(python("print('so far', flush=True)\nimport time\ntime.sleep(99)"), Limits(wall_s=1.0))
    assert (result.limit, result.exit_code, result.stdout.text) == ("time", None, "so far\n")
    result = await sandbox.run(SandboxCommand(arguments=["yes"]), Limits(output_bytes=1 << 20))
    assert (result.limit, result.fault) == ("output", "limit")


async def test_a_command_that_fails_in_a_full_sandbox_ran_into_its_disk(fresh: BubblewrapRuntime) -> None:
    sandbox = await fresh.open(Template(limits=Limits(disk_bytes=1 << 20)), 60.0)
    session = await sandbox.session("bash")
    fill, clear = python("open('x', 'wb').write(bytes(2 << 20))"), SandboxCommand(arguments=["rm", "x"])
    assert (await session.run("false", LIMITS)).limit is None
    result = await sandbox.run(fill, LIMITS)
    assert (result.exit_code, result.limit, result.fault) == (1, "disk", "limit")
    result = await session.run("cp x y", LIMITS)
    assert (result.exit_code, result.limit, result.fault) == (1, "disk", "limit")
    with pytest.raises(SandboxFailure) as caught:
        await sandbox.read("none", 1)
    assert caught.value.kind == "no-such-file"  # the program's own error counts, not the full disk
    assert (await session.run("true", LIMITS)).limit is None
    assert (await sandbox.run(clear, LIMITS)).limit is None
    assert (await session.run("rm y; false", LIMITS)).limit is None


@pytest.mark.component("cgroups")
async def test_limits_hold_for_the_whole_sandbox(fresh: BubblewrapRuntime) -> None:
    sandbox = await fresh.open(Template(limits=Limits(memory_bytes=64 << 20, pids=20)), 60.0)
    session = await sandbox.session("bash")
    hungry = "held = [bytearray(10_000_000) for _ in range(1000)]"
    result = await sandbox.run(python(hungry), LIMITS)
    assert (result.signal, result.limit, result.fault) == (9, "memory", "limit")
    result = await session.run(f"python3 -c '{hungry}'", LIMITS)
    assert (result.exit_code, result.limit, result.fault, result.lost) == (137, "memory", "limit", None)
    forks = "import os, time\nwhile True:\n    if os.fork() == 0:\n        time.sleep(300)"
    result = await sandbox.run(python(forks), LIMITS)
    assert (result.limit, result.fault) == ("pids", "limit")
    assert output_of(await session.run("echo fine", LIMITS)) == "fine\n"


@pytest.mark.component("cgroups")
async def test_programs_count_the_processors_that_they_may_use(fresh: BubblewrapRuntime) -> None:
    sandbox = await fresh.open(Template(limits=Limits(cpus=1.0)), 60.0)
    session = await sandbox.session("bash")
    assert output_of(await session.run("nproc", LIMITS)) == "1\n"
    assert output_of(await sandbox.run(SandboxCommand(arguments=["nproc"]), LIMITS)) == "1\n"


async def test_a_program_sees_neither_the_init_process_nor_other_programs(sandbox: Sandbox) -> None:
    session = await sandbox.session("bash")
    await session.run("sleep 300 &", LIMITS)
    look = """
import os
print(sorted(int(name) for name in os.listdir('/proc') if name.isdigit()))
for path in ('/proc/1/mem', '/proc/1/environ', '/proc/1/root/etc', '/proc/1/fd'):
    try:
        os.listdir(path) if path.endswith(('fd', 'etc')) else open(path).read(1)
        print('reached', path)
    except OSError as error:
        print(error.strerror)
for number in (9, 19, 2, 15):
    os.kill(1, number)
"""
    result = await sandbox.run(python(look), LIMITS)
    assert output_of(result).splitlines() == ["[1, 2]", *["Permission denied"] * 4]
    status = await session.run("grep -E 'NoNewPrivs|CapEff|CapBnd|Seccomp:' /proc/self/status; id -u", LIMITS)
    assert output_of(status).split()[1::2] == ["0" * 16, "0" * 16, "1", "2"]


async def test_an_idle_sandbox_uses_less_than_ten_megabytes(fresh: BubblewrapRuntime) -> None:
    sandbox = await fresh.open(Template(), 60.0)
    output_of(await sandbox.run(python("print(1)"), LIMITS))
    assert isinstance(sandbox, BubblewrapSandbox)
    assert sandbox._init is not None
    bubblewrap = sandbox._init._process.pid
    proportional = 0
    for pid in {bubblewrap, *descendants(bubblewrap)}:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        proportional += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    assert proportional < 10_000


async def test_a_reset_sandbox_has_its_first_state(sandbox: Sandbox) -> None:
    session = await sandbox.session("bash")
    mark = secrets.token_hex(8)
    cell = f"exec -a {mark} sleep 300 & rm -r given; echo left >left; echo left >/dev/shm/left; kill -0 $!"
    output_of(await session.run(cell, LIMITS))
    await wait_until(lambda: bool(pids_with_mark(mark)))
    before = await canary(sandbox)
    await sandbox.reset()
    assert not pids_with_mark(mark)
    after, again = await canary(sandbox), await sandbox.session("bash")
    assert "left" in before
    assert "left" not in after
    assert output_of(await again.run("cat given/x.txt; ls /dev/shm", LIMITS)) == "given"
    with pytest.raises(SandboxFailure) as caught:
        await session.run("echo", LIMITS)
    assert caught.value.kind == "closed"


async def canary(sandbox: Sandbox) -> str:
    return output_of(
        await sandbox.run(SandboxCommand(arguments=["ls", "-lR", "/scratch", "/dev/shm", "/proc/sysvipc"]), LIMITS)
    )


async def test_a_closed_sandbox_leaves_no_process_group_mount_or_descriptor(fresh: BubblewrapRuntime) -> None:
    async def life() -> None:
        sandbox = await fresh.open(Template(files={"x": b"x"}), 60.0)
        for kind in ("bash", "python"):
            session = await sandbox.session(kind)  # type: ignore[arg-type]
            await session.run(f"sleep {mark} & x=1" if kind == "bash" else "x=1", LIMITS)
        await sandbox.run(python("print(1)"), LIMITS)
        await sandbox.list()
        await sandbox.close()
        await sandbox.close()
        with pytest.raises(SandboxFailure) as caught:
            await sandbox.list()
        assert caught.value.kind == "closed"

    mark = f"{300 + secrets.randbelow(1 << 20)}.5"
    await life()
    before, mounted = descriptors(collect=True), mounts()
    for _ in range(3):
        await life()
    assert descriptors() == before
    assert mounts() == mounted
    assert not pids_with_mark(mark)


async def test_a_sandbox_ends_at_its_expiry(fresh: BubblewrapRuntime) -> None:
    sandbox = await fresh.open(Template(), 1.5)
    session = await sandbox.session("bash")
    mark = secrets.token_hex(8)
    with pytest.raises(SandboxFailure) as caught:
        await session.run(f"bash -c 'exec -a {mark} sleep 300'", LIMITS)
    assert (caught.value.kind, caught.value.retryable) == ("expired", True)
    await wait_until(lambda: not pids_with_mark(mark))
    with pytest.raises(SandboxFailure) as caught:
        await sandbox.list()
    assert caught.value.kind == "expired"


def is_removed(group: Path) -> bool:
    try:
        group.rmdir()
    except OSError:
        return False
    return True


SUPERVISOR = """
import asyncio, sys
from headrace_sandbox.result import Limits
from headrace_sandbox.runtimes.base import Template
from headrace_sandbox.runtimes.bubblewrap.runtime import BubblewrapRuntime

async def main():
    runtime = BubblewrapRuntime()
    sandbox = await runtime.open(Template(), float(sys.argv[2]))
    session = await sandbox.session("bash")
    await session.run(f"setsid bash -c 'exec -a {sys.argv[1]} sleep 300' & sleep 0.2", Limits())
    print("ready", flush=True)
    await asyncio.sleep(300)

asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["killed", "stopped for good"])
async def test_a_sandbox_ends_with_its_supervisor_or_at_its_expiry(how: str) -> None:
    mark = secrets.token_hex(8)
    ttl_s = 300.0 if how == "killed" else 8.0
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SUPERVISOR, mark, f"{ttl_s}", stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        assert await process.stdout.readline() == b"ready\n"
        assert pids_with_mark(f"{mark}\x00300")
        process.send_signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        await wait_until(lambda: not pids_with_mark(f"{mark}\x00300"), 20.0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        for group in Path("/sys/fs/cgroup").glob(f"**/headrace/{process.pid}-*"):
            await wait_until(functools.partial(is_removed, group))  # once its processes are gone


async def test_sessions_and_files_work_without_control_groups() -> None:
    runtime = BubblewrapRuntime(NoDriver())
    sandbox = await runtime.open(Template(files={"x": b"x"}, limits=Limits(pids=30)), 60.0)
    session = await sandbox.session("bash")
    assert output_of(await session.run("cat x", LIMITS)) == "x"
    forks = "import os, time\nwhile True:\n    if os.fork() == 0:\n        time.sleep(300)"
    assert "Resource temporarily unavailable" in (await sandbox.run(python(forks), LIMITS)).stderr.text
    assert "MemoryError" in (await sandbox.run(python("x = bytearray(1 << 30)"), LIMITS)).stderr.text
    assert output_of(await session.run("cat x", LIMITS)) == "x"
    await runtime.close()


async def test_a_template_with_an_image_is_refused(fresh: BubblewrapRuntime) -> None:
    with pytest.raises(SandboxFailure) as caught:
        await fresh.open(Template(image="debian:12"), 60.0)
    assert caught.value.kind == "not-offered"


async def test_a_program_does_not_see_the_name_of_its_supervisor(fresh: BubblewrapRuntime, sandbox: Sandbox) -> None:
    look = SandboxCommand(arguments=["cat", "/proc/self/cgroup"])
    session = await sandbox.session("bash")
    code = "print(open('/proc/self/cgroup').read())"
    for result in (
        await fresh.run(look, LIMITS),
        await fresh.run_code(PythonProgram(code=code), LIMITS),
        await sandbox.run(look, LIMITS),
        await session.run("cat /proc/self/cgroup", LIMITS),
    ):
        assert f"{os.getpid()}-" not in output_of(result)


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, math.nan, math.inf])
async def test_a_ttl_that_is_not_a_positive_finite_number_is_refused(ttl_s: float) -> None:
    runtime = BubblewrapRuntime()
    with pytest.raises(SandboxFailure, match="ttl_s") as caught:
        await runtime.open(Template(), ttl_s)
    assert (caught.value.kind, caught.value.retryable) == ("bad-limit", False)
    await runtime.close()


def our_groups() -> set[Path]:
    return set(Path("/sys/fs/cgroup").glob(f"**/headrace/{os.getpid()}-*"))


def left(*, collect: bool = False) -> tuple[int, set[int], set[Path]]:
    """Descriptors, processes and control groups of this process."""
    return descriptors(collect=collect), descendants(os.getpid()), our_groups()


@pytest.mark.parametrize("what", ["open", "close", "reset"])
async def test_a_call_that_is_cancelled_half_way_leaves_nothing(what: str) -> None:
    await (runtime := BubblewrapRuntime()).close()
    before = left(collect=True)
    for turns in range(24):
        opened = None if what == "open" else await runtime.open(Template(), 300.0)
        if opened is None:
            call = asyncio.ensure_future(opening(runtime))
        else:
            await opened.session("bash")
            call = asyncio.ensure_future(opened.close() if what == "close" else opened.reset())
        for _ in range(turns):
            await asyncio.sleep(0.001 if opened is None else 0)
        call.cancel()
        await asyncio.wait([call])
        if opened is not None:
            await opened.close()
    await runtime.close()
    assert left() == before


@pytest.mark.parametrize("what", ["run", "run_code"])
async def test_an_execution_that_is_cancelled_at_any_time_leaves_nothing(what: str) -> None:
    await (runtime := BubblewrapRuntime()).close()
    before = left(collect=True)
    for turns in range(40):
        running = (
            runtime.run(SandboxCommand(arguments=["sleep", "60"]), LIMITS)
            if what == "run"
            else runtime.run_code(PythonProgram(code="import time; time.sleep(60)", domain=f"{turns // 4}"), LIMITS)
        )
        call = asyncio.ensure_future(running)
        for _ in range(turns):
            await asyncio.sleep(0.001)
        call.cancel()
        await asyncio.wait([call])
    await runtime.close()
    assert left() == before


async def opening(runtime: BubblewrapRuntime) -> None:
    await (await runtime.open(Template(), 300.0)).close()
