"""Runs inside a sandbox: tries what must not work, and writes as JSON what isolates it; every item should be true.

Its arguments are a file of the machine outside that everybody may read, and a process of it with the time of its start.
"""

import contextlib
import json
import os
import socket
import sys

AF_VSOCK = 40
NAMES = {"PATH", "HOME", "LANG", "PWD", "LC_CTYPE", "HOSTNAME", "SHLVL", "_"}

canary, process, began = sys.argv[1:]


def opens(family: int) -> bool:
    try:
        socket.socket(family, socket.SOCK_STREAM).close()
    except OSError:
        return False
    return True


def interfaces() -> list[str]:
    with contextlib.suppress(OSError, AttributeError):
        return [name for _, name in socket.if_nameindex()]
    return []


def is_seen() -> bool:
    """True if the process outside is visible under its number."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[19] == began
    except OSError:
        return False


def privileges() -> bool:
    """True if it has capabilities, or could get some from a setuid program."""
    try:
        with open("/proc/self/status") as file:
            status = dict(line.split(":", 1) for line in file if ":" in line)
    except OSError:
        return False
    capabilities = any(int(status.get(name, "0"), 16) for name in ("CapEff", "CapPrm", "CapBnd"))
    return capabilities or status.get("NoNewPrivs", "1").strip() != "1"


found = {
    "no file of this machine": not os.path.exists(canary),
    "no process of this machine": not is_seen(),
    "no network": set(interfaces()) <= {"lo"} and not opens(AF_VSOCK),
    "no variables": set(os.environ) <= NAMES,
    "no privileges": not privileges(),
    "read-only system": not os.access("/", os.W_OK) and not os.access("/usr", os.W_OK),
}
sys.stdout.write(json.dumps(found))
