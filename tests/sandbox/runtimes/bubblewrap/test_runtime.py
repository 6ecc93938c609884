"""The runtime bubblewrap beside its isolation: results, limits, clean-up, and faults of ours that raise."""

from __future__ import annotations

import asyncio
import math
import os
import re
import secrets
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import SandboxFailure
from headrace_sandbox.conformance.leftovers import mounts, pids_with_mark
from headrace_sandbox.host.cgroups.cgroup import Cgroup
from headrace_sandbox.host.cgroups.detection import NoDriver
from headrace_sandbox.result import RANGES, Limits, Usage
from headrace_sandbox.runtimes.base import PythonProgram, SandboxCommand, Template
from headrace_sandbox.runtimes.bubblewrap import runtime as runtime_module
from headrace_sandbox.runtimes.bubblewrap.fork_server import ForkServer
from headrace_sandbox.runtimes.bubblewrap.runtime import BubblewrapRuntime
from headrace_sandbox.runtimes.bubblewrap.sandbox import BubblewrapSandbox
from tests.leaks import descriptors
from tests.sandbox.conftest import Run

pytestmark = pytest.mark.component("bubblewrap")


KERNEL = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2]))


def our_groups() -> list[Path]:
    return list(Path("/sys/fs/cgroup").glob(f"**/headrace/{os.getpid()}-*"))


async def test_executions_leave_no_process_group_mount_or_descriptor(run: Run) -> None:
    await asyncio.gather(*(run("print(1)") for _ in range(4)))  # from now on the slots and groups for four are kept
    before, mounted = descriptors(collect=True), mounts()
    groups = len(our_groups())
    await asyncio.gather(*(run("print(1)") for _ in range(4)))
    for _ in range(20):
        await run("open('x', 'w').write('x')")
    assert descriptors() == before
    assert mounts() == mounted
    assert len(our_groups()) == groups


def test_groups_are_removed_at_the_end() -> None:
    async def scenario() -> None:
        for runtime in (BubblewrapRuntime(), ForkServer()):
            program: Any = (
                SandboxCommand(arguments=["true"]) if isinstance(runtime, BubblewrapRuntime) else PythonProgram(code="")
            )
            await runtime.run(program, Limits())
            await runtime.close()

    before = our_groups()
    asyncio.run(scenario())
    assert our_groups() == before


async def test_files_exist_inside_and_paths_that_lead_out_are_refused(run: Run) -> None:
    result = await run("print(open('a/b/c.bin', 'rb').read())", files={"a/b/c.bin": b"\xff\0"})
    assert result.stdout.text == "b'\\xff\\x00'\n"
    before = descriptors(collect=True)
    for path in ("/etc/x", "../x", "a/../../x", "a//b", ""):
        with pytest.raises(SandboxFailure) as caught:
            await run("", files={path: b""})
        assert caught.value.kind == "bad-path"
    assert descriptors() == before


@pytest.mark.parametrize("bound", ["disk_bytes", "file_bytes"])
async def test_files_that_do_not_fit_are_refused_before_anything_is_made(run: Run, bound: str) -> None:
    assert (await run("", files={"a": bytes(1 << 20)}, **{bound: 1 << 20})).exit_code == 0
    with pytest.raises(SandboxFailure) as caught:
        await run("", files={"a": bytes((1 << 20) + 1)}, **{bound: 1 << 20})
    assert (caught.value.kind, caught.value.retryable) == ("disk-full", False)


async def test_input_of_a_megabyte_arrives_whole_and_may_be_left_unread(run: Run) -> None:
    result = await run("import sys\nprint(len(sys.stdin.read()))", stdin=b"x" * 1_000_000)
    assert result.stdout.text == "1000000\n"
    assert (await run("print('unread')", stdin=b"x" * 1_000_000)).stdout.text == "unread\n"


async def test_a_result_has_the_exit_status_that_the_kernel_reported(run: Run) -> None:
    for code, expected in (
        ("raise SystemExit(7)", (7, None, "program")),
        ("exit(5)", (5, None, "program")),
        ("quit()", (0, None, "")),
        ("import os\nos._exit(0)", (0, None, "")),
        ("import os\nos.kill(os.getpid(), 15)", (None, 15, "program")),
        ("1 / 0", (1, None, "program")),
        ("raise SystemExit('why')", (1, None, "program")),
    ):
        result = await run(code)
        assert (result.exit_code, result.signal, result.fault) == expected
    assert result.stderr.text == "why\n"


