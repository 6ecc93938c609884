"""Runs a command with the rights of a container under Kubernetes' restricted profile.

* An ordinary user, no capability, ``no_new_privs``.
* The runtime's default filter of system calls: nothing that makes or enters a namespace, nothing that mounts.
* Where root runs it, as a kubelet would: processes of its own, with /proc masked and read-only where containerd does
  that, and control groups read-only.

``python -m tests.sandbox.runtimes.wasm.restricted_pod USER COMMAND…``
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import sys
from pathlib import Path

from headrace_sandbox.guest.isolation import (
    CLONE_NEWNS,
    CLONE_NEWPID,
    check_call,
    drop_privileges,
    libc,
    make_mounts_private,
)
from headrace_sandbox.host import seccomp

ALLOWED = {"ptrace", "process_vm_readv", "process_vm_writev", "personality", "name_to_handle_at", "adjtimex"}
"""System calls that Headrace's filter refuses and the default filter of container runtimes allows."""

MASKED = (
    "/proc/acpi",
    "/proc/asound",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/sys/firmware",
)
READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger", "/sys/fs/cgroup")

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC = 1, 2, 4, 8, 32, 4096, 16384


def mount(source: str, target: str, kind: str | None = None, flags: int = 0, options: str | None = None) -> None:
    kind_, options_ = (None if text is None else text.encode() for text in (kind, options))
    check_call(libc.mount(source.encode(), target.encode(), kind_, ctypes.c_ulong(flags), options_), f"mount {target}")


def make_container() -> None:
    """Make mount and process namespaces; returns in their first process."""
    check_call(libc.unshare(CLONE_NEWNS | CLONE_NEWPID), "unshare")
    make_mounts_private()
    child = os.fork()
    if child:
        signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    check_call(libc.prctl(1, signal.SIGKILL, 0, 0, 0), "prctl")  # PR_SET_PDEATHSIG
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    for path in filter(os.path.exists, MASKED):
        if os.path.isdir(path):
            mount("tmpfs", path, "tmpfs", MS_RDONLY)
        else:
            mount("/dev/null", path, flags=MS_BIND)
    for path in filter(os.path.exists, READ_ONLY):
        mount(path, path, flags=MS_BIND | MS_REC)
        mount(path, path, flags=MS_BIND | MS_REC | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)


def open_ways(paths: list[str]) -> None:
    """Let all users reach these folders, as in an image; the other content of root's folders is hidden."""
    kept = {path: os.open(path, os.O_PATH) for path in sorted(paths, key=len)}
    closed = {path: _closed_above(path) for path in kept}
    for folder in {folder for folder in closed.values() if folder}:
        mount("tmpfs", folder, "tmpfs", options="mode=0755")
    for path, descriptor in kept.items():
        if closed[path]:
            os.makedirs(path, exist_ok=True)
            mount(f"/proc/self/fd/{descriptor}", path, flags=MS_BIND | MS_REC)
        os.close(descriptor)


def _closed_above(path: str) -> str | None:
    above = [*Path(path).parents][::-1]
    return next((str(folder) for folder in above if not folder.stat().st_mode & 0o001), None)


def main() -> None:
    user, *command = sys.argv[1:]
    if os.geteuid() == 0:
        make_container()
        here = os.getcwd()
        open_ways([sys.base_prefix, sys.prefix, here])
        os.chdir(here)
        os.setgroups([])
        os.setresgid(int(user), int(user), int(user))
        os.setresuid(int(user), int(user), int(user))
    architecture = seccomp.ARCHITECTURES[platform.machine()]
    refused = {name: number for name, number in architecture.refused.items() if name not in ALLOWED}
    drop_privileges(seccomp._assemble(architecture._replace(refused=refused)))
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
