"""The runtime docker: containers that isolate, bound, end, and leave nothing behind; faults of ours that raise."""

from __future__ import annotations

import asyncio
import gc
import json
import secrets
import time
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from headrace.errors import SandboxFailure
from headrace_sandbox.conformance.leftovers import pids_with_mark
from headrace_sandbox.host.seccomp import ARCHITECTURES, FAMILIES
from headrace_sandbox.host.supervisor import this_supervisor
from headrace_sandbox.result import ExecResult, Limits
from headrace_sandbox.runtimes.base import PythonProgram, SandboxCommand
from headrace_sandbox.runtimes.docker import stream_watch
from headrace_sandbox.runtimes.docker.container_settings import BOOT, EXPIRES, OWNER, boot_id, seccomp_profile
from headrace_sandbox.runtimes.docker.daemon import Daemon, Streams
from headrace_sandbox.runtimes.docker.runtime import DockerRuntime
from headrace_sandbox.runtimes.docker.sandbox import DockerSessionHost
from headrace_sandbox.runtimes.docker.stream_watch import StreamFrameReader, StreamWatcher
from headrace_sandbox.runtimes.registry import make_runtime
from headrace_sandbox.runtimes.self_test import self_test
from tests.leaks import descriptors
from tests.sandbox.runtimes.docker.docker_daemon import DockerDaemon
from tests.sandbox.runtimes.docker.fixtures import DockerSetup

pytestmark = pytest.mark.component("docker")

Code = Callable[..., Awaitable[ExecResult]]


@pytest.fixture
async def runtime(docker: DockerSetup) -> AsyncIterator[DockerRuntime]:
    made_ = DockerRuntime(docker.daemon.host, docker.python)
    yield made_
    await made_.close()


@pytest.fixture
async def code(runtime: DockerRuntime) -> Code:
    async def run(text: str, *, stdin: bytes = b"", files: dict[str, bytes] | None = None, **limits: Any) -> ExecResult:
        program = PythonProgram(code=text, stdin=stdin, files=files or {})
        return await runtime.run_code(program, Limits(**{"wall_s": 30.0, **limits}))

    return run


async def containers(host: str) -> list[dict[str, Any]]:
    daemon = Daemon(host)
    found: list[dict[str, Any]] = await daemon.call(lambda client: client.containers(all=True))
    daemon.close()
    return found


# Isolation --------------------------------------------------------------------------------------------------------


