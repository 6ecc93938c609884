"""The filter of system calls for sandboxed programs, as a BPF program for the kernel.

* Calls that reach beyond the sandbox's own namespaces are refused with EPERM: tracing, keys, BPF, performance counters,
  io_uring, mounts, namespaces, modules, clocks, file handles.
* Sockets are of the families UNIX, INET, INET6 and NETLINK; any other is EAFNOSUPPORT. NETLINK has only the protocol
  for interfaces and addresses; any other is EPROTONOSUPPORT.
* A socket's receive buffer has the usual size: a request for more is ignored. Control groups do not count the data in
  NETLINK sockets, and each could hold megabytes.
* ``prlimit`` works for the caller alone: by limits on the process 1 of a sandbox a program could end it.
* ``mknod`` makes FIFOs, sockets and plain files, not devices.
* ``clone3`` is ENOSYS, so that libraries fall back to ``clone``, whose flags a filter can read.
* A program for another architecture, or of the x32 kind, is killed.

The program is assembled here, because it is short: a library would be another part to trust.
"""

from __future__ import annotations

import errno
import platform
import struct
from typing import NamedTuple

from headrace.errors import SandboxFailure

ALLOW, KILL = 0x7FFF0000, 0x80000000
_ERRNO = 0x00050000

IGNORE = _ERRNO
"""The call is not made, and returns success."""

_LOAD, _JUMP_EQ, _JUMP_GE, _JUMP_SET, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
"""Operations of classic BPF: load a word, compare and jump, mask, return."""

_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
"""Offsets in ``struct seccomp_data``; each argument has 8 bytes, the low word first."""

CLONE_NEW = 0x7E020080
"""All flags of ``clone`` that make namespaces."""

S_IFMT, S_IFCHR, S_IFBLK = 0o170000, 0o020000, 0o060000

AF_NETLINK, NETLINK_ROUTE = 16, 0

FAMILIES = (1, 2, 10, AF_NETLINK)
"""The others are AF_UNIX, AF_INET, AF_INET6."""

SOL_SOCKET, SO_RCVBUF = 1, 8


class Architecture(NamedTuple):
    """Numbers of system calls. ``refused``: calls that are EPERM with any arguments. ``mknods``: ``mknod`` and
    ``mknodat``, with the position of the mode. ``x32``: True if numbers from 2**30 on are of another kind."""

    audit: int
    refused: dict[str, int]
    clone: int
    clone3: int
    socket: int
    socketpair: int
    setsockopt: int
    prlimit: int
    mknods: tuple[tuple[int, int], ...]
    x32: bool


_SINCE_424 = {
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "mount_setattr": 442,
    "open_tree_attr": 467,
}
"""The same on every architecture."""

X86_64 = Architecture(
    audit=0xC000003E,
    refused={
        "ptrace": 101, "syslog": 103, "uselib": 134, "personality": 135, "ustat": 136, "vhangup": 153,
        "modify_ldt": 154, "pivot_root": 155, "adjtimex": 159, "chroot": 161, "acct": 163, "settimeofday": 164,
        "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169, "sethostname": 170,
        "setdomainname": 171, "iopl": 172, "ioperm": 173, "init_module": 175, "delete_module": 176, "quotactl": 179,
        "nfsservctl": 180, "lookup_dcookie": 212, "clock_settime": 227, "mbind": 237, "set_mempolicy": 238,
        "get_mempolicy": 239, "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250,
        "migrate_pages": 256, "unshare": 272, "move_pages": 279, "perf_event_open": 298, "fanotify_init": 300,
        "name_to_handle_at": 303, "open_by_handle_at": 304, "clock_adjtime": 305, "setns": 308,
        "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "finit_module": 313, "kexec_file_load": 320,
        "bpf": 321, "userfaultfd": 323, "quotactl_fd": 443, **_SINCE_424,
    },
    clone=56, clone3=435, socket=41, socketpair=53, setsockopt=54, prlimit=302, mknods=((133, 1), (259, 2)), x32=True,
)  # fmt: skip

