"""Runs inside a sandbox: looks around, and writes what isolates it as JSON; every item should be true."""

import json
import os
import socket
import sys

AF_VSOCK = 40


def opens(family: int) -> bool:
    try:
        socket.socket(family, socket.SOCK_STREAM).close()
    except OSError:
        return False
    return True


with open("/proc/self/status") as file:
    status = dict(line.split(":", 1) for line in file if ":" in line)

found = {
    "no new privileges": status["NoNewPrivs"].strip() == "1",
    "no capabilities": int(status["CapEff"], 16) == 0 == int(status["CapBnd"], 16),
    "filter of system calls": status["Seccomp"].strip() == "2" and not opens(AF_VSOCK),
    "process ids of its own": os.getpid() < 10,
    "no network": [name for _, name in socket.if_nameindex()] == ["lo"],
    "no variables": set(os.environ) <= {"PATH", "HOME", "LANG", "PWD", "LC_CTYPE"},
    "read-only files": not os.access("/usr", os.W_OK) and not os.path.exists("/root"),
}
sys.stdout.write(json.dumps(found))
