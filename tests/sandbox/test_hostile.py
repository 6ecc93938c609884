"""What hostile programs do, and what must come of it: the same for a fresh sandbox and for a fork.

The numbers are those of the reference's list of cases.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from pathlib import Path

import pytest

from headrace_sandbox.cgroups import NoDriver
from headrace_sandbox.result import ExecResult, Limits
from headrace_sandbox.runtimes.base import Command, PythonProgram
from headrace_sandbox.runtimes.bubblewrap import Bubblewrap
from headrace_sandbox.runtimes.forkserver import ForkServer
from tests.sandbox.conftest import Run

pytestmark = pytest.mark.component("bubblewrap")

CALL = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    result = libc.syscall(number, *arguments)
    return errno.errorcode[ctypes.get_errno()] if result < 0 else result
"""
"""``call(number, ...)`` in a program: the name of the error, or the result."""


def said(result: ExecResult) -> str:
    assert result.fault == "", result.stderr.text
    return result.stdout.text.strip()


def lives(mark: str) -> list[int]:
    """Processes of this machine whose command line has the mark."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "cmdline").read_text():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


# Resources ----------------------------------------------------------------------------------------------------


@pytest.mark.component("cgroups")
async def test_1_a_fork_bomb_is_refused_and_leaves_nothing(run: Run) -> None:
    mark = secrets.token_hex(8)
    code = f"""
import os
while True:
    if os.fork() == 0:
        os.execv('/bin/sleep', ['{mark}', '300'])
"""
    result = await run(code)
    assert (result.limit, result.fault) == ("pids", "limit")
    assert "Resource temporarily unavailable" in result.stderr.text
    assert not lives(mark)


@pytest.mark.component("cgroups")
async def test_2_a_memory_bomb_ends_itself_alone(run: Run) -> None:
    result = await run("held = [bytearray(10_000_000) for _ in range(1000)]", memory_bytes=64 << 20)
    assert (result.signal, result.limit, result.fault) == (9, "memory", "limit")
    assert 60 << 20 < result.usage.peak_memory_bytes <= 64 << 20
    assert said(await run("print('fine')")) == "fine"


@pytest.mark.component("cgroups")
@pytest.mark.parametrize(
    "place",
    [
        "open('/dev/shm/x', 'wb')",
        "open('/scratch/x', 'wb')",
        "__import__('os').fdopen(__import__('os').memfd_create('x'), 'wb')",
    ],
    ids=["dev-shm", "scratch", "memfd"],
)
async def test_3_files_in_memory_are_charged_to_the_sandbox(run: Run, place: str) -> None:
    code = f"file = {place}\nwhile True:\n    file.write(bytes(1 << 20))\n    file.flush()"
    result = await run(code, memory_bytes=48 << 20, disk_bytes=1 << 30, file_bytes=1 << 30)
    # A read-only or a missing place is fine as well: then there is nothing to charge.
    assert result.limit == "memory" or "Read-only" in result.stderr.text or "No such file" in result.stderr.text


async def test_4_a_full_scratch_folder_is_an_error_of_the_program(run: Run) -> None:
    code = "for n in range(100):\n    open(f'{n}', 'wb').write(bytes(1 << 20))"
    result = await run(code, disk_bytes=8 << 20)
    assert result.fault == "program"
    assert "No space left on device" in result.stderr.text


@pytest.mark.component("cgroups")
async def test_5_empty_files_are_bounded(run: Run) -> None:
    code = "for n in range(300_000):\n    open(f'{n}', 'w').close()"
    result = await run(code, memory_bytes=64 << 20)
    assert result.limit == "memory" or "No space left on device" in result.stderr.text


async def test_6_a_sparse_file_is_bounded(run: Run) -> None:
    result = await run("open('x', 'wb').truncate(1 << 40)")
    assert "File too large" in result.stderr.text


async def test_7_output_without_end_is_cut_and_killed(run: Run) -> None:
    result = await run("while True:\n    print('x' * 1000)", output_bytes=4 << 20, kept_bytes=1000)
    assert (result.limit, result.fault) == ("output", "limit")
    assert result.stdout.truncated
    assert len(result.stdout.head) + len(result.stdout.tail) == 1000
    assert result.stdout.total_bytes > 4 << 20


async def test_8_much_output_never_blocks(run: Run) -> None:
    result = await run("import sys\nsys.stdout.write('o' * 1_000_000)\nsys.stderr.write('e' * 1_000_000)")
    assert result.fault == ""
    assert (result.stdout.total_bytes, result.stderr.total_bytes) == (1_000_000, 1_000_000)


@pytest.mark.component("cgroups")
async def test_35_processor_time_is_counted_and_bounded(run: Run) -> None:
    result = await run("while True:\n    pass", cpu_s=0.2)
    assert (result.limit, result.fault) == ("cpu", "limit")
    assert 0.2 <= result.usage.cpu_s < 5


async def test_1_2_where_no_control_group_bounds_rlimits_do() -> None:
    fresh, server = Bubblewrap(NoDriver()), ForkServer(NoDriver())
    forks = "import os, time\nwhile True:\n    if os.fork() == 0:\n        time.sleep(300)"
    memory = "held = [bytearray(10_000_000) for _ in range(1000)]"
    for code, error in ((forks, "Resource temporarily unavailable"), (memory, "MemoryError")):
        command = Command(arguments=["/usr/bin/python3", "-I", "-c", code])
        for result in (
            await fresh.run(command, Limits(wall_s=20)),
            await server.run(PythonProgram(code=code), Limits(wall_s=20)),
        ):
            assert error in result.stderr.text
            assert result.fault == "program"
    await server.close()


# Time and processes -------------------------------------------------------------------------------------------


async def test_9_a_daemon_is_dead_when_the_execution_ends(run: Run) -> None:
    mark = secrets.token_hex(8)
    code = f"""