AARCH64 = Architecture(
    audit=0xC00000B7,
    refused={
        "umount2": 39, "mount": 40, "pivot_root": 41, "chroot": 51, "vhangup": 58, "quotactl": 60, "acct": 89,
        "personality": 92, "unshare": 97, "kexec_load": 104, "init_module": 105, "delete_module": 106,
        "clock_settime": 112, "syslog": 116, "ptrace": 117, "reboot": 142, "sethostname": 161, "setdomainname": 162,
        "settimeofday": 170, "adjtimex": 171, "add_key": 217, "request_key": 218, "keyctl": 219, "swapon": 224,
        "swapoff": 225, "mbind": 235, "get_mempolicy": 236, "set_mempolicy": 237, "migrate_pages": 238,
        "move_pages": 239, "perf_event_open": 241, "fanotify_init": 262, "name_to_handle_at": 264,
        "open_by_handle_at": 265, "clock_adjtime": 266, "setns": 268, "process_vm_readv": 270,
        "process_vm_writev": 271, "kcmp": 272, "finit_module": 273, "bpf": 280, "userfaultfd": 282,
        "kexec_file_load": 294, "quotactl_fd": 443, **_SINCE_424,
    },
    clone=220, clone3=435, socket=198, socketpair=199, setsockopt=208, prlimit=261, mknods=((33, 2),), x32=False,
)  # fmt: skip

ARCHITECTURES = {"x86_64": X86_64, "aarch64": AARCH64}


def require_filter() -> bytes:
    """The filter for this machine. Raises SandboxFailure ``no-filter``."""
    return _assemble(require_table())


def require_table(machine: str = "") -> Architecture:
    """The system calls of this machine's architecture. Raises SandboxFailure ``no-filter``."""
    name = machine or platform.machine()
    if name not in ARCHITECTURES:
        raise SandboxFailure(
            f"Headrace has no system-call filter for {name}.",
            hint=f"It has filters for {' and '.join(ARCHITECTURES)}.",
            kind="no-filter",
            retryable=False,
        )
    return ARCHITECTURES[name]


def filter_program(machine: str = "") -> bytes | None:
    """The filter for this machine's architecture, as the kernel takes it; None for an architecture without a table."""
    architecture = ARCHITECTURES.get(machine or platform.machine())
    return None if architecture is None else _assemble(architecture)


def _assemble(a: Architecture) -> bytes:
    code = [_op(_LOAD, _ARCHITECTURE), _op(_JUMP_EQ, a.audit, 1, 0), _op(_RETURN, KILL), _op(_LOAD, _NUMBER)]
    if a.x32:
        code += [_op(_JUMP_GE, 0x40000000, 0, 1), _op(_RETURN, KILL)]
    for number in sorted(a.refused.values()):
        code += [_op(_JUMP_EQ, number, 0, 1), _refuse(errno.EPERM)]
    code += [_op(_JUMP_EQ, a.clone3, 0, 1), _refuse(errno.ENOSYS)]
    code += _when(a.clone, [_op(_LOAD, _ARGUMENTS), _op(_JUMP_SET, CLONE_NEW, 0, 1), _refuse(errno.EPERM)])
    code += _when(a.prlimit, [_op(_LOAD, _ARGUMENTS), _op(_JUMP_EQ, 0, 1, 0), _refuse(errno.EPERM)])
    for number in (a.socket, a.socketpair):
        plain = [_op(_JUMP_EQ, family, 0, 1) + _op(_RETURN, ALLOW) for family in FAMILIES if family != AF_NETLINK]
        netlink = [
            *(_op(_JUMP_EQ, AF_NETLINK, 0, 4), _op(_LOAD, _ARGUMENTS + 16)),
            *(_op(_JUMP_EQ, NETLINK_ROUTE, 0, 1), _op(_RETURN, ALLOW), _refuse(errno.EPROTONOSUPPORT)),
        ]
        code += _when(number, [_op(_LOAD, _ARGUMENTS), *_split(plain), *netlink, _refuse(errno.EAFNOSUPPORT)])
    is_larger = [_op(_LOAD, _ARGUMENTS + 16), _op(_JUMP_EQ, SO_RCVBUF, 0, 1), _op(_RETURN, IGNORE)]
    code += _when(a.setsockopt, [_op(_LOAD, _ARGUMENTS + 8), _op(_JUMP_EQ, SOL_SOCKET, 0, 3), *is_larger])
    for number, position in a.mknods:
        load_type = [_op(_LOAD, _ARGUMENTS + 8 * position), _op(_AND, S_IFMT)]
        devices = [_op(_JUMP_EQ, kind, 0, 1) + _refuse(errno.EPERM) for kind in (S_IFCHR, S_IFBLK)]
        code += _when(number, [*load_type, *_split(devices)])
    return b"".join([*code, _op(_RETURN, ALLOW)])


def _when(number: int, then: list[bytes]) -> list[bytes]:
    """Instructions for one system call, which is allowed unless they refuse it."""
    return [_op(_JUMP_EQ, number, 0, len(then) + 1), *then, _op(_RETURN, ALLOW)]


def _split(pairs: list[bytes]) -> list[bytes]:
    return [pair[start : start + 8] for pair in pairs for start in (0, 8)]


def _refuse(error: int) -> bytes:
    return _op(_RETURN, _ERRNO | error)


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