async def test_a_missing_command_and_one_that_cannot_run_end_as_in_a_shell(fresh: BubblewrapRuntime) -> None:
    for arguments, code in ((["nosuch"], 127), (["/nowhere/x"], 127), (["/usr"], 126), (["./data"], 126)):
        result = await fresh.run(SandboxCommand(arguments=arguments, files={"data": b"1"}), Limits())
        assert (result.exit_code, result.fault) == (code, "program")
        assert arguments[0] in result.stderr.text
    lying = ["sh", "-c", "echo 'bwrap: execvp x: No such file or directory' >&2; exit 1"]
    assert (await fresh.run(SandboxCommand(arguments=lying), Limits())).exit_code == 1


async def test_a_traceback_shows_the_program_alone(run: Run) -> None:
    result = await run("def f():\n    raise ValueError('hm')\nf()")
    lines = result.stderr.text.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "main.py" in lines[1]
    assert lines[-1] == "ValueError: hm"


async def test_the_time_to_make_a_sandbox_is_not_the_programs_time(run: Run) -> None:
    result = await run("import time\ntime.sleep(0.5)", wall_s=20.0)
    assert result.wall_s > 0.3  # the supervisor may read its clock late
    assert result.start_s > 0


async def test_a_result_names_the_parts_that_isolate_and_the_enforced_limits(run: Run) -> None:
    isolation = (await run("")).isolation
    assert isolation.runtime == "bubblewrap"
    assert isolation.versions.keys() == {"bubblewrap", "kernel", "cgroups"}
    assert {"wall_s", "output_bytes", "disk_bytes"} <= set(isolation.active)


async def test_without_control_groups_nothing_is_counted_and_the_result_says_so() -> None:
    runtime = BubblewrapRuntime(NoDriver())
    result = await runtime.run(SandboxCommand(arguments=["true"]), Limits())
    assert result.usage == Usage()
    assert "memory_bytes" not in result.isolation.active
    assert result.isolation.versions["cgroups"] == "none"


async def test_a_sandbox_that_cannot_be_made_is_our_failure(
    fresh: BubblewrapRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_module, "system_mounts", lambda: ["--ro-bind", "/no/such/folder", "/usr"])
    with pytest.raises(SandboxFailure, match="no/such/folder") as caught:
        await fresh.run(SandboxCommand(arguments=["true"]), Limits())
    assert (caught.value.kind, caught.value.retryable) == ("sandbox-not-made", True)


UNUSABLE_ENTRIES = [os.devnull, "/dev/full"]
"""Entries of a control group that no process can enter."""


class Full(NoDriver):
    def make(self, name: str) -> Cgroup:
        group = super().make(name)
        group.entries = UNUSABLE_ENTRIES
        return group


async def test_a_sandbox_or_fork_that_cannot_enter_its_group_is_not_made() -> None:
    runtime = BubblewrapRuntime(Full())
    with pytest.raises(SandboxFailure) as failure:
        await runtime.run(SandboxCommand(arguments=["true"]), Limits())
    assert failure.value.kind == "sandbox-not-made"
    with pytest.raises(SandboxFailure) as failure:
        await runtime.run_code(PythonProgram(code=""), Limits())
    assert failure.value.kind == "sandbox-lost"
    await runtime.close()


async def test_a_command_that_cannot_enter_the_group_of_its_sandbox_does_not_run() -> None:
    runtime = BubblewrapRuntime(NoDriver())
    sandbox = await runtime.open(Template(), 60.0)
    assert isinstance(sandbox, BubblewrapSandbox)
    assert sandbox._init is not None
    sandbox._init.group.entries = UNUSABLE_ENTRIES
    with pytest.raises(SandboxFailure, match="control group") as failure:
        await sandbox.run(SandboxCommand(arguments=["true"]), Limits())
    assert failure.value.kind == "sandbox-lost"
    await runtime.close()


@pytest.mark.parametrize("file_bytes", [1 << 20, 1000])  # a shell counts in blocks of 512
async def test_a_program_has_its_limits_to_the_byte(fresh: BubblewrapRuntime, file_bytes: int) -> None:
    limits = Limits(file_bytes=file_bytes, open_files=99)
    said = (await fresh.run(SandboxCommand(arguments=["cat", "/proc/self/limits"]), limits)).stdout.text
    found = re.findall(r"^Max (core file size|file size|open files) +(\d+) +(\d+) ", said, re.MULTILINE)
    assert {name: values for name, *values in found} == {
        "core file size": ["0", "0"],
        "file size": [f"{file_bytes}", f"{file_bytes}"],
        "open files": ["99", "99"],
    }


