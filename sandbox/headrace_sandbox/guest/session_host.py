"""Runs inside a sandbox: the host of one session, which is a persistent shell or interpreter.

* The end of a cell is reported over a socket on which the kernel names the sender, with a token that is new for each
  cell: nothing that a cell prints or writes to a descriptor can end it.
* A cell's output has its own pipes. Data written to them after its end is read and dropped, so that a writer goes on,
  and the next cell's output is its own.
* To stop a cell, it is interrupted; then its processes are killed, and later output is dropped; then the shell is
  killed and replaced.
* A shell that stops itself is continued. One that ends is replaced for the next cell; the end of the current cell, or
  of the next one, reports the loss.
* A program that harms the host, by filling its folder or holding its pipes, loses the session, and not the sandbox.

Frames have a kind (one byte), a length (four bytes) and content. The host receives ``c`` (a cell), ``i`` (interrupt
it), ``s`` (stop it), and sends ``o`` and ``e`` (output), and ``x`` (the end: JSON).
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import struct
import sys
import termios
import time
from collections.abc import Callable

from headrace_sandbox.guest import python_cells
from headrace_sandbox.guest.isolation import PR_SET_CHILD_SUBREAPER, is_full, prctl, restore_signals

TYPE_CHECKING = False  # the module `typing` would be half a megabyte in every sandbox
if TYPE_CHECKING:
    from typing import Any

FRAME_HEADER = struct.Struct("=cI")
READ_BYTES = 64 << 10

STOP_STEPS = ((0.0, "interrupt"), (0.5, "kill"), (0.6, "status"), (0.9, "kill"), (1.0, "status"), (1.6, "end"))
"""Steps to stop a cell, each with its delay."""

KILL_ROUNDS, KILL_ROUND_S = 200, 0.002


class Cell:
    """A running cell. ``earlier_pids``: the processes of the session when it began."""

    def __init__(self, token: str, stdout: int, stderr: int, earlier_pids: set[int]) -> None:
        self.token = token
        self.stdout, self.stderr = stdout, stderr
        self.earlier_pids = earlier_pids


class GuestSessionHost:
    """Serves one session. ``become_program`` is called in the shell's process, to drop its privileges."""

    def __init__(
        self, request: dict[str, Any], channel: int, folder: str, become_program: Callable[[], None], output: int = -1
    ) -> None:
        self._request = request
        self._channel, self._output = channel, channel if output < 0 else output
        self._folder = folder
        self._become_program = become_program
        self._buffer = b""
        self._cell: Cell | None = None
        self._drops_output = False
        self._steps: list[tuple[float, str]] = []
        self._loss_reason = ""
        self._shell: BashShell | PythonInterpreter | None = None
        self._poll = select.poll()
        self._status, self._shells_status = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._status.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._status.setblocking(False)

    def serve(self) -> None:
        """Serve until the supervisor closes the connection."""
        wake_reads, wake_writes = os.pipe()
        for descriptor in (wake_reads, wake_writes):
            os.set_blocking(descriptor, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(wake_writes, warn_on_full_buffer=False)
        for descriptor in (self._channel, self._status.fileno(), wake_reads):
            self._poll.register(descriptor, select.POLLIN)
        self._start()
        while True:
            for descriptor, _ in self._poll.poll(self._poll_timeout_ms()):
                if descriptor == self._channel:
                    if not self._handle_frames():
                        return
                elif descriptor == self._status.fileno():
                    self._read_status()
                elif descriptor == wake_reads:
                    os.read(wake_reads, READ_BYTES)
                else:
                    self._read(descriptor)
            self._reap()
            self._run_due_steps()

    # The shell ----------------------------------------------------------------------------------------------------

    def _start(self) -> BashShell | PythonInterpreter:
        """Start the shell, or a new one."""
        kind = PythonInterpreter if self._request["kind"] == "python" else BashShell
        self._shell = kind(self._request, self._folder, self._shells_status, self._become_program)
        return self._shell

    def _begin(self, text: bytes) -> None:
        self._reap()  # the cell must not go to a shell that has just ended
        shell = self._shell or self._start()
        token = os.urandom(16).hex()
        earlier_pids = descendants() - {shell.pid}
        try:
            stdout, stderr = shell.begin(text, token)
        except OSError as error:  # its folder is full, or too many processes hold its pipes
            self._loss_reason = f"a cell could not be given to {shell.name}: {error.strerror}"
            self._end_shell()
            self._send_end(1)
            return
        self._cell, self._drops_output = Cell(token, stdout, stderr, earlier_pids), False
        for descriptor in (stdout, stderr):
            self._poll.register(descriptor, select.POLLIN)

    def _read_status(self) -> None:
        """Read a report of the cell's end; it counts only if the shell itself sent it, with the cell's token."""
        try:
            data, ancillary, _, _ = self._status.recvmsg(256, socket.CMSG_SPACE(12))
        except BlockingIOError:
            return
        sender = next((struct.unpack("3i", content)[0] for _, _, content in ancillary), 0)
        token, _, status = data.partition(b" ")
        cell, shell = self._cell, self._shell
        if cell is None or shell is None or sender != shell.pid or token != cell.token.encode() or not status.isdigit():
            return
        shell.remove_pipes()
        self._end(cell, int(status) & 0xFF)

    def _end(self, cell: Cell, status: int) -> None:
        self._forward_all(cell)
        self._cell, self._steps = None, []
        for descriptor in (cell.stdout, cell.stderr):
            self._poll.register(descriptor, select.POLLIN)  # until its last writer closes it
        self._send_end(status)

    def _send_end(self, status: int) -> None:
        full = status != 0 and is_full(".")  # the current folder is still the scratch folder
        self._send(b"x", json.dumps({"status": status, "lost": self._loss_reason, "disk_full": full}).encode())
        self._loss_reason = ""

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                return
            if not pid:
                return
            if self._shell is not None and pid == self._shell.pid:
                self._handle_shell_status(self._shell, status)

    def _handle_shell_status(self, shell: BashShell | PythonInterpreter, status: int) -> None:
        if os.WIFSTOPPED(status):
            os.kill(shell.pid, signal.SIGCONT)
            return
        code = os.waitstatus_to_exitcode(status)
        description = f"ended with {code}" if code >= 0 else f"was ended by signal {-code}"
        self._loss_reason = self._loss_reason or f"{shell.name} {description}"
        self._end_shell()
        if self._cell is not None:
            self._end(self._cell, code)

    def _end_shell(self) -> None:
        """Kill the shell and all its processes; the next cell starts another."""
        if self._shell is not None:
            self._shell.close()
        self._shell = None
        for _ in range(KILL_ROUNDS):
            self._reap()
            if not (remaining := descendants()):
                break
            kill(remaining)  # the next round finds processes that were forked meanwhile
            time.sleep(KILL_ROUND_S)

    # Output -------------------------------------------------------------------------------------------------------

    def _read(self, descriptor: int) -> None:
        try:
            data = os.read(descriptor, READ_BYTES)
        except BlockingIOError:
            return
        cell = self._cell
        if cell is not None and descriptor in (cell.stdout, cell.stderr) and data:
            if not self._drops_output:
                self._send(b"o" if descriptor == cell.stdout else b"e", data)
        elif not data:
            self._poll.unregister(descriptor)
            if cell is None or descriptor not in (cell.stdout, cell.stderr):
                os.close(descriptor)

    def _forward_all(self, cell: Cell) -> None:
        """Forward a cell's output so far, without waiting for processes that still hold its pipes."""
        for descriptor, kind in ((cell.stdout, b"o"), (cell.stderr, b"e")):
            size = array.array("i", [0])
            fcntl.ioctl(descriptor, termios.FIONREAD, size)
            remaining = size[0]
            while remaining > 0:
                try:
                    data = os.read(descriptor, min(remaining, READ_BYTES))
                except BlockingIOError:
                    break  # the program itself reads from the pipe
                remaining -= len(data)
                if not self._drops_output:
                    self._send(kind, data)

    # The supervisor -----------------------------------------------------------------------------------------------

    def _handle_frames(self) -> bool:
        data = os.read(self._channel, READ_BYTES)
        self._buffer += data
        while len(self._buffer) >= FRAME_HEADER.size:
            kind, size = FRAME_HEADER.unpack_from(self._buffer)
            if len(self._buffer) < FRAME_HEADER.size + size:
                break
            payload, self._buffer = (
                self._buffer[FRAME_HEADER.size : FRAME_HEADER.size + size],
                self._buffer[FRAME_HEADER.size + size :],
            )
            if kind == b"c":
                self._begin(payload)
            elif kind == b"i" and self._cell is not None:
                self._interrupt(self._cell)
            elif self._cell is not None:
                now = time.monotonic()
                self._steps = [(now + after_s, step) for after_s, step in STOP_STEPS]
        return bool(data)

    def _send(self, kind: bytes, payload: bytes) -> None:
        data = memoryview(FRAME_HEADER.pack(kind, len(payload)) + payload)
        while data:
            data = data[os.write(self._output, data) :]

    def _poll_timeout_ms(self) -> float | None:
        return max(0.0, self._steps[0][0] - time.monotonic()) * 1000 if self._steps else None

    def _run_due_steps(self) -> None:
        while self._steps and self._steps[0][0] <= time.monotonic():
            step = self._steps.pop(0)[1]
            cell, shell = self._cell, self._shell
            if cell is None or shell is None:
                return
            if step == "kill":
                self._forward_all(cell)
                self._drops_output = True  # a shell continues after the command that was killed
                kill(descendants() - cell.earlier_pids - {shell.pid})
            if step in ("interrupt", "kill"):
                self._interrupt(cell)
            elif step == "status":
                shell.request_status(cell.token)
            elif step == "end":
                self._loss_reason = f"{shell.name} did not react to an interrupt, and was killed"
                kill({shell.pid})

    def _interrupt(self, cell: Cell) -> None:
        """Interrupt the shell's group, as Ctrl-C does, but not the processes of earlier cells."""
        shell = self._shell
        if shell is None:
            return
        for pid in (shell.pid, *(descendants() - cell.earlier_pids)):
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(pid) == shell.pid:
                    os.kill(pid, signal.SIGINT)


class BashShell:
    """An interactive shell without a terminal: an interrupt ends the cell, and not the shell."""

    name = "the shell"
    command = ("bash", "--noprofile", "--norc", "--noediting", "+m", "+H", "+o", "history", "-i")
    status_descriptor = 3

    def __init__(
        self, request: dict[str, Any], folder: str, status: socket.socket, become_program: Callable[[], None]
    ) -> None:
        self._folder = folder
        reads, self._lines = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                prepare_child()
                null = os.open("/dev/null", os.O_RDWR)
                status_fd, lines_fd = os.dup(status.fileno()), os.dup(reads)
                for target, descriptor in enumerate((lines_fd, null, null, status_fd)):
                    os.dup2(descriptor, target, inheritable=True)
                become_program()
                restore_signals()
                os.execvpe(self.command[0], self.command, request["environment"])
            finally:
                os._exit(127)
        os.close(reads)

    def begin(self, text: bytes, token: str) -> tuple[int, int]:
        """Begin a cell; returns the descriptors to read its output from."""
        os.makedirs(self._folder, exist_ok=True)  # programs of the same user can remove it
        with open(f"{self._folder}/cell", "wb") as file:
            file.write(text)
        pipes = [f"{self._folder}/{name}" for name in ("out", "err")]
        ends = []
        self.remove_pipes()
        try:
            for pipe in pipes:
                os.mkfifo(pipe, 0o600)
                ends.append(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK))
        except OSError:
            for end in ends:
                os.close(end)
            raise
        # Processes of the cell get only these three descriptors of the shell.
        self._type(f"\\builtin . {self._folder}/cell </dev/null >{pipes[0]} 2>{pipes[1]} 3>&-")
        self.request_status(token)
        return ends[0], ends[1]

    def remove_pipes(self) -> None:
        """Remove the pipes of an ended cell."""
        for name in ("out", "err"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{self._folder}/{name}")

    def request_status(self, token: str) -> None:
        """Request a report of its last status, which it sends once it is at its prompt."""
        self._type(f"\\builtin printf '{token} %d' \"$?\" >&{self.status_descriptor}")

    def _type(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has ended, which SIGCHLD reports
            os.write(self._lines, f"{line}\n".encode())

    def close(self) -> None:
        os.close(self._lines)


class PythonInterpreter:
    """An interpreter: a fork of this one."""

    name = "the interpreter"

    def __init__(
        self, request: dict[str, Any], folder: str, status: socket.socket, become_program: Callable[[], None]
    ) -> None:
        self._cells, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                prepare_child()
                become_program()
                python_cells.run_cells(theirs, status, request["environment"])
            finally:
                os._exit(1)
        theirs.close()

    def begin(self, text: bytes, token: str) -> tuple[int, int]:
        """Begin a cell; returns the descriptors to read its output from."""
        content = os.memfd_create("cell")
        with os.fdopen(os.dup(content), "wb") as file:
            file.write(text)
        stdout, their_stdout = os.pipe()
        stderr, their_stderr = os.pipe()
        theirs = [content, their_stdout, their_stderr]
        with contextlib.suppress(OSError):  # it has ended, which SIGCHLD reports
            socket.send_fds(self._cells, [token.encode()], theirs)
        for descriptor in theirs:
            os.close(descriptor)
        for descriptor in (stdout, stderr):
            os.set_blocking(descriptor, False)
        return stdout, stderr

    def remove_pipes(self) -> None:
        """Do nothing: a cell has no named pipes."""

    def request_status(self, token: str) -> None:
        """Do nothing: an interpreter reports the end of a cell without a request."""

    def close(self) -> None:
        self._cells.close()


def prepare_child() -> None:
    """Lead a new process group and handle no signals, in a child that will be the shell."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def descendants() -> set[int]:
    """All processes below this one."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(name))
    pids: set[int] = set()
    unvisited = [os.getpid()]
    while unvisited:
        below = children.get(unvisited.pop(), [])
        pids.update(below)
        unvisited.extend(below)
    return pids


def kill(pids: set[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def main() -> None:
    """Serve on standard input and output. Arguments: the request (JSON: ``kind`` and ``environment``), and the host's
    folder."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    GuestSessionHost(json.loads(sys.argv[1]), os.dup(0), sys.argv[2], lambda: None, os.dup(1)).serve()
    kill(descendants())
