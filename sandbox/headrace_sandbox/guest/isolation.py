"""Runs inside a sandbox: steps by which a process isolates itself from the others there.

* A process may have namespaces, a /proc and a loopback interface of its own.
* A program runs without privileges, under limits and a filter of system calls that it cannot remove.

The sandbox's own Python receives the files of this folder unchanged, so they import only the standard library and each
other.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import signal
import socket
import struct

TYPE_CHECKING = False  # the module `typing` would be half a megabyte in every sandbox
if TYPE_CHECKING:
    from typing import Any

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER = 0x20000, 0x4000000, 0x8000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET, CLONE_NEWCGROUP = 0x20000000, 0x40000000, 0x2000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 1, 2, 4, 8, 0x20, 0x1000
MS_REC, MS_PRIVATE = 0x4000, 0x40000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 22, 38
PR_SET_CHILD_SUBREAPER = 36
SECCOMP_MODE_FILTER = 2
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
CAPABILITY_VERSION_3 = 0x20080522

libc = ctypes.CDLL(None, use_errno=True)


def check_call(result: int, action: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{action}: {os.strerror(number)}")


def prctl(option: int, value: int, action: str = "prctl") -> None:
    check_call(libc.prctl(option, value, 0, 0, 0), action)


def unshare_user(flags: int) -> None:
    """Make namespaces, and a user namespace that owns them, in which this user keeps its number."""
    uid, gid = os.getuid(), os.getgid()
    check_call(libc.unshare(CLONE_NEWUSER | flags), "unshare")
    map_user(uid, gid)


def map_user(uid: int, gid: int) -> None:
    """Map this user to its own number in a new user namespace."""
    for name, line in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        descriptor = os.open(f"/proc/self/{name}", os.O_WRONLY)
        os.write(descriptor, line.encode())
        os.close(descriptor)


def make_mounts_private() -> None:
    check_call(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None), "mount /")


def mount_memory(folder: str, size_bytes: int, inodes: int) -> None:
    """Mount a folder in bounded memory."""
    options = f"size={size_bytes},nr_inodes={inodes},mode=0700".encode()
    check_call(libc.mount(b"tmpfs", folder.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, options), f"mount {folder}")


def is_full(folder: str | int) -> bool:
    """True if the file system is full, in bytes or in files; a count of 0 means unlimited."""
    status = os.statvfs(folder)
    return bool((status.f_blocks and not status.f_bavail) or (status.f_files and not status.f_favail))


def make_read_only(folder: str) -> None:
    """Make a folder read-only in this mount namespace; its pipes stay writable."""
    flags = MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV
    check_call(libc.mount(None, folder.encode(), None, flags, None), f"mount {folder}")


def mount_terminals() -> None:
    """Mount pseudo-terminals that only this process and its children see."""
    options = b"newinstance,ptmxmode=0666"
    check_call(libc.mount(b"devpts", b"/dev/pts", b"devpts", MS_NOSUID | MS_NOEXEC, options), "mount /dev/pts")


def mount_proc() -> None:
    """Mount a /proc that shows only the processes of this namespace."""
    check_call(libc.mount(b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, None), "mount /proc")


def bring_loopback_up() -> None:
    """Bring up this namespace's own loopback interface."""
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", IFF_UP))


def restore_signals() -> None:
    """Restore the signals that Python ignores, before a program replaces this process."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)


def set_rlimits(rlimits: dict[str, Any]) -> None:
    for name, value in rlimits.items():
        number = getattr(resource, name)
        resource.setrlimit(number, (value, value))


def drop_capability_bounds() -> None:
    """Ensure that no program that is started from here on can have a capability."""
    for capability in range(64):
        if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            return


def drop_privileges(filter_: bytes) -> None:
    drop_capability_bounds()
    header = struct.pack("=Ii", CAPABILITY_VERSION_3, 0)
    check_call(libc.capset(header, bytes(24)), "capset")
    prctl(PR_SET_NO_NEW_PRIVS, 1, "no_new_privs")
    code = ctypes.create_string_buffer(filter_, len(filter_))
    program = struct.pack("@HP", len(filter_) // 8, ctypes.addressof(code))
    check_call(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0), "seccomp")