def test_a_missing_bubblewrap_is_reported_with_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxFailure, match="bwrap") as caught:
        BubblewrapRuntime()
    assert caught.value.kind == "runtime-missing"
    assert "apt-get install bubblewrap" in caught.value.hint


@pytest.mark.skipif(KERNEL < (6, 15), reason="before Linux 6.15 the kernel does not tell how another's child ended")
async def test_a_process_1_that_is_killed_from_outside_is_our_failure(run: Run) -> None:
    mark = secrets.token_hex(8)
    running = asyncio.ensure_future(run(f"import os\nos.execv('/bin/sleep', ['{mark}', '300'])", wall_s=30.0))
    async with asyncio.timeout(20):
        while not (found := pids_with_mark(mark)):
            await asyncio.sleep(0.01)
    first = int(Path(f"/proc/{found[0]}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(first, signal.SIGKILL)
    with pytest.raises(SandboxFailure) as caught:
        await running
    assert (caught.value.kind, caught.value.retryable) == ("sandbox-lost", True)


async def test_a_programs_signals_do_not_end_the_process_that_reports_its_end(run: Run) -> None:
    code = """
import os, signal
for number in signal.valid_signals():
    os.kill(1, number)
    signal.pidfd_send_signal(os.pidfd_open(1), number)
print('alive')
"""
    result = await run(code)
    assert (result.exit_code, result.stdout.text) == (0, "alive\n"), result.stderr.text


async def test_a_programs_own_signal_interrupts_it(run: Run) -> None:
    result = await run(
        "import os, signal\ntry:\n    os.kill(os.getpid(), 2)\nexcept KeyboardInterrupt:\n    print('yes')"
    )
    assert result.stdout.text == "yes\n"


async def test_a_fork_ends_as_the_interpreter_would(run: Run) -> None:
    code = """
import atexit, threading, time
atexit.register(print, 'exit')
threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()
print('main')
"""
    assert (await run(code)).stdout.text == "main\nthread\nexit\n"


@pytest.mark.component("cgroups")
async def test_memory_of_the_program_before_does_not_limit_the_next(run: Run) -> None:
    for _ in range(3):
        full = await run(
            "open('x', 'wb').write(bytes(56 << 20))", memory_bytes=64 << 20, disk_bytes=1 << 30, file_bytes=1 << 30
        )
        assert full.fault == "", (full.limit, full.stderr.text)
        assert full.usage.peak_memory_bytes > 56 << 20


FULL = """
import os
try:
    with open('x', 'wb') as file:
        file.write(bytes(2 << 20))
except OSError as error:
    print(error.strerror, flush=True)
"""


async def test_a_program_that_fails_while_its_scratch_folder_is_full_ran_into_its_disk(run: Run) -> None:
    for code, expected in (
        (f"{FULL}raise SystemExit(3)", (3, "disk", "limit")),
        (f"{FULL}os.kill(os.getpid(), 9)", (None, "disk", "limit")),
        (FULL, (0, None, "")),
        (
            f"{FULL}os.unlink('x')\nraise SystemExit(3)",
            (3, None, "program"),
        ),  # it freed the space, so its failure is its own
    ):
        result = await run(code, disk_bytes=1 << 20)
        assert result.stdout.text == "No space left on device\n", result.stderr.text
        assert (result.exit_code, result.limit, result.fault) == expected
    alone = await run("1 / 0", disk_bytes=1 << 20)
    assert (alone.exit_code, alone.limit, alone.fault) == (1, None, "program")


async def test_a_program_that_exceeded_the_size_of_a_file_ran_into_its_disk(run: Run) -> None:
    code = "import signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_DFL)\nopen('x', 'wb').write(bytes(2 << 20))"
    result = await run(code, file_bytes=1 << 20)
    assert (result.signal, result.limit, result.fault) == (signal.SIGXFSZ, "disk", "limit")


FILL = """
import socket, struct
held = []

def fill(make, message):
    for _ in range(40):
        receives, sends = make()
        receives.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        held.append(receives)
        receives.setblocking(False)
        sends.setblocking(False)
        for number in range(1000):
            try:
                sends.sendto(*message(receives))
            except OSError:
                break

def udp():
    receives, sends = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
    receives.bind(('127.0.0.1', 0))
    return receives, sends

def netlink():
    asks = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    return asks, asks

fill(udp, lambda receives: (bytes(50_000), receives.getsockname()))
interface = struct.pack('=IHHIIBBHiII', 32, 18, 1, 1, 0, 0, 0, 0, 1, 0, 0)
fill(netlink, lambda receives: (interface, (0, 0)))
got = 0
for receives in held:
    try:
        while True:
            got += len(receives.recv(1 << 20))
    except OSError:
        pass
print(got)
"""


@pytest.mark.component("cgroups")
async def test_data_in_sockets_stays_within_the_limit_of_memory(run: Run) -> None:
    result = await run(FILL, memory_bytes=64 << 20)
    assert result.limit == "memory" or int(result.stdout.text) < 16 << 20, result.stderr.text


async def test_process_1_is_reaped_where_it_becomes_a_child_of_the_supervisor() -> None:
    code = """
import asyncio, ctypes, os
from headrace_sandbox.result import Limits
from headrace_sandbox.runtimes.base import SandboxCommand
from headrace_sandbox.runtimes.bubblewrap.runtime import BubblewrapRuntime

async def main():
    runtime = BubblewrapRuntime()
    for _ in range(3):
        assert (await runtime.run(SandboxCommand(arguments=['true']), Limits())).exit_code == 0
    await runtime.close()

PR_SET_CHILD_SUBREAPER = 36  # as process 1 of a container is
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
asyncio.run(main())
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print('none left')
"""
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    assert (await child.communicate())[0] == b"none left\n"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("memory_bytes", value) for value in (-1, 0, 1 << 63)),
        *(("pids", value) for value in (-1, 0)),
        *(("cpus", value) for value in (-0.00001, 0.0, math.nan, math.inf)),
        *(("wall_s", value) for value in (-1.0, 0.0, math.nan, math.inf)),
        *(("cpu_s", value) for value in (-1.0, math.nan)),
        *(("disk_bytes", value) for value in (-1, 0)),
        *(("open_files", value) for value in (0, 1 << 20)),
        ("kept_bytes", -1),
        ("output_bytes", -1),
        ("file_bytes", -1),
    ],
)
def test_a_limit_outside_its_range_is_refused(name: str, value: Any) -> None:
    with pytest.raises(SandboxFailure, match=f"{name} is {value}") as caught:
        Limits(**{name: value})
    assert (caught.value.kind, caught.value.retryable) == ("bad-limit", False)


