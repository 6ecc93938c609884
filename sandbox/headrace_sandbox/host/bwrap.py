"""Starts bubblewrap: a sandbox is made, and waits before anything runs in it.

* Nothing of this process reaches the sandbox: no variable, no descriptor but those that are handed, no file but what is
  mounted, no network.
* bubblewrap itself carries the name of this process, so that a later one finds what a killed one left.
* Where this process is root, a sandbox runs as a user id of its own that owns nothing; never as root.
* A sandbox that cannot be made is a failure of ours, with what bubblewrap said.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import functools
import itertools
import os
import re
import resource
import shutil
import signal
import struct
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from headrace.common.timeouts import timeout
from headrace.errors import SandboxFailure
from headrace_sandbox.host import owner
from headrace_sandbox.host.descriptors import is_readable, piped
from headrace_sandbox.result import Limits

SCRATCH = "/scratch"
"""The scratch folder of a sandbox, where a program starts and its files are."""

PROGRAM_PATH = "/usr/local/bin:/usr/bin:/bin"

NAMESPACES = (
    *("--unshare-all", "--unshare-user", "--uid", "1000", "--gid", "1000", "--hostname", "sandbox"),
    *("--die-with-parent", "--new-session"),
)

OF_USR = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
"""Folders of the root that are links into /usr on a merged system."""

SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")

SPARE_PIDS = 8
"""More processes that the user of a sandbox may have than its control group: bubblewrap's own."""

START_TIMEOUT_S = 10.0
"""For a sandbox to be made; on a quiet machine it takes some milliseconds."""

ENTER = 'while [ "$1" != -- ]; do echo 0 >"$1" || exit; shift; done; shift; {limit}exec "$@"'
"""For a shell: enter a control group by its entries, all of them, take limits, and only then be the program."""

SHELL_BLOCK_BYTES = 512
"""Of which a shell counts the size of files."""

PIDFD_GET_INFO, PIDFD_INFO_EXIT = 0xC040FF0B, 8
"""An ioctl of descriptors of processes, and what it is asked: how the process ended."""

QUOTED_BYTES = 2000
"""Of what bubblewrap said when it failed."""


class Bwrap:
    """Starts sandboxes. ``version`` is that of bubblewrap."""

    def __init__(self) -> None:
        """Raises SandboxFailure ``runtime-missing``."""
        self._bwrap, self._prlimit, self._unshare = map(_program, ("bwrap", "prlimit", "unshare"))
        said = subprocess.run([self._bwrap, "--version"], capture_output=True, text=True, check=True).stdout
        self.version = said.split()[-1]
        self._users = owner.user_ids() if os.geteuid() == 0 else None
        # What this process was started to ignore, by nohup or behind a shell, programs inside must not.
        self._heeding = (_program("env"), "--default-signal") if _ignored() else ()

    def start(
        self,
        arguments: Sequence[str],
        limits: Limits,
        handed: Sequence[int],
        stdin: int | IO[bytes],
        entries: Sequence[str] = (),
    ) -> subprocess.Popen[bytes]:
        """Start it with these arguments and descriptors, in the control group with these entries. Output goes to pipes.
        Raises SandboxFailure."""
        user = None if self._users is None else self._users.next()
        rlimits = _rlimits(limits, has_own_user=user is not None)
        bound = (*self._heeding, *self._bounding(rlimits, entries), *self._as_user(user))
        # A shell may have set variables of its own beside the one that is given.
        options = (*NAMESPACES, "--clearenv")
        try:
            process = piped(
                [*bound, self._bwrap, *options, *arguments],
                env={owner.VARIABLE: str(owner.me())},
                stdin=stdin,
                pass_fds=handed,
                start_new_session=True,
                cwd="/",
            )
        except OSError as error:
            raise too_large() if error.errno == errno.E2BIG else not_made(str(error)) from error
        if self._users is not None and user is not None:
            self._users.taken(user, process)
        return process

    def _bounding(self, rlimits: Mapping[str, int], entries: Sequence[str]) -> Iterator[str]:
        by_shell = _by_shell(rlimits) if entries else None
        if entries:
            yield from ("/bin/sh", "-c", ENTER.format(limit=by_shell or ""), "sh", *entries, "--")
        if by_shell is None:
            yield from (self._prlimit, *(f"--{name}={value}" for name, value in rlimits.items()), "--")

    def _as_user(self, user: int | None) -> Sequence[str]:
        # By a program, and not by Popen, which then copies the page tables of this process, however large it is. This
        # one, told to unshare nothing, is quicker than setpriv, which looks users up. It clears the other groups too.
        return () if user is None else (self._unshare, f"--setuid={user}", f"--setgid={user}", "--")


def _ignored() -> set[signal.Signals]:
    """Signals that this process ignores, but for those that Python itself ignores, and gives back to what it starts."""
    of_python = {signal.SIGPIPE, signal.SIGXFSZ}
    return {number for number in signal.Signals if signal.getsignal(number) is signal.SIG_IGN} - of_python


def system(root: Path = Path("/")) -> Iterator[str]:
    """The files of this machine that programs need, read-only, and nothing that is anybody's."""
    yield from ("--ro-bind", "/usr", "/usr")
    for name in OF_USR:
        folder = root / name
        if folder.is_symlink():
            yield from ("--symlink", os.readlink(folder), f"/{name}")
        elif folder.is_dir():
            yield from ("--ro-bind", f"/{name}", f"/{name}")
    for path in SYSTEM_FILES:
        yield from ("--ro-bind-try", path, path)
    yield from ("--dev", "/dev", "--proc", "/proc", "--symlink", SCRATCH, "/tmp")


