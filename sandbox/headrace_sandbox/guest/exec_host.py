"""Runs inside a container, where commands and sessions of one user run beside each other.

* The host of a session says its process id first. Programs cannot reach into it, only end it.
* All can be killed that belongs to no session that goes on.
"""

import contextlib
import json
import os
import signal
import sys
import time

from headrace_sandbox.guest import session_host
from headrace_sandbox.guest.isolation import PR_SET_CHILD_SUBREAPER, PR_SET_DUMPABLE, prctl

PATIENCE_S = 3.0
"""Time limit for killed processes to disappear."""


def host(request: str, folder: str) -> None:
    """Serve a session on standard input and output."""
    os.makedirs(folder, mode=0o700)
    os.write(1, f"{os.getpid()}\n".encode())
    prctl(PR_SET_DUMPABLE, 0)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    session_host.Host(json.loads(request), os.dup(0), folder, lambda: prctl(PR_SET_DUMPABLE, 1), os.dup(1)).serve()
    session_host.kill(session_host.descendants())


def clear(*kept: str) -> None:
    """Kill the processes that belong to none of these hosts. Ends with 1 if one survives."""
    deadline = time.monotonic() + PATIENCE_S
    while found := others({os.getpid(), *map(int, kept)}):
        if time.monotonic() > deadline:
            sys.exit(1)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def others(roots: set[int]) -> set[int]:
    """The processes of this user that are none of these, and not below one of them."""
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
            continue  # it ended meanwhile
        if user == os.getuid() and state != b"Z":
            parents[int(name)] = int(parent)
    return {pid for pid in parents if not leads_to(pid, roots, parents)}


def leads_to(pid: int, roots: set[int], parents: dict[int, int]) -> bool:
    while pid in parents:
        if pid in roots:
            return True
        pid = parents[pid]
    return False


def main() -> None:
    """The first argument says what to do: ``host`` or ``clear``."""
    what, *arguments = sys.argv[1:]
    if what == "host":
        host(*arguments)
    else:
        clear(*arguments)