import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv('/bin/sleep', ['{mark}', '300'])
    os._exit(0)
os.wait()
print('away')
"""
    assert said(await run(code)) == "away"
    assert not lives(mark)


async def test_10_a_child_that_holds_the_output_holds_nobody_up(run: Run) -> None:
    result = await run("import subprocess\nsubprocess.Popen(['sleep', '300'])\nprint('done')")
    assert said(result) == "done"
    assert result.wall_s < 10


async def test_11_who_ignores_every_signal_is_killed(run: Run) -> None:
    code = """
import signal
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
print('deaf', flush=True)
while True:
    pass
"""
    result = await run(code, wall_s=1.0)
    assert (result.limit, result.exit_code, result.signal) == ("time", None, None)
    assert result.stdout.text == "deaf\n"


async def test_12_input_ends_and_a_sleeper_keeps_what_it_said(run: Run) -> None:
    assert said(await run("print(repr(input()) if 0 else repr(__import__('sys').stdin.read()))")) == "''"
    result = await run("print('so far', flush=True)\nimport time\ntime.sleep(300)", wall_s=1.0)
    assert (result.limit, result.stdout.text) == ("time", "so far\n")


async def test_14_zombies_are_reaped(run: Run) -> None:
    code = """
import os, time
for _ in range(40):
    if os.fork() == 0:
        if os.fork() == 0:
            os._exit(0)
        os._exit(0)
    os.wait()
