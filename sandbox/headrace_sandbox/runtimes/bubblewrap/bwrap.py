"""Starts bubblewrap: a sandbox is made, and waits before any program runs in it.

* A sandbox inherits nothing from this process: no variable, no descriptor except those handed in, no file except the
  mounted ones, no network.
* bubblewrap itself carries the name of this supervisor, so that a later one finds what a killed one left.
* As root, a sandbox runs under a user id of its own that owns nothing; never as root.
* A sandbox that cannot be made is a failure of ours, and quotes bubblewrap's message.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import itertools
import os
import re
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from headrace.common.timeouts import timeout
from headrace.errors import SandboxFailure
from headrace_sandbox.host.cgroups.cgroup import CgroupDriver
from headrace_sandbox.host.descriptors import is_readable, popen_with_pipes
from headrace_sandbox.host.layout import SCRATCH, SYSTEM_FILES, USR_FOLDERS
from headrace_sandbox.host.processes import command_too_large
from headrace_sandbox.host.supervisor import SUPERVISOR_VARIABLE, this_supervisor
from headrace_sandbox.host.user_ids import shared_user_ids
from headrace_sandbox.result import Isolation, Limits
from headrace_sandbox.runtimes.shared.exec_result import ACTIVE

NAMESPACES = (
    *("--unshare-all", "--unshare-user", "--uid", "1000", "--gid", "1000", "--hostname", "sandbox"),
    *("--die-with-parent", "--new-session"),
)

SPARE_PIDS = 8
"""Processes of bubblewrap itself, which the limit of a sandbox's user allows beyond those of its control group."""

START_TIMEOUT_S = 10.0
"""Deadline for a sandbox to be made; on a quiet machine it takes some milliseconds."""

ENTER_GROUP = 'while [ "$1" != -- ]; do echo 0 >"$1" || exit; shift; done; shift; {limit}exec "$@"'
"""A shell script: enter a control group by all of its entries, take limits, and only then become the program."""

SHELL_BLOCK_BYTES = 512
"""The shell's unit for file sizes."""

QUOTED_BYTES = 2000
"""The quoted length of bubblewrap's message when it failed."""


class Bwrap:
    """Starts sandboxes. ``version`` is that of bubblewrap."""

    def __init__(self) -> None:
        """Raises SandboxFailure ``runtime-missing``."""
        self._bwrap, self._prlimit, self._unshare = map(_find_program, ("bwrap", "prlimit", "unshare"))
        printed = subprocess.run([self._bwrap, "--version"], capture_output=True, text=True, check=True).stdout
        self.version = printed.split()[-1]
        self._users = shared_user_ids() if os.geteuid() == 0 else None
        # Programs inside must not inherit the signals that nohup or a shell made this process ignore.
        self._default_signals = (_find_program("env"), "--default-signal") if _ignored_signals() else ()

    def start(
        self,
        arguments: Sequence[str],
        limits: Limits,
        passed_fds: Sequence[int],
        stdin: int | IO[bytes],
        entries: Sequence[str] = (),
    ) -> subprocess.Popen[bytes]:
        """Start it with these arguments and descriptors, in the control group with these entries. Output goes to pipes.
        Raises SandboxFailure."""
        user = None if self._users is None else self._users.next_free()
        rlimits = _rlimits(limits, has_own_user=user is not None)
        prefix = (*self._default_signals, *self._limiting_command(rlimits, entries), *self._as_user(user))
        # A shell may have set variables beside the one that it was given.
        options = (*NAMESPACES, "--clearenv")
        try:
            process = popen_with_pipes(
                [*prefix, self._bwrap, *options, *arguments],
                env={SUPERVISOR_VARIABLE: str(this_supervisor())},
                stdin=stdin,
                pass_fds=passed_fds,
                start_new_session=True,
                cwd="/",
            )
        except OSError as error:
            too_large = error.errno == errno.E2BIG
            raise command_too_large() if too_large else sandbox_not_made(str(error)) from error
        if self._users is not None and user is not None:
            self._users.assign(user, process)
        return process

    def isolation(self, driver: CgroupDriver) -> Isolation:
        """The isolation of its sandboxes with control groups of this driver."""
        versions = {"bubblewrap": self.version, "kernel": os.uname().release, "cgroups": driver.name}
        return Isolation(runtime="bubblewrap", versions=versions, active=[*ACTIVE, *driver.active])

    def _limiting_command(self, rlimits: Mapping[str, int], entries: Sequence[str]) -> Iterator[str]:
        by_shell = _shell_limits(rlimits) if entries else None
        if entries:
            yield from ("/bin/sh", "-c", ENTER_GROUP.format(limit=by_shell or ""), "sh", *entries, "--")
        if by_shell is None:
            yield from (self._prlimit, *(f"--{name}={value}" for name, value in rlimits.items()), "--")

    def _as_user(self, user: int | None) -> Sequence[str]:
        # By a program, because Popen would copy this process's page tables, however large they are. `unshare` without
        # namespaces is faster than setpriv, which looks users up. It clears the supplementary groups too.
        return () if user is None else (self._unshare, f"--setuid={user}", f"--setgid={user}", "--")


def _ignored_signals() -> set[signal.Signals]:
    """Signals that this process ignores, without those that Python itself ignores and resets in its children."""
    of_python = {signal.SIGPIPE, signal.SIGXFSZ}
    return {number for number in signal.Signals if signal.getsignal(number) is signal.SIG_IGN} - of_python


