"""Runs inside a sandbox: tries forbidden things, and writes the results as JSON; each should be true.

Arguments: a file of the machine outside that every user may read, and a process of that machine with its start time.
"""

import contextlib
import json
import os
import socket
import sys

AF_VSOCK = 40
NAMES = {"PATH", "HOME", "LANG", "PWD", "LC_CTYPE", "HOSTNAME", "SHLVL", "_"}

canary, process, start_ticks = sys.argv[1:]


def can_open(family: int) -> bool:
    try:
        socket.socket(family, socket.SOCK_STREAM).close()
    except OSError:
        return False
    return True


def interfaces() -> list[str]:
    with contextlib.suppress(OSError, AttributeError):
        return [name for _, name in socket.if_nameindex()]
    return []


def sees_process() -> bool:
    """True if the process outside is visible under its number."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[19] == start_ticks
    except OSError:
        return False


def has_privileges() -> bool:
    """True if this process has capabilities, or could get some from a setuid program."""
    try:
        with open("/proc/self/status") as file:
            status = dict(line.split(":", 1) for line in file if ":" in line)
    except OSError:
        return False
    capabilities = any(int(status.get(name, "0"), 16) for name in ("CapEff", "CapPrm", "CapBnd"))
    return capabilities or status.get("NoNewPrivs", "1").strip() != "1"


results = {
    "no file of this machine": not os.path.exists(canary),
    "no process of this machine": not sees_process(),
    "no network": set(interfaces()) <= {"lo"} and not can_open(AF_VSOCK),
    "no variables": set(os.environ) <= NAMES,
    "no privileges": not has_privileges(),
    "read-only system": not os.access("/", os.W_OK) and not os.access("/usr", os.W_OK),
}
sys.stdout.write(json.dumps(results))