time.sleep(0.2)
pids = [int(pid) for pid in os.listdir('/proc') if pid.isdigit() and int(pid) > 1]
print([open(f'/proc/{pid}/stat').read().split()[2] for pid in pids].count('Z'))
"""
    assert said(await run(code)) == "0"


async def test_15_killing_everybody_kills_nobody_else(run: Run) -> None:
    result = await run("import os, signal\nos.kill(-1, signal.SIGKILL)")
    assert result.fault in ("", "program")
    assert said(await run("print('alive')")) == "alive"


async def test_16_its_process_1_cannot_be_stopped_or_killed(run: Run) -> None:
    code = "import os, signal\nos.kill(1, signal.SIGSTOP)\nos.kill(1, signal.SIGKILL)\nprint('still here')"
    result = await run(code, wall_s=5.0)
    assert result.stdout.text == "still here\n" or "PermissionError" in result.stderr.text


async def test_17_the_process_that_tells_how_it_ended_cannot_be_written_to(run: Run) -> None:
    code = """
for path in ('/proc/1/mem', '/proc/1/task/1/mem'):
    try:
        open(path, 'r+b')
        print('opened')
    except OSError:
        print('refused')
"""
    assert set(said(await run(code)).split()) == {"refused"}


# What it can see ----------------------------------------------------------------------------------------------


async def test_18_no_variable_and_no_command_line_of_this_machine_is_seen(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CANARY", "a-secret-of-the-host")
    code = """
import glob
for path in glob.glob('/proc/[0-9]*/environ') + glob.glob('/proc/[0-9]*/cmdline'):
    try:
        print(open(path).read())
    except PermissionError:
        pass
print(dict(__import__('os').environ))
"""
    text = said(await run(code))
    assert "a-secret-of-the-host" not in text
    assert str(Path.cwd()) not in text


async def test_19_no_file_and_no_descriptor_of_this_machine_is_seen(run: Run) -> None:
    code = """
import os
def reach(path):
    try:
        return os.listdir(path)
    except OSError as error:
        return type(error).__name__
paths = '/root', '/home', '/proc/1/root/root', '/proc/1/cwd/../root', '/etc/ssh', '/var', '/sys'
print([reach(path) for path in paths])
print(sorted(os.listdir('/proc/self/fd'))[:4])
"""
    seen = said(await run(code))
    first, second = seen.splitlines()
    assert set(first.strip("[]").replace("'", "").split(", ")) <= {"FileNotFoundError", "PermissionError"}
    assert second == "['0', '1', '2', '3']"


async def test_20_nothing_raises_privileges(run: Run) -> None:
    code = """
status = dict(line.split(':', 1) for line in open('/proc/self/status') if ':' in line)
print(status['NoNewPrivs'].strip(), status['CapEff'].strip(), status['CapBnd'].strip(), status['Seccomp'].strip())
import os
print(os.path.exists('/etc/shadow'))
"""
    assert said(await run(code)).split() == ["1", "0" * 16, "0" * 16, "2", "False"]


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers of system calls are those of x86-64")
async def test_17_21_22_34_what_reaches_beyond_the_sandbox_is_refused(run: Run) -> None:
    code = (
        CALL
        + """
numbers = dict(ptrace=101, mount=165, umount=166, pivot_root=155, chroot=161, unshare=272, setns=308, keyctl=250,
    add_key=248, bpf=321, perf_event_open=298, userfaultfd=323, io_uring_setup=425, process_vm_readv=310,
    clock_settime=227, settimeofday=164, reboot=169, open_by_handle_at=304, init_module=175, syslog=103)
print({name: call(number, 0, 0, 0, 0, 0) for name, number in numbers.items()})
print(call(56, 0x10000000, 0, 0, 0, 0), call(435, 0, 0))
"""
    )
    first, second = said(await run(code)).splitlines()
    assert set(eval(first).values()) == {"EPERM"}
    assert second == "EPERM ENOSYS"


async def test_21_fifos_are_made_and_devices_are_not(run: Run) -> None:
    code = """
import os, stat
os.mkfifo('fifo')
for kind in (stat.S_IFCHR, stat.S_IFBLK):
    try:
        os.mknod('device', kind | 0o600, os.makedev(1, 3))
        print('made')
    except PermissionError:
        print('refused')