async def test_docker_passes_the_self_test(docker: DockerSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", docker.daemon.host)
    monkeypatch.setenv("HEADRACE_DOCKER_IMAGE", docker.python)
    runtime = make_runtime("docker")
    tried = await self_test(runtime)
    await runtime.close()
    assert tried.missing == []
    assert "no privileges" in tried.proven


async def test_the_filter_refuses_the_same_sockets_and_system_calls_as_elsewhere(code: Code) -> None:
    result = await code(
        "import socket, json, os, ctypes\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "found = {}\n"
        "for family in range(-1, 50):\n"
        "    descriptor = libc.socket(family, socket.SOCK_RAW if family == 17 else socket.SOCK_STREAM, 0)\n"
        "    found[family] = ctypes.get_errno() if descriptor < 0 else 0\n"
        "    ctypes.set_errno(0)\n"
        "numbers = {'keyctl': 250, 'bpf': 321, 'io_uring_setup': 425, 'unshare': 272, 'ptrace': 101}\n"
        "for name, number in numbers.items():\n"
        "    libc.syscall(number, 0, 0, 0, 0, 0)\n"
        "    found[name] = ctypes.get_errno()\n"
        "    ctypes.set_errno(0)\n"
        "libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0)\n"
        "found['clone'] = ctypes.get_errno()\n"
        "for mode in (0o020666, 0o060666, 0o010666):\n"
        "    try:\n"
        "        os.mknod(f'n{mode}', mode, os.makedev(1, 3))\n"
        "        found[oct(mode)] = 0\n"
        "    except OSError as error:\n"
        "        found[oct(mode)] = error.errno\n"
        "print(json.dumps(found))\n"
    )
    found = json.loads(result.stdout.text)
    for family in range(-1, 50):
        assert (found.pop(str(family)) == 97) == (family not in FAMILIES), family
    assert found == dict.fromkeys(("keyctl", "bpf", "io_uring_setup", "unshare", "ptrace", "clone"), 1) | {
        "0o20666": 1,
        "0o60666": 1,
        "0o10666": 0,
    }


async def test_a_program_cannot_reach_process_1_of_its_container(code: Code) -> None:
    result = await code(
        "import os, signal\n"
        "def tries(what, *arguments):\n"
        "    try:\n"
        "        what(*arguments)\n"
        "    except PermissionError:\n"
        "        return 'no'\n"
        "    return 'yes'\n"
        "print(os.getuid(), os.getgid(), os.getgroups())\n"
        "print([tries(os.kill, 1, number) for number in (9, 19, 15)], tries(open, '/proc/1/environ'),\n"
        "      tries(open, '/proc/1/mem', 'r+b'), tries(os.listdir, '/proc/1/fd'),\n"
        "      tries(open, '/proc/1/oom_score_adj', 'w'))\n"
    )
    assert result.stdout.text == "1000 1000 [1000]\n['no', 'no', 'no'] no no no no\n"


async def test_files_are_bounded_in_bytes_and_number_in_every_writable_folder(code: Code) -> None:
    result = await code(
        "import os, errno\n"
        "for folder in ('/scratch', '/tmp', '/dev/shm'):\n"
        "    try:\n"
        "        open(folder + '/x', 'wb').write(bytes(9 << 20))\n"
        "    except OSError as error:\n"
        "        print(errno.errorcode[error.errno], end=' ')\n"
        "    os.unlink(folder + '/x')\n"
        "    try:\n"
        "        for number in range(300_000):\n"
        "            open(f'{folder}/{number}', 'w').close()\n"
        "    except OSError as error:\n"
        "        print(errno.errorcode[error.errno], number < 10_000)\n"
        "print([name for name in sorted(os.listdir('/')) if os.access('/' + name, os.W_OK)])\n",
        disk_bytes=8 << 20,
        file_bytes=64 << 20,
    )
    assert result.stdout.text.splitlines() == ["ENOSPC ENOSPC True"] * 3 + ["['scratch', 'tmp']"]


def test_the_filter_equals_that_of_the_other_runtimes_on_every_architecture() -> None:
    for machine, table in ARCHITECTURES.items():
        profile = seccomp_profile(machine)
        assert profile["architectures"] == [f"SCMP_ARCH_{machine.upper()}"]
        refused = profile["syscalls"][0]
        assert (set(refused["names"]), refused["errnoRet"]) == (set(table.refused), 1)
    with pytest.raises(SandboxFailure) as caught:
        seccomp_profile("sparc")
    assert caught.value.kind == "no-filter"


# Results and limits --------------------------------------------------------------------------------------------------


async def test_a_result_has_the_exit_status_that_the_daemon_reported(code: Code, runtime: DockerRuntime) -> None:
    for text, expected in (
        ("raise SystemExit(7)", (7, None, None, "program")),
        ("import os\nos._exit(0)", (0, None, None, "")),
        ("import os\nos.kill(os.getpid(), 9)", (None, 9, None, "program")),
        ("print('Error response from daemon: OCI runtime exec failed')\n1 / 0", (1, None, None, "program")),
    ):
        result = await code(text)
        assert (result.exit_code, result.signal, result.limit, result.fault) == expected
        assert result.lost is None
    assert "Error response" in result.stdout.text
    lines = result.stderr.text.splitlines()
    assert (lines[0], lines[-1]) == ("Traceback (most recent call last):", "ZeroDivisionError: division by zero")
    assert all("main.py" in line for line in lines if "File" in line)
    missing = await runtime.run(SandboxCommand(arguments=["no-such-program"]), Limits())
    assert (missing.exit_code, missing.fault) == (127, "program")
    assert "no-such-program" in missing.stderr.text


async def test_limits_end_a_program_and_are_named(code: Code) -> None:
    slow, greedy, loud, busy = await asyncio.gather(
        code("import time\nprint('so far', flush=True)\ntime.sleep(60)", wall_s=4.0),
        code("held = bytearray(400 << 20)"),
        code("while True:\n    print('y' * 10_000)", output_bytes=8 << 20),
        code("while True:\n    pass", cpu_s=0.3),
    )
    assert (slow.limit, slow.exit_code, slow.stdout.text) == ("time", None, "so far\n")
    assert (greedy.limit, greedy.fault, greedy.usage.memory_kills) == ("memory", "limit", 1)
    assert (loud.limit, loud.stdout.truncated) == ("output", True)
    assert len(loud.stdout.head) + len(loud.stdout.tail) == 64 << 10
    assert (busy.limit, busy.exit_code) == ("cpu", None)
    assert (busy.usage.cpu_s or 0) >= 0.3


async def test_a_limit_of_more_processors_than_the_machine_has_is_accepted(code: Code) -> None:
    assert (await code("print(1)", cpus=1000.0)).stdout.text == "1\n"


async def test_endless_output_is_held_in_bounded_memory(code: Code) -> None:
    await code("")
    tracemalloc.start()
    try:
        loud = await code("while True:\n    print('y' * 100_000)", output_bytes=96 << 20)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (loud.limit, loud.stdout.total_bytes > 96 << 20) == ("output", True)
    assert peak_bytes < 8 << 20


async def test_a_fork_bomb_runs_into_the_limit_of_processes(code: Code) -> None:
    result = await code(
        "import os\nfor _ in range(200):\n    if os.fork() == 0:\n        os.read(os.pipe()[0], 1)", pids=30
    )
    assert (result.limit, result.exit_code, result.fault) == ("pids", 1, "limit")
    assert result.usage.refused_pids > 0


async def test_a_program_that_fails_with_a_full_scratch_folder_ran_into_its_disk(
    code: Code, docker: DockerSetup
) -> None:
    fill = "import os\ntry:\n    open('x', 'wb').write(bytes(2 << 20))\nexcept OSError:\n    pass\n"
    for text, expected in (
        (f"{fill}raise SystemExit(3)", (3, "disk", "limit")),
        (fill, (0, None, "")),
        (f"{fill}os.unlink('x')\nraise SystemExit(3)", (3, None, "program")),
    ):
        result = await code(text, disk_bytes=1 << 20)
        assert (result.exit_code, result.limit, result.fault) == expected


async def test_background_processes_do_not_delay_a_result(runtime: DockerRuntime) -> None:
    mark = secrets.token_hex(8)
    script = "(setsid sleep 300 >/dev/null 2>&1 &); sleep 300 & (sleep 9; echo late) & echo started"
    result = await runtime.run(SandboxCommand(arguments=["bash", "-c", f"{script} # {mark}"]), Limits(wall_s=30))
    assert (result.exit_code, result.stdout.text, result.limit) == (0, "started\n", None)
    assert not pids_with_mark(mark)


async def test_a_program_that_kills_all_it_can_spares_our_processes(code: Code) -> None:
    result = await code("import os, time\nos.kill(-1, 9)\nprint('still here', flush=True)\ntime.sleep(0.2)")
    assert (result.signal, result.limit, result.fault, result.lost) == (9, None, "program", None)


async def test_input_and_output_are_whole_bytes(code: Code, runtime: DockerRuntime) -> None:
    result = await code(
        "import sys\nsys.stdout.buffer.write(sys.stdin.buffer.read()[::-1])", stdin=bytes(range(256)) * 4000
    )
    assert result.stdout.total_bytes == 256 * 4000
    assert result.stdout.head[:256] == bytes(range(256))[::-1]
    unread = await runtime.run(SandboxCommand(arguments=["echo", "unread"], stdin=b"x" * 1_000_000), Limits())
    assert unread.stdout.text == "unread\n"
    assert (await runtime.run(SandboxCommand(arguments=["cat"]), Limits())).stdout.text == ""


async def test_a_program_has_only_its_own_files_and_variables(runtime: DockerRuntime) -> None:
    listing = "import os, json\nprint(json.dumps([dict(os.environ), open('a/b.bin', 'rb').read().hex()]))"
    command = SandboxCommand(
        arguments=["python3", "-c", listing], files={"a/b.bin": b"\xff\0"}, environment={"NAME": "a value"}
    )
    variables, content = json.loads((await runtime.run(command, Limits())).stdout.text)
    assert content == "ff00"
    assert variables.pop("NAME") == "a value"
    assert variables.keys() <= {"PATH", "HOME", "LANG", "PWD", "SHLVL", "_", "LC_CTYPE"}
    for path in ("/etc/x", "../x", "a/../../x"):
        with pytest.raises(SandboxFailure) as caught:
            await runtime.run(SandboxCommand(arguments=["true"], files={path: b""}), Limits())
        assert caught.value.kind == "bad-path"


# Images ---------------------------------------------------------------------------------------------------------------


async def test_any_image_runs_a_command_that_it_has(docker: DockerSetup) -> None:
    for image in (docker.shell, docker.bare):
        runtime = DockerRuntime(docker.daemon.host, image)
        assert (await runtime.run(SandboxCommand(arguments=["cat"], stdin=b"in"), Limits())).stdout.text == "in"
        assert (await runtime.run(SandboxCommand(arguments=["no-such"]), Limits())).exit_code == 127
        endless = await runtime.run(SandboxCommand(arguments=["cat", "/dev/zero"]), Limits(output_bytes=1 << 20))
        assert (endless.limit, endless.fault) == ("output", "limit")
        with pytest.raises(SandboxFailure, match="python3") as caught:
            await runtime.run_code(PythonProgram(code=""), Limits())
        assert caught.value.kind == "image-unfit"
        await runtime.close()


async def test_files_enter_an_image_without_python_by_its_tar(docker: DockerSetup) -> None:
    runtime = DockerRuntime(docker.daemon.host, docker.shell)
    result = await runtime.run(SandboxCommand(arguments=["cat", "a/b"], files={"a/b": b"content"}), Limits())
    assert result.stdout.text == "content"
    await runtime.close()


async def test_an_unnamed_or_missing_image_is_our_failure_with_a_remedy(
    docker: DockerSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEADRACE_DOCKER_IMAGE", raising=False)
    for image, kind, hint in ((None, "no-image", "HEADRACE_DOCKER_IMAGE"), ("no/such:image", "image-missing", "Pull")):
        runtime = DockerRuntime(docker.daemon.host, image)
        with pytest.raises(SandboxFailure) as caught:
            await runtime.run(SandboxCommand(arguments=["true"]), Limits())
        assert (caught.value.kind, caught.value.retryable) == (kind, False)
        assert hint in caught.value.hint
        await runtime.close()


# Faults of ours -------------------------------------------------------------------------------------------------------


async def until_started(host: str) -> str:
    async with asyncio.timeout(30):
        while True:
            found = [entry for entry in await containers(host) if entry["State"] == "running"]
            if found:
                return str(found[0]["Id"])
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("how", ["killed", "removed"])
async def test_a_container_that_is_ended_from_outside_is_our_failure(docker: DockerSetup, code: Code, how: str) -> None:
    await code("")
    mark = secrets.token_hex(8)
    running = asyncio.ensure_future(code(f"import os\nos.execv('/bin/sleep', ['{mark}', '60'])"))
    daemon = Daemon(docker.daemon.host)
    id_ = await until_started(docker.daemon.host)
    async with asyncio.timeout(20):
        while not pids_with_mark(mark):
            await asyncio.sleep(0.02)
    if how == "killed":
        await daemon.call(lambda client: client.kill(id_))
    else:
        await daemon.call(lambda client: client.remove_container(id_, force=True))
    daemon.close()
    with pytest.raises(SandboxFailure) as caught:
        await running
    assert (caught.value.kind, caught.value.retryable) == ("sandbox-lost", True)


def test_a_missing_daemon_is_our_failure_with_a_remedy() -> None:
    for host, kind in (("unix:///no/such/socket", "daemon-unreachable"), ("ssh://somewhere", "bad-address")):
        with pytest.raises(SandboxFailure) as caught:
            DockerRuntime(host, "any")
        assert caught.value.kind == kind
        assert "DOCKER_HOST" in caught.value.hint


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_daemon_that_dies_under_a_program_is_our_failure() -> None:
    from tests.sandbox.runtimes.docker import images

    daemon = DockerDaemon()
    try:
        daemon.start()
        runtime = DockerRuntime(daemon.host, daemon.load("shell", images.SHELL))
        await runtime.run(SandboxCommand(arguments=["true"]), Limits())
        running = asyncio.ensure_future(runtime.run(SandboxCommand(arguments=["sleep", "60"]), Limits(wall_s=60)))
        await until_started(daemon.host)
        daemon.kill()
        with pytest.raises(SandboxFailure) as caught:
            await running
        assert (caught.value.kind, caught.value.retryable) == ("daemon-unreachable", True)
        await runtime.close()
    finally:
        daemon.stop()
        gc.collect()  # the SDK leaves the socket of a connection that was refused to the collector


# Leftovers ------------------------------------------------------------------------------------------------------


async def test_executions_leave_no_container_group_descriptor_or_task(docker: DockerSetup, code: Code) -> None:
    await code("")
    before = descriptors(collect=True)
    await asyncio.gather(*(code("open('x', 'w').write('x')") for _ in range(4)))
    stopped = asyncio.ensure_future(code("import time\ntime.sleep(60)"))
    await until_started(docker.daemon.host)
    stopped.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopped
    assert await containers(docker.daemon.host) == []
    assert docker.daemon.groups() == []
    assert len(asyncio.all_tasks()) == 1
    assert descriptors() == before


async def test_sweep_removes_what_a_dead_supervisor_left_and_nothing_else(
    docker: DockerSetup, runtime: DockerRuntime
) -> None:
    daemon = Daemon(docker.daemon.host)
    mine, boot = str(this_supervisor()), boot_id()
    dead = mine.replace("-", "-9", 1)
    later, past = f"{time.time() + 600:.0f}", f"{time.time() - 1:.0f}"
    for name, labels in {
        "dead": {OWNER: dead, BOOT: boot, EXPIRES: later},
        "expired": {OWNER: mine, BOOT: boot, EXPIRES: past},
        "elsewhere": {OWNER: dead, BOOT: "another", EXPIRES: later},
        "mine": {OWNER: mine, BOOT: boot, EXPIRES: later},
        "foreign": {},
    }.items():
        config = {"Image": docker.shell, "Cmd": ["sleep", "60"], "Labels": labels}
        await daemon.call(lambda client, c=config, n=name: client.create_container_from_config(c, n))
    try:
        assert await runtime.sweep() == 2
        left = {entry["Names"][0] for entry in await containers(docker.daemon.host)}
        assert left == {"/elsewhere", "/mine", "/foreign"}
    finally:
        for entry in await containers(docker.daemon.host):
            await daemon.call(lambda client, e=entry: client.remove_container(e["Id"], force=True))
        daemon.close()


# Parts ----------------------------------------------------------------------------------------------------------------


def framed(frames: list[tuple[int, bytes]]) -> bytes:
    return b"".join(bytes([kind, 0, 0, 0]) + len(data).to_bytes(4, "big") + data for kind, data in frames)


def test_frames_are_read_however_the_data_is_cut() -> None:
    whole = framed(FRAMES)
    for step in (1, 3, 8, 9, 1000):
        heard: list[tuple[int, bytes]] = []
        frames = StreamFrameReader(lambda kind, data: heard.append((kind, data)))  # noqa: B023 - used in this round only
        for at in range(0, len(whole), step):
            frames.feed(whole[at : at + step])
        assert b"".join(data for kind, data in heard if kind == 1) == b"abcdef"
        assert b"".join(data for kind, data in heard if kind == 2) == b"x" * 300


async def test_a_session_host_that_is_cancelled_at_its_start_closes_its_connection() -> None:
    writer = Mock(spec=asyncio.StreamWriter, transport=Mock())
    host = DockerSessionHost(Streams(asyncio.StreamReader(), writer), AsyncMock())
    hello = asyncio.ensure_future(host.wait_started())
    await asyncio.sleep(0)
    hello.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hello
    writer.transport.abort.assert_called_once()
    await asyncio.wait([host._reading])
    assert host._reading.cancelled()


FRAMES = [(1, b"abc"), (2, b"x" * 300), (1, b""), (1, b"def")]


async def test_data_of_the_other_stream_before_the_start_mark_is_kept() -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(framed([(2, b"early"), (1, b"."), (1, b"out")]))
    reader.feed_eof()
    writer = Mock(spec=asyncio.StreamWriter, drain=AsyncMock(), transport=Mock())
    seen = await StreamWatcher(Streams(reader, writer), Limits(), [], lambda: None, list, marked=True).run(b"")
    assert (seen.started, seen.stdout.head, seen.stderr.head) == (True, b"out", b"early")
    writer.transport.abort.assert_called_once()


async def test_a_program_that_the_daemon_does_not_start_is_our_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_watch, "START_S", 0.05)
    reader = asyncio.StreamReader()

    async def kill() -> None:
        reader.feed_eof()

    writer = Mock(spec=asyncio.StreamWriter, drain=AsyncMock(), transport=Mock())
    watcher = StreamWatcher(Streams(reader, writer), Limits(), [kill], lambda: None, list, marked=True)
    with pytest.raises(SandboxFailure) as caught:
        await watcher.run(b"")
    assert (caught.value.kind, caught.value.retryable) == ("sandbox-not-made", True)
