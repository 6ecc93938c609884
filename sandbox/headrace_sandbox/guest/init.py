"""Runs inside a sandbox that lives on, as its process 1: starts what is asked for, and ends it.

* Each command and each session has process ids of its own, with a process 1 that it cannot reach; when that ends, all
  that was started ends with it. Files, network and shared memory are the sandbox's.
* Nothing of it runs longer than its time, by this process's own clock, nor longer than the supervisor.
* What it starts runs without privileges, under the filter and the limits; this process itself is out of its sight.

A request is one packet on standard input, a socket: descriptors of a file with the request, JSON, of a socket to the
supervisor, of the entries of the sandbox's control group (so many: ``group_entries``), and of what the request needs.
On that socket the process 1 of what was started says ``first``, with its credentials, and gets a byte; a process that
the group shall bound says ``member`` likewise, once it is in it if there are entries, or ``outside`` if it does not
come in; and eight bytes say how it ended: its wait status, and whether the scratch folder was full then, if it failed.
Without them it was killed.
"""

from __future__ import annotations

import array
import gc
import json
import os
import select
import signal
import socket
import struct
import sys
import time

from headrace_sandbox.guest import files, session_host
from headrace_sandbox.guest.isolation import (
    CLONE_NEWCGROUP,
    CLONE_NEWNS,
    CLONE_NEWPID,
    PR_SET_DUMPABLE,
    PR_SET_PDEATHSIG,
    default_signals,
    give_up_privileges,
    is_full,
    libc,
    limit,
    make_mounts_private,
    make_read_only,
    mount_memory,
    mount_proc,
    must,
    prctl,
    unshare_user,
)

TYPE_CHECKING = False  # the module `typing` would be half a megabyte in every sandbox
if TYPE_CHECKING:
    from typing import Any

SCRATCH, SHARED_MEMORY, SESSION = "/scratch", "/dev/shm", "/session"
MOST_DESCRIPTORS = 16  # of a request
SESSION_BYTES, SESSION_INODES = 4 << 20, 16  # for the text of a cell, and two pipes


class GuestRequest:
    """A request of the supervisor: ``do``, its descriptors, and its limits."""

    def __init__(self, descriptors: list[int], filter_: bytes) -> None:
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        with os.fdopen(descriptors[0], "rb") as file:
            self.request: dict[str, Any] = json.loads(file.read())
        self.supervisor = socket.socket(fileno=descriptors[1])
        first = 2 + self.request["group_entries"]
        self.entries, self.descriptors = descriptors[2:first], descriptors[first:]
        self.filter = filter_

    def become_program(self) -> None:
        """Set the limits and give up every privilege, in a process that will be the program."""
        self.supervisor.send(b"member" if self.has_entered() else b"outside")
        if not self.supervisor.recv(1):
            os._exit(1)
        self.supervisor.close()
        must(libc.unshare(CLONE_NEWCGROUP), "unshare")  # it is in its group now, whose name stays hidden
        prctl(PR_SET_DUMPABLE, 1)
        limit(self.request["rlimits"])
        give_up_privileges(self.filter)

    def has_entered(self) -> bool:
        """True if this process, which has one thread, is in the control group now, as far as it has entries."""
        try:
            for entry in self.entries:
                os.write(entry, b"0")
                os.close(entry)
        except OSError:
            return False
        return True


def serve(requests: socket.socket, filter_: bytes, deadline: float) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by the kernel, whoever's they were
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    while (left_s := deadline - time.monotonic()) > 0:
        if not poll.poll(min(left_s, 3600.0) * 1000):
            continue
        packet, ancillary, _, _ = requests.recvmsg(1, socket.CMSG_SPACE(4 * MOST_DESCRIPTORS))
        if not packet:
            return
        descriptors = array.array("i")
        for _level, _type, data in ancillary:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        if os.fork() == 0:
            in_child(requests, list(descriptors), filter_)
        for descriptor in descriptors:
            os.close(descriptor)


def in_child(requests: socket.socket, descriptors: list[int], filter_: bytes) -> None:
    """Make process ids and mounts of their own, and a process 1 in them."""
    status = 1
    try:
        requests.close()
        must(libc.unshare(CLONE_NEWPID | CLONE_NEWNS), "unshare")
        if os.fork() == 0:
            be_first(GuestRequest(descriptors, filter_))
        status = 0
    finally:
        os._exit(status)


def be_first(asked: GuestRequest) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    asked.supervisor.send(b"first")
    if not asked.supervisor.recv(1):
        return
    mount_proc()
    os.chdir(SCRATCH)
    if asked.request["do"] == "session":
        mount_memory(SESSION, SESSION_BYTES, SESSION_INODES)
        os.dup2(os.open("/dev/null", os.O_RDWR), 2)
        session_host.Host(asked.request, asked.descriptors[0], SESSION, lambda: be_shell(asked)).serve()
        return
    program = os.fork()
    if program == 0:
        be_program(asked)
    for descriptor in (0, 1, 2, *asked.descriptors, *asked.entries):
        os.close(descriptor)
    while True:
        pid, status = os.wait()
        if pid == program:
            asked.supervisor.send(struct.pack("=II", status, status != 0 and is_full(SCRATCH)))
            return


def be_shell(asked: GuestRequest) -> None:
    """Serve as a session's shell, which only reads the host's folder and writes to the pipes there."""
    must(libc.unshare(CLONE_NEWNS), "unshare")
    make_read_only(SESSION)
    asked.become_program()


def be_program(asked: GuestRequest) -> None:
    """A command, or what is done with files by the same rights."""
    status = 127
    try:
        os.setsid()
        for target, descriptor in enumerate(asked.descriptors):
            os.dup2(descriptor, target, inheritable=True)
            os.close(descriptor)
        asked.become_program()
        if asked.request["do"] == "files":
            status = files.run(asked.request)
        else:
            execute(asked.request)
    except OSError as error:
        os.write(2, f"{asked.request.get('arguments', ['files'])[0]}: {error.strerror}\n".encode())
        status = 127 if isinstance(error, FileNotFoundError) else 126
    finally:
        os._exit(status)


def execute(request: dict[str, Any]) -> None:
    default_signals()
    os.execvpe(request["arguments"][0], request["arguments"], request["environment"])


def main() -> None:
    filter_descriptor, ttl_s, disk_bytes, inodes = sys.argv[1:]
    deadline = time.monotonic() + float(ttl_s)
    with os.fdopen(int(filter_descriptor), "rb") as file:
        filter_ = file.read()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which a process 1 does not get
    unshare_user(CLONE_NEWNS)
    make_mounts_private()
    for folder in (SCRATCH, SHARED_MEMORY):
        mount_memory(folder, int(disk_bytes), int(inodes))
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(PR_SET_DUMPABLE, 0)  # so that nothing can write into this memory
    requests = socket.socket(fileno=os.dup(0))
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    requests.send(b"ready")
    for descriptor in (1, 2):
        os.dup2(null, descriptor)
    gc.collect()
    libc.malloc_trim(0)
    gc.freeze()  # so that a child's collector does not copy the pages of what is shared
    serve(requests, filter_, deadline)