def scratch_files(contents: Mapping[str, int]) -> Iterator[str]:
    """Files in the scratch folder: descriptors to read them from, by path."""
    for path, descriptor in contents.items():
        for parent in _parents(path):
            yield from ("--dir", f"{SCRATCH}/{parent}")
        yield from ("--perms", "0644", "--file", f"{descriptor}", f"{SCRATCH}/{path}")


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """What a program finds in its environment."""
    return {"PATH": PROGRAM_PATH, "HOME": SCRATCH, "LANG": "C.UTF-8", **given}


def memory_file(content: bytes) -> int:
    """A descriptor from which this is read."""
    descriptor = os.memfd_create("headrace", os.MFD_CLOEXEC)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


async def first_process(status: int) -> int | None:
    """The first process inside, as this machine numbers it, from what bubblewrap writes to its status descriptor; None
    if there is none."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    text = b""
    loop.add_reader(status, readable.set)
    try:
        async with timeout(START_TIMEOUT_S):
            while (found := re.search(rb'"child-pid": (\d+)\D', text)) is None:
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
    return int(found[1])


def not_begun(status: int, said: str) -> int | None:
    """For a sandbox that ended with 1: the exit code that a shell has for a command that is not there, or that the
    kernel does not run; None where the program began. bubblewrap tells the exit codes of such programs alone."""
    if is_readable(status) and b'"exit-code"' in os.read(status, 4096):
        return None
    return 127 if said.endswith(f"{os.strerror(errno.ENOENT)}\n") else 126


def reap(process: subprocess.Popen[bytes]) -> None:
    """End bubblewrap, and with it the sandbox; nothing of it is left behind."""
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def reap_orphan(pidfd: int) -> None:
    """Reap a process 1 that ended after bubblewrap did, if it became a child of this process: one that is itself
    process 1 of a container, or reaps for others, is where it waits."""
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)


def taken(stream: IO[bytes] | None) -> int:
    """The descriptor of a stream, which is closed: the end of the input must be its only end."""
    assert stream is not None
    descriptor = os.dup(stream.fileno())
    stream.close()
    return descriptor


def kill(pidfd: int) -> None:
    """Kill a process; one that has ended is fine."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def was_killed(pidfd: int) -> bool:
    """Whether a process that has ended was ended by a signal; False where the kernel does not tell (before 6.15).

    bubblewrap's exit code is the same for a program that a signal ended and for its own process 1."""
    info = bytearray(struct.pack("=Q56x", PIDFD_INFO_EXIT))
    try:
        fcntl.ioctl(pidfd, PIDFD_GET_INFO, info)
    except OSError:
        return False
    told, status = struct.unpack("=Q52xi", info)
    return bool(told & PIDFD_INFO_EXIT) and os.WIFSIGNALED(status)


def too_large() -> SandboxFailure:
    """The failure of a command that the kernel does not take, because of its size."""
    return SandboxFailure(
        "Arguments and variables are more than the kernel takes for a program.",
        hint="One may have 128 KiB, all together 2 MiB. Hand it in as a file, or as standard input.",
        kind="command-too-large",
        retryable=False,
    )


def not_made(said: str) -> SandboxFailure:
    """The failure of a sandbox that could not be made."""
    return SandboxFailure(
        f"bubblewrap could not make a sandbox: {said[-QUOTED_BYTES:] or 'it said nothing'}",
        hint="User namespaces may be switched off here, by a sysctl, AppArmor or the container's profile.",
        kind="sandbox-not-made",
        retryable=True,
    )


def _rlimits(limits: Limits, *, has_own_user: bool) -> dict[str, int]:
    """By the names that prlimit has for them."""
    # Processes are counted by user, so where that is ours it would count our own. The control group comes first,
    # because that one says when it refuses.
    processes = {"nproc": _at_most_ours(limits.pids + SPARE_PIDS)} if has_own_user else {}
    return {"core": 0, "fsize": limits.file_bytes, "nofile": limits.open_files, **processes}


def _at_most_ours(processes: int) -> int:
    """As many processes as this one may allow another: more cannot be set, and would bound nothing."""
    ours = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    return processes if ours == resource.RLIM_INFINITY else min(processes, ours)


def _by_shell(rlimits: Mapping[str, int]) -> str | None:
    """For the shell that runs anyway: take these limits, or end. None where it cannot take one of them as it is; then
    it is for another program, which has to be started too."""
    blocks, rest = divmod(rlimits["fsize"], SHELL_BLOCK_BYTES)
    letters = {"core": "c", "fsize": "f", "nofile": "n", "nproc": _letter_of_processes()}
    if rest or not all(letters[name] for name in rlimits):
        return None
    return "".join(f"ulimit -{letters[name]} {value} || exit; " for name, value in {**rlimits, "fsize": blocks}.items())


@functools.cache
def _letter_of_processes() -> str:
    """How the shell names the limit of processes, which no standard says; empty if it has no name for it."""
    for letter in ("p", "u"):
        tried = ("/bin/sh", "-c", f"ulimit -{letter} 99 && exec cat /proc/self/limits")
        if re.search(rb"^Max processes +99 +99 ", subprocess.run(tried, capture_output=True).stdout, re.MULTILINE):
            return letter
    return ""


def _parents(path: str) -> Iterable[str]:
    names = path.split("/")[:-1]
    return itertools.accumulate(names, lambda above, name: f"{above}/{name}")


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise SandboxFailure(
            f"The program {name} is not installed.",
            hint="Debian, Ubuntu: apt-get install bubblewrap util-linux.",
            kind="runtime-missing",
            retryable=False,
        )
    return found
