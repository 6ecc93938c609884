"""Runs inside a container, in which commands and sessions of one user run side by side.

* The host of a session first reports its process id. Programs can end it, but cannot reach into it.
* All processes that belong to no running session can be killed.
"""

import contextlib
import json
import os
import signal
import sys
import time

from headrace_sandbox.guest import session_host
from headrace_sandbox.guest.isolation import PR_SET_CHILD_SUBREAPER, PR_SET_DUMPABLE, prctl

CLEAR_S = 3.0
"""Time limit for killed processes to disappear."""


def host_session(request: str, folder: str) -> None:
    """Serve a session on standard input and output."""
    os.makedirs(folder, mode=0o700)
    os.write(1, f"{os.getpid()}\n".encode())
    prctl(PR_SET_DUMPABLE, 0)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    session_host.GuestSessionHost(
        json.loads(request), os.dup(0), folder, lambda: prctl(PR_SET_DUMPABLE, 1), os.dup(1)
    ).serve()
    session_host.kill(session_host.descendants())


def kill_others(*hosts: str) -> None:
    """Kill the processes that belong to none of these session hosts. Exits with 1 if one survives."""
    deadline = time.monotonic() + CLEAR_S
    while remaining := other_processes({os.getpid(), *map(int, hosts)}):
        if time.monotonic() > deadline:
            sys.exit(1)
        for pid in remaining:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def other_processes(roots: set[int]) -> set[int]:
    """The processes of this user that are neither one of these nor below one of them."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
            with open(f"/proc/{name}/status", "rb") as status:
                user = int(status.read().partition(b"\nUid:")[2].split()[0])
        except OSError:
            continue  # it has ended
        if user == os.getuid() and state != b"Z":
            parents[int(name)] = int(parent)
    return {pid for pid in parents if not is_below(pid, roots, parents)}


def is_below(pid: int, roots: set[int], parents: dict[int, int]) -> bool:
    while pid in parents:
        if pid in roots:
            return True
        pid = parents[pid]
    return False


def main() -> None:
    """Host a session or kill other processes, as the first argument says: ``host`` or ``clear``."""
    action, *arguments = sys.argv[1:]
    if action == "host":
        host_session(*arguments)
    else:
        kill_others(*arguments)
