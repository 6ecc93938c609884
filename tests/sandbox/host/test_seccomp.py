"""The filter of system calls, run by a small interpreter of BPF."""

from __future__ import annotations

import errno
import socket
import stat
import struct

import pytest

from headrace.errors import SandboxFailure
from headrace_sandbox.host import seccomp
from headrace_sandbox.host.seccomp import (
    AARCH64,
    ALLOW,
    ARCHITECTURES,
    IGNORE,
    KILL,
    X86_64,
    Architecture,
    filter_program,
)

BOTH = pytest.mark.parametrize("machine", sorted(ARCHITECTURES))


def verdict(machine: str, number: int, *arguments: int, audit: int | None = None) -> int:
    """The kernel's decision; each instruction goes forward, so the program ends."""
    program = filter_program(machine)
    assert program is not None
    data = struct.pack(
        "=IIQ6Q",
        number,
        ARCHITECTURES[machine].audit if audit is None else audit,
        0,
        *arguments,
        *([0] * (6 - len(arguments))),
    )
    at, register = 0, 0
    while True:
        code, if_true, if_false, value = struct.unpack_from("=HBBI", program, 8 * at)
        at += 1
        if code == 0x20:
            (register,) = struct.unpack_from("=I", data, value)
        elif code == 0x54:
            register &= value
        elif code == 0x06:
            return value
        else:
            holds = {0x15: register == value, 0x35: register >= value, 0x45: bool(register & value)}[code]
            at += if_true if holds else if_false


def refused(value: int) -> str:
    return errno.errorcode[value & 0xFFFF] if value & 0xFFFF0000 == 0x00050000 else "no"


@BOTH
def test_calls_that_reach_beyond_the_sandboxs_namespaces_are_eperm(machine: str) -> None:
    architecture = ARCHITECTURES[machine]
    for name, number in architecture.refused.items():
        assert refused(verdict(machine, number)) == "EPERM", name
    names = {"ptrace", "bpf", "keyctl", "mount", "unshare", "setns", "io_uring_setup", "userfaultfd", "kexec_load"}
    assert names <= architecture.refused.keys()


@BOTH
def test_sockets_are_of_four_families(machine: str) -> None:
    a = ARCHITECTURES[machine]
    for number in (a.socket, a.socketpair):
        for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK):
            assert verdict(machine, number, family) == ALLOW
        for family in (socket.AF_VSOCK, socket.AF_ALG, socket.AF_PACKET, 31, 99):
            assert refused(verdict(machine, number, family)) == "EAFNOSUPPORT"


@BOTH
def test_netlink_has_only_the_protocol_for_interfaces_and_addresses(machine: str) -> None:
    a = ARCHITECTURES[machine]
    raw = socket.SOCK_RAW | socket.SOCK_CLOEXEC
    for number in (a.socket, a.socketpair):
        assert verdict(machine, number, socket.AF_NETLINK, raw, 0) == ALLOW
        for protocol in (2, 4, 9, 12, 15, 16, 21):
            assert refused(verdict(machine, number, socket.AF_NETLINK, raw, protocol)) == "EPROTONOSUPPORT"
        assert verdict(machine, number, socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) == ALLOW


@BOTH
def test_a_request_for_a_larger_receive_buffer_is_ignored(machine: str) -> None:
    number = ARCHITECTURES[machine].setsockopt
    assert verdict(machine, number, 3, socket.SOL_SOCKET, socket.SO_RCVBUF) == IGNORE
    for option in (socket.SO_SNDBUF, socket.SO_REUSEADDR, 0):
        assert verdict(machine, number, 3, socket.SOL_SOCKET, option) == ALLOW
    assert verdict(machine, number, 3, socket.IPPROTO_TCP, socket.SO_RCVBUF) == ALLOW


@BOTH
def test_mknod_makes_fifos_but_not_devices(machine: str) -> None:
    for number, position in ARCHITECTURES[machine].mknods:
        before = [0] * position
        for kind in (stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFREG, 0):
            assert verdict(machine, number, *before, kind | 0o600) == ALLOW
        for kind in (stat.S_IFCHR, stat.S_IFBLK):
            assert refused(verdict(machine, number, *before, kind | 0o600)) == "EPERM"


@BOTH
def test_prlimit_works_for_the_caller_alone(machine: str) -> None:
    number = ARCHITECTURES[machine].prlimit
    assert verdict(machine, number, 0, 7) == ALLOW
    for pid in (1, 2, 1 << 31):
        assert refused(verdict(machine, number, pid, 7)) == "EPERM"


@BOTH
def test_clone_makes_processes_and_threads_but_not_namespaces(machine: str) -> None:
    a = ARCHITECTURES[machine]
    assert verdict(machine, a.clone, 0x11) == ALLOW
    assert verdict(machine, a.clone, 0x003D0F00) == ALLOW  # the flags of a new thread
    for flag in (0x80, 0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert refused(verdict(machine, a.clone, flag | 0x11)) == "EPERM"
    assert refused(verdict(machine, a.clone3)) == "ENOSYS"


@pytest.mark.parametrize(("machine", "other"), [("x86_64", AARCH64), ("aarch64", X86_64)])
def test_a_program_of_another_architecture_is_killed(machine: str, other: Architecture) -> None:
    assert verdict(machine, 0, audit=other.audit) == KILL
    assert verdict(machine, 0, audit=0x40000003) == KILL  # 32 bits


def test_a_program_of_the_x32_kind_is_killed() -> None:
    assert verdict("x86_64", 0x40000000) == KILL
    assert verdict("x86_64", 0) == ALLOW


@BOTH
def test_everything_else_is_allowed(machine: str) -> None:
    a = ARCHITECTURES[machine]
    special = {*a.refused.values(), a.clone3, a.socket, a.socketpair, a.prlimit}
    special |= {number for number, _ in a.mknods}
    for number in range(500):
        if number not in special:
            assert verdict(machine, number) == ALLOW


def test_a_machine_without_a_table_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seccomp.platform, "machine", lambda: "riscv64")
    with pytest.raises(SandboxFailure, match="riscv64") as caught:
        seccomp.require_filter()
    assert caught.value.kind == "no-filter"