@pytest.mark.parametrize("name", sorted(RANGES))
async def test_the_smallest_limit_and_large_ones_are_accepted(run: Run, name: str) -> None:
    least, most = RANGES[name]
    much = min(most, 1 << 40)
    for value in (least, much):
        if (
            name not in ("memory_bytes", "wall_s", "cpu_s") or value == much
        ):  # the smallest of these ends a program at once
            result = await run("", **{name: type(getattr(Limits(), name) or 0.0)(value)})
            assert result.exit_code == 0, (value, result.stderr.text)


@pytest.mark.component("cgroups")
async def test_a_limit_of_memory_that_cannot_be_set_is_refused_and_leaves_no_group(run: Run) -> None:
    await run("")
    groups = len(our_groups())
    for _ in range(3):
        try:
            assert (await run("", memory_bytes=1)).limit == "memory"
        except SandboxFailure as failure:
            assert (failure.kind, failure.retryable) == ("bad-limit", False)  # noqa: PT017 - one of both
        assert (await run("")).exit_code == 0
    assert len(our_groups()) == groups


async def test_signals_that_this_process_ignores_have_their_default_effect_inside() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    runtime = BubblewrapRuntime()
    code = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    try:
        forked = await runtime.run_code(PythonProgram(code=code), Limits())
        fresh = await runtime.run(SandboxCommand(arguments=["/usr/bin/python3", "-c", code]), Limits())
    finally:
        await runtime.close()
        signal.signal(signal.SIGINT, before)
    assert (forked.stdout.text, fresh.stdout.text) == ("True\n", "True\n")


async def test_a_program_does_not_see_the_name_of_this_machine(run: Run) -> None:
    result = await run("import socket; print(socket.gethostname())")
    assert result.stdout.text == "sandbox\n"
