"""Runs inside a persistent sandbox, as its process 1: starts and ends its commands and sessions.

* Each command and each session has its own process ids, with a process 1 that it cannot reach; when that ends,
  everything that was started with it ends. Files, network and shared memory are the sandbox's.
* The sandbox ends at its expiry by this process's own clock, and with the supervisor.
* Programs run without privileges, under the filter and the limits, and cannot see this process.

A request is one packet on standard input, a socket, with these descriptors: a JSON file with the request, a socket to
the supervisor, the ``group_entries`` entries of the sandbox's control group, and those that the request needs. On the
socket the new process 1 sends ``first``, with its credentials, and receives a byte. A process that the group must bound
sends ``member`` once it has entered (or waits to be added, if the group has no entries), or ``outside`` if it cannot
enter. Eight bytes report the end: the wait status, and 1 if the program failed with a full scratch folder. If they are
missing, it was killed.
"""

from __future__ import annotations

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
    check_call,
    drop_privileges,
    is_full,
    libc,
    make_mounts_private,
    make_read_only,
    mount_memory,
    mount_proc,
    prctl,
    restore_signals,
    set_rlimits,
    unshare_user,
)

TYPE_CHECKING = False  # the module `typing` would be half a megabyte in every sandbox
if TYPE_CHECKING:
    from typing import Any

SCRATCH, SHARED_MEMORY, SESSION = "/scratch", "/dev/shm", "/session"
MOST_DESCRIPTORS = 16  # in a request
SESSION_BYTES, SESSION_INODES = 4 << 20, 16  # for the text of a cell, and two pipes


class GuestRequest:
    """A request of the supervisor, with its descriptors."""

    def __init__(self, descriptors: list[int], filter_: bytes) -> None:
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        with os.fdopen(descriptors[0], "rb") as file:
            self.content: dict[str, Any] = json.loads(file.read())
        self.supervisor = socket.socket(fileno=descriptors[1])
        entries_end = 2 + self.content["group_entries"]
        self.entries, self.descriptors = descriptors[2:entries_end], descriptors[entries_end:]
        self.filter = filter_

    def become_program(self) -> None:
        """Set the limits and drop all privileges, in a process that will be the program."""
        self.supervisor.send(b"member" if self.enter_group() else b"outside")
        if not self.supervisor.recv(1):
            os._exit(1)
        self.supervisor.close()
        check_call(libc.unshare(CLONE_NEWCGROUP), "unshare")  # hides the name of its group, which it has entered
        prctl(PR_SET_DUMPABLE, 1)
        set_rlimits(self.content["rlimits"])
        drop_privileges(self.filter)

    def enter_group(self) -> bool:
        """Enter the control group by its entries; this process has one thread. Returns False if the kernel refuses."""
        try:
            for entry in self.entries:
                os.write(entry, b"0")
                os.close(entry)
        except OSError:
            return False
        return True


def serve(requests: socket.socket, filter_: bytes, deadline: float) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps all children, including orphans
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    while (remaining_s := deadline - time.monotonic()) > 0:
        if not poll.poll(min(remaining_s, 3600.0) * 1000):
            continue
        packet, descriptors, _, _ = socket.recv_fds(requests, 1, MOST_DESCRIPTORS)
        if not packet:
            return
        if os.fork() == 0:
            make_namespace(requests, descriptors, filter_)
        for descriptor in descriptors:
            os.close(descriptor)


def make_namespace(requests: socket.socket, descriptors: list[int], filter_: bytes) -> None:
    """Make namespaces of process ids and mounts, with a process 1 for the request."""
    status = 1
    try:
        requests.close()
        check_call(libc.unshare(CLONE_NEWPID | CLONE_NEWNS), "unshare")
        if os.fork() == 0:
            run_init(GuestRequest(descriptors, filter_))
        status = 0
    finally:
        os._exit(status)


def run_init(request: GuestRequest) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request.supervisor.send(b"first")
    if not request.supervisor.recv(1):
        return
    mount_proc()
    os.chdir(SCRATCH)
    if request.content["do"] == "session":
        mount_memory(SESSION, SESSION_BYTES, SESSION_INODES)
        os.dup2(os.open("/dev/null", os.O_RDWR), 2)
        session_host.GuestSessionHost(
            request.content, request.descriptors[0], SESSION, lambda: become_shell(request)
        ).serve()
        return
    program = os.fork()
    if program == 0:
        run_program(request)
    for descriptor in (0, 1, 2, *request.descriptors, *request.entries):
        os.close(descriptor)
    while True:
        pid, status = os.wait()
        if pid == program:
            request.supervisor.send(struct.pack("=II", status, status != 0 and is_full(SCRATCH)))
            return


def become_shell(request: GuestRequest) -> None:
    """Become a session's shell, which can only read the host's folder and write to its pipes."""
    check_call(libc.unshare(CLONE_NEWNS), "unshare")
    make_read_only(SESSION)
    request.become_program()


def run_program(request: GuestRequest) -> None:
    """Run a command, or a file operation with the same rights."""
    status = 127
    try:
        os.setsid()
        for target, descriptor in enumerate(request.descriptors):
            os.dup2(descriptor, target, inheritable=True)
            os.close(descriptor)
        request.become_program()
        if request.content["do"] == "files":
            status = files.run(request.content)
        else:
            execute(request.content)
    except OSError as error:
        os.write(2, f"{request.content.get('arguments', ['files'])[0]}: {error.strerror}\n".encode())
        status = 127 if isinstance(error, FileNotFoundError) else 126
    finally:
        os._exit(status)


def execute(request: dict[str, Any]) -> None:
    restore_signals()
    os.execvpe(request["arguments"][0], request["arguments"], request["environment"])


def main() -> None:
    filter_descriptor, ttl_s, disk_bytes, inodes = sys.argv[1:]
    deadline = time.monotonic() + float(ttl_s)
    with os.fdopen(int(filter_descriptor), "rb") as file:
        filter_ = file.read()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 does not receive it
    unshare_user(CLONE_NEWNS)
    make_mounts_private()
    for folder in (SCRATCH, SHARED_MEMORY):
        mount_memory(folder, int(disk_bytes), int(inodes))
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(PR_SET_DUMPABLE, 0)  # so that programs cannot write into this memory
    requests = socket.socket(fileno=os.dup(0))
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    requests.send(b"ready")
    for descriptor in (1, 2):
        os.dup2(null, descriptor)
    gc.collect()
    libc.malloc_trim(0)
    gc.freeze()  # so that a child's collector does not copy shared pages
    serve(requests, filter_, deadline)