"""
    assert said(await run(code)).split() == ["refused", "refused"]


async def test_23_24_25_settings_of_the_kernel_cannot_be_written_and_devices_are_absent(run: Run) -> None:
    code = """
import os
def write(path, text):
    try:
        with open(path, 'w') as file:
            file.write(text)
        return 'written'
    except OSError as error:
        return type(error).__name__
for path in ('sys/kernel/core_pattern', 'sysrq-trigger', 'sys/vm/drop_caches', 'sys/vm/overcommit_memory'):
    print(write('/proc/' + path, '1'))
print(write('/proc/self/oom_score_adj', '-1000'))
print([name for name in ('kvm', 'vda', 'mem', 'fuse', 'net') if os.path.exists('/dev/' + name)])
"""
    *written, devices = said(await run(code)).splitlines()
    assert "written" not in written
    assert devices == "[]"


async def test_26_27_there_is_no_network_but_its_own(run: Run) -> None:
    code = """
import socket
print(socket.if_nameindex())
for address in ('.'.join(['169', '254'] * 2), '192.0.2.1'):
    with socket.socket() as s:
        s.settimeout(2)
        try:
            s.connect((address, 80))
            print('reached')
        except OSError as error:
            print(error.errno)
"""
    interfaces, *reached = said(await run(code)).splitlines()
    assert interfaces == "[(1, 'lo')]"
    assert set(reached) == {"101"}  # network unreachable


async def test_27_what_listens_on_this_machine_is_not_reached(run: Run) -> None:
    server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    code = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)"
    async with server:
        result = await run(code)
    assert "Connection refused" in result.stderr.text


async def test_28_other_families_of_sockets_do_not_exist(run: Run) -> None:
    code = """
import socket
for family in (socket.AF_VSOCK, socket.AF_ALG, socket.AF_PACKET, 31):
    try:
        socket.socket(family, socket.SOCK_STREAM if family != socket.AF_ALG else socket.SOCK_SEQPACKET)
        print('made')
    except OSError as error:
        print(error.errno)
socket.socketpair()
"""
    assert set(said(await run(code)).split()) == {"97"}  # address family not supported


async def test_32_bytes_are_kept_as_they_are(run: Run) -> None:
    result = await run("import sys\nsys.stdout.buffer.write(b'\\xff\\x00\\x1b[31m\\r')\nsys.stdout.buffer.flush()")
    assert result.stdout.head == b"\xff\x00\x1b[31m\r"
    assert result.stdout.text.startswith("\ufffd\0")


async def test_36_there_is_no_core_dump(run: Run) -> None:
    result = await run("import os, resource\nprint(resource.getrlimit(resource.RLIMIT_CORE), flush=True)\nos.abort()")
    assert result.stdout.text == "(0, 0)\n"
    assert (result.signal, result.fault) == (6, "program")


async def test_37_text_that_looks_like_a_verdict_is_text(run: Run) -> None:
    result = await run("print('Killed\\nError response from daemon\\n{ \"exit-code\": 0 }')\nraise SystemExit(3)")
    assert (result.exit_code, result.fault) == (3, "program")


async def test_39_nothing_is_left_for_the_next_one(run: Run) -> None:
    await run("open('/scratch/x', 'w').write('left')\nimport builtins\nbuiltins.left = 1")
    code = "import builtins, os\nprint(os.path.exists('/scratch/x'), hasattr(builtins, 'left'))"
    assert said(await run(code)) == "False False"


async def test_40_a_cancelled_call_leaves_nothing(run: Run) -> None:
    mark = secrets.token_hex(8)
    code = f"import os\nos.execv('/bin/sleep', ['{mark}', '300'])"
    running = asyncio.ensure_future(run(code))
    async with asyncio.timeout(20):
        while not lives(mark):
            await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    until = time.monotonic() + 5
    while lives(mark) and time.monotonic() < until:
        await asyncio.sleep(0.01)
    assert not lives(mark)