def system_mounts(root: Path = Path("/")) -> Iterator[str]:
    """Arguments that mount the system files that programs need, read-only, and no user's files."""
    yield from ("--ro-bind", "/usr", "/usr")
    for name in USR_FOLDERS:
        folder = root / name
        if folder.is_symlink():
            yield from ("--symlink", os.readlink(folder), f"/{name}")
        elif folder.is_dir():
            yield from ("--ro-bind", f"/{name}", f"/{name}")
    for path in SYSTEM_FILES:
        yield from ("--ro-bind-try", path, path)
    yield from ("--dev", "/dev", "--proc", "/proc", "--symlink", SCRATCH, "/tmp")


def scratch_files(contents: Mapping[str, int]) -> Iterator[str]:
    """Arguments that make files in the scratch folder. ``contents``: descriptors to read them from, by path."""
    for path, descriptor in contents.items():
        for parent in _parents(path):
            yield from ("--dir", f"{SCRATCH}/{parent}")
        yield from ("--perms", "0644", "--file", f"{descriptor}", f"{SCRATCH}/{path}")


async def first_process(status: int) -> int | None:
    """The first process inside, with this machine's number for it, read from bubblewrap's status descriptor; None if it
    was not started."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    text = b""
    loop.add_reader(status, readable.set)
    try:
        async with timeout(START_TIMEOUT_S):
            while (match := re.search(rb'"child-pid": (\d+)\D', text)) is None:
                await readable.wait()
                readable.clear()
                more = os.read(status, 4096)
                if not more:
                    return None
                text += more
    except TimeoutError:
        return None
    finally:
        loop.remove_reader(status)
    return int(match[1])


def exit_code_if_not_executed(status: int, message: str) -> int | None:
    """The exit code of a shell for a missing command, or one that the kernel does not run, where a sandbox ended with
    1; None if the program was executed. bubblewrap reports an exit code only for programs that it executed."""
    if is_readable(status) and b'"exit-code"' in os.read(status, 4096):
        return None
    return 127 if message.endswith(f"{os.strerror(errno.ENOENT)}\n") else 126


def end_bwrap(process: subprocess.Popen[bytes]) -> None:
    """End bubblewrap, and with it the sandbox; closes its streams."""
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def reap_orphan(pidfd: int) -> None:
    """Reap a process 1 that ended after bubblewrap did, if it became a child of this process. That happens where this
    process is process 1 of a container, or a subreaper."""
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)


def last_message(process: subprocess.Popen[bytes]) -> str:
    """Kill bubblewrap, and return what it wrote to its standard error."""
    process.kill()
    if process.stderr is None or process.stderr.closed:
        return ""
    os.set_blocking(process.stderr.fileno(), False)
    return (process.stderr.read() or b"").decode(errors="replace").strip()


def sandbox_not_made(message: str) -> SandboxFailure:
    """The failure of a sandbox that could not be made."""
    return SandboxFailure(
        f"bubblewrap could not make a sandbox: {message[-QUOTED_BYTES:] or 'it gave no reason'}",
        hint="User namespaces may be switched off here, by a sysctl, AppArmor or the container's profile.",
        kind="sandbox-not-made",
        retryable=True,
    )


def _rlimits(limits: Limits, *, has_own_user: bool) -> dict[str, int]:
    """Limits by prlimit's names for them."""
    # The kernel counts processes by user, so without an own user it would count ours. The control group's limit is
    # reached first, because only that one reports a refusal.
    processes = {"nproc": _settable_processes(limits.pids + SPARE_PIDS)} if has_own_user else {}
    return {"core": 0, "fsize": limits.file_bytes, "nofile": limits.open_files, **processes}


def _settable_processes(processes: int) -> int:
    """The given number of processes, or this process's own hard limit, above which none can be set."""
    ours = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    return processes if ours == resource.RLIM_INFINITY else min(processes, ours)


def _shell_limits(rlimits: Mapping[str, int]) -> str | None:
    """Shell commands that set these limits or exit; None if the shell cannot express one of them exactly."""
    blocks, rest = divmod(rlimits["fsize"], SHELL_BLOCK_BYTES)
    letters = {"core": "c", "fsize": "f", "nofile": "n", "nproc": _processes_letter()}
    if rest or not all(letters[name] for name in rlimits):
        return None
    return "".join(f"ulimit -{letters[name]} {value} || exit; " for name, value in {**rlimits, "fsize": blocks}.items())


@functools.cache
def _processes_letter() -> str:
    """The shell's option of ``ulimit`` for processes, which no standard defines; empty if it has none."""
    for letter in ("p", "u"):
        command = ("/bin/sh", "-c", f"ulimit -{letter} 99 && exec cat /proc/self/limits")
        if re.search(rb"^Max processes +99 +99 ", subprocess.run(command, capture_output=True).stdout, re.MULTILINE):
            return letter
    return ""


def _parents(path: str) -> Iterable[str]:
    names = path.split("/")[:-1]
    return itertools.accumulate(names, lambda above, name: f"{above}/{name}")


def _find_program(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise SandboxFailure(
            f"The program {name} is not installed.",
            hint="Debian, Ubuntu: apt-get install bubblewrap util-linux.",
            kind="runtime-missing",
            retryable=False,
        )
    return path
