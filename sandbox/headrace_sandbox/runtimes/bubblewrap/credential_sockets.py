"""Packet sockets that tell the sender of each packet, with this machine's process id for it."""

from __future__ import annotations

import os
import socket
import struct

CREDENTIALS = struct.Struct("3i")
"""Process id, user id and group id."""


def socket_pair_with_credentials() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets; the first one learns the sender of each packet, and does not block."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    ours.setblocking(False)
    return ours, theirs


def receive_with_sender(from_: socket.socket, most_bytes: int) -> tuple[bytes, int]:
    """The next packet and its sender; empty at the end, and 0 for an unknown sender. Raises BlockingIOError."""
    try:
        data, ancillary, _, _ = from_.recvmsg(most_bytes, socket.CMSG_SPACE(CREDENTIALS.size))
    except ConnectionError:
        return b"", 0
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            pid: int = CREDENTIALS.unpack(content)[0]
            return data, pid
    return data, 0


def open_pidfd(pid: int) -> int | None:
    """A descriptor of a sender; None if it is unknown or has ended."""
    try:
        return os.pidfd_open(pid) if pid else None
    except ProcessLookupError:
        return None
