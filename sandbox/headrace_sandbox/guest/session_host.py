"""Runs inside a sandbox: the host of one session, a shell or an interpreter that lives on.

* Where a cell ends is told over a socket on which the kernel names the sender, together with a word that is new for
  each cell: neither what a cell prints nor what it writes to any descriptor can end it.
* A cell's output has pipes of its own. What is written to them after its end is read and dropped, so that who wrote it
  goes on, and the next cell's output is its own.
* A cell that is stopped is interrupted; then what it started is killed, and what is written from then on is dropped;
  then the shell is killed, and a new one takes its place.
* A shell that stops itself is made to go on. One that ends is replaced for the next cell, and the end of its cell says
  so, or that of the next one where it ended between two.
* What a program can do to the host, by filling its folder or holding its pipes, costs the session, and not the sandbox.

It talks in frames: a byte that says what it is, four bytes of length, and that many bytes. It gets ``c`` (a cell),
``i`` (interrupt it), ``s`` (stop it), and gives ``o`` and ``e`` (output), and ``x`` (the end: JSON).
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
from headrace_sandbox.guest.isolation import PR_SET_CHILD_SUBREAPER, default_signals, is_full, prctl

TYPE_CHECKING = False  # the module `typing` would be half a megabyte in every sandbox
if TYPE_CHECKING:
    from typing import Any

HEAD = struct.Struct("=cI")
READ_BYTES = 64 << 10

STOP_S = ((0.0, "interrupt"), (0.5, "kill"), (0.6, "ask"), (0.9, "kill"), (1.0, "ask"), (1.6, "end"))
"""Actions to stop a cell, each with its delay."""

KILL_ROUNDS, KILL_ROUND_S = 200, 0.002


class Cell:
    """A cell that runs. ``before``: what ran in the session when it began."""

    def __init__(self, word: str, stdout: int, stderr: int, before: set[int]) -> None:
        self.word = word
        self.stdout, self.stderr = stdout, stderr
        self.before = before


class Host:
    """Serves one session. ``become_program`` is called in the process of the shell: it gives up its privileges."""

    def __init__(
        self, request: dict[str, Any], channel: int, folder: str, become_program: Callable[[], None], output: int = -1
    ) -> None:
        self._request = request
        self._channel, self._output = channel, channel if output < 0 else output
        self._folder = folder
        self._become_program = become_program
        self._buffer = b""
        self._cell: Cell | None = None
        self._is_muted = False
        self._steps: list[tuple[float, str]] = []
        self._why = ""
        self._shell: Bash | Python | None = None
        self._poll = select.poll()
        self._status, self._shells_status = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._status.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._status.setblocking(False)

    def serve(self) -> None:
        """Serve until the other side closes."""
        wakes, woken = os.pipe()
        for descriptor in (wakes, woken):
            os.set_blocking(descriptor, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        for descriptor in (self._channel, self._status.fileno(), wakes):
            self._poll.register(descriptor, select.POLLIN)
        self._start()
        while True:
            for descriptor, _ in self._poll.poll(self._patience_ms()):
                if descriptor == self._channel:
                    if not self._take_frames():
                        return
                elif descriptor == self._status.fileno():
                    self._hear()
                elif descriptor == wakes:
                    os.read(wakes, READ_BYTES)
                else:
                    self._read(descriptor)
            self._reap()
            self._stop_further()

    # The shell ----------------------------------------------------------------------------------------------------

    def _start(self) -> Bash | Python:
        """Make the shell, or make it anew."""
        kind = Python if self._request["kind"] == "python" else Bash
        self._shell = kind(self._request, self._folder, self._shells_status, self._become_program)
        return self._shell

    def _begin(self, text: bytes) -> None:
        self._reap()  # a shell that ended a moment ago shall not get it
        shell = self._shell or self._start()
        word = os.urandom(16).hex()
        before = descendants() - {shell.pid}
        try:
            stdout, stderr = shell.begin(text, word)
        except OSError as error:  # its folder was filled, or too many hold its pipes
            self._why = f"a cell could not be given to {shell.name}: {error.strerror}"
            self._end_shell()
            self._tell_end(1)
            return
        self._cell, self._is_muted = Cell(word, stdout, stderr, before), False
        for descriptor in (stdout, stderr):
            self._poll.register(descriptor, select.POLLIN)

    def _hear(self) -> None:
        """Whatever claims that the cell ended: it is believed if the shell itself says it, with the cell's word."""
        try:
            data, ancillary, _, _ = self._status.recvmsg(256, socket.CMSG_SPACE(12))
        except BlockingIOError:
            return
        sender = next((struct.unpack("3i", found)[0] for _, _, found in ancillary), 0)
        word, _, status = data.partition(b" ")
        cell, shell = self._cell, self._shell
        if cell is None or shell is None or sender != shell.pid or word != cell.word.encode() or not status.isdigit():
            return
        shell.ended()
        self._end(cell, int(status) & 0xFF)

    def _end(self, cell: Cell, status: int) -> None:
        self._forward_all(cell)
        self._cell, self._steps = None, []
        for descriptor in (cell.stdout, cell.stderr):
            self._poll.register(descriptor, select.POLLIN)  # until nobody holds it
        self._tell_end(status)

    def _tell_end(self, status: int) -> None:
        full = status != 0 and is_full(".")  # this stays where it began, in the scratch folder
        self._tell(b"x", json.dumps({"status": status, "lost": self._why, "disk_full": full}).encode())
        self._why = ""

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                return
            if not pid:
                return
            if self._shell is not None and pid == self._shell.pid:
                self._of_shell(self._shell, status)

    def _of_shell(self, shell: Bash | Python, status: int) -> None:
        if os.WIFSTOPPED(status):
            os.kill(shell.pid, signal.SIGCONT)
            return
        code = os.waitstatus_to_exitcode(status)
        how = f"ended with {code}" if code >= 0 else f"was ended by signal {-code}"
        self._why = self._why or f"{shell.name} {how}"
        self._end_shell()
        if self._cell is not None:
            self._end(self._cell, code)

    def _end_shell(self) -> None:
        """Kill the shell and all that it left; the next cell starts another."""
        if self._shell is not None:
            self._shell.close()
        self._shell = None
        for _ in range(KILL_ROUNDS):
            self._reap()
            if not (left := descendants()):
                break
            kill(left)  # who forks meanwhile is found in the next round
            time.sleep(KILL_ROUND_S)

    # Output -------------------------------------------------------------------------------------------------------

    def _read(self, descriptor: int) -> None:
        try:
            data = os.read(descriptor, READ_BYTES)
        except BlockingIOError:
            return
        cell = self._cell
        if cell is not None and descriptor in (cell.stdout, cell.stderr) and data:
            if not self._is_muted:
                self._tell(b"o" if descriptor == cell.stdout else b"e", data)
        elif not data:
            self._poll.unregister(descriptor)
            if cell is None or descriptor not in (cell.stdout, cell.stderr):
                os.close(descriptor)

    def _forward_all(self, cell: Cell) -> None:
        """Forward what a cell wrote until now, without waiting for processes that still hold its pipes."""
        for descriptor, kind in ((cell.stdout, b"o"), (cell.stderr, b"e")):
            size = array.array("i", [0])
            fcntl.ioctl(descriptor, termios.FIONREAD, size)
            left = size[0]
            while left > 0:
                try:
                    data = os.read(descriptor, min(left, READ_BYTES))
                except BlockingIOError:
                    break  # the program itself reads there
                left -= len(data)
                if not self._is_muted:
                    self._tell(kind, data)

    # The other side -----------------------------------------------------------------------------------------------

    def _take_frames(self) -> bool:
        data = os.read(self._channel, READ_BYTES)
        self._buffer += data
        while len(self._buffer) >= HEAD.size:
            kind, size = HEAD.unpack_from(self._buffer)
            if len(self._buffer) < HEAD.size + size:
                break
            payload, self._buffer = self._buffer[HEAD.size : HEAD.size + size], self._buffer[HEAD.size + size :]
            if kind == b"c":
                self._begin(payload)
            elif kind == b"i" and self._cell is not None:
                self._interrupt(self._cell)
            elif self._cell is not None:
                now = time.monotonic()
                self._steps = [(now + after_s, step) for after_s, step in STOP_S]
        return bool(data)

    def _tell(self, kind: bytes, payload: bytes) -> None:
        data = memoryview(HEAD.pack(kind, len(payload)) + payload)
        while data:
            data = data[os.write(self._output, data) :]

    def _patience_ms(self) -> float | None:
        return max(0.0, self._steps[0][0] - time.monotonic()) * 1000 if self._steps else None

    def _stop_further(self) -> None:
        while self._steps and self._steps[0][0] <= time.monotonic():
            step = self._steps.pop(0)[1]
            cell, shell = self._cell, self._shell
            if cell is None or shell is None:
                return
            if step == "kill":
                self._forward_all(cell)
                self._is_muted = True  # a shell goes on with what came after that which was killed
                kill(descendants() - cell.before - {shell.pid})
            if step in ("interrupt", "kill"):
                self._interrupt(cell)
            elif step == "ask":
                shell.ask(cell.word)
            elif step == "end":
                self._why = f"{shell.name} did not come back when it was interrupted, and was killed"
                kill({shell.pid})

    def _interrupt(self, cell: Cell) -> None:
        """Interrupt the shell's group, as Ctrl-C does, but not what earlier cells left running."""
        shell = self._shell
        if shell is None:
            return
        for pid in (shell.pid, *(descendants() - cell.before)):
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(pid) == shell.pid:
                    os.kill(pid, signal.SIGINT)


class Bash:
    """An interactive shell without a terminal: interrupted, it gives up a cell and goes on."""

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
                be_alone()
                null = os.open("/dev/null", os.O_RDWR)
                said, heard = os.dup(status.fileno()), os.dup(reads)
                for target, descriptor in enumerate((heard, null, null, said)):
                    os.dup2(descriptor, target, inheritable=True)
                become_program()
                default_signals()
                os.execvpe(self.command[0], self.command, request["environment"])
            finally:
                os._exit(127)
        os.close(reads)

    def begin(self, text: bytes, word: str) -> tuple[int, int]:
        """Begin a cell; gives the ends of its output."""
        os.makedirs(self._folder, exist_ok=True)  # where programs are of this user they can remove it
        with open(f"{self._folder}/cell", "wb") as file:
            file.write(text)
        pipes = [f"{self._folder}/{name}" for name in ("out", "err")]
        ends = []
        self.ended()
        try:
            for pipe in pipes:
                os.mkfifo(pipe, 0o600)
                ends.append(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK))
        except OSError:
            for end in ends:
                os.close(end)
            raise
        # What the cell starts gets these three descriptors of the shell, and no others.
        self._type(f"\\builtin . {self._folder}/cell </dev/null >{pipes[0]} 2>{pipes[1]} 3>&-")
        self.ask(word)
        return ends[0], ends[1]

    def ended(self) -> None:
        """A cell ended: nobody opens its pipes again."""
        for name in ("out", "err"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{self._folder}/{name}")

    def ask(self, word: str) -> None:
        """Let it say that it is at its prompt, and what its last status was."""
        self._type(f"\\builtin printf '{word} %d' \"$?\" >&{self.status_descriptor}")

    def _type(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # it is gone, and will be found so
            os.write(self._lines, f"{line}\n".encode())

    def close(self) -> None:
        os.close(self._lines)


class Python:
    """An interpreter: a fork of this one."""

    name = "the interpreter"

    def __init__(
        self, request: dict[str, Any], folder: str, status: socket.socket, become_program: Callable[[], None]
    ) -> None:
        self._cells, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                be_alone()
                become_program()
                python_cells.interpret(its, status, request["environment"])
            finally:
                os._exit(1)
        its.close()

    def begin(self, text: bytes, word: str) -> tuple[int, int]:
        """Begin a cell; gives the ends of its output."""
        content = os.memfd_create("cell")
        with os.fdopen(os.dup(content), "wb") as file:
            file.write(text)
        stdout, its_stdout = os.pipe()
        stderr, its_stderr = os.pipe()
        its = [content, its_stdout, its_stderr]
        with contextlib.suppress(OSError):  # it is gone, and will be found so
            socket.send_fds(self._cells, [word.encode()], its)
        for descriptor in its:
            os.close(descriptor)
        for descriptor in (stdout, stderr):
            os.set_blocking(descriptor, False)
        return stdout, stderr

    def ended(self) -> None:
        """A cell ended."""

    def ask(self, word: str) -> None:
        """Do nothing: an interpreter reports the end of a cell by itself."""

    def close(self) -> None:
        self._cells.close()


def be_alone() -> None:
    """Lead a process group of its own and handle no signal, in a child that will be the shell."""
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
    found: set[int] = set()
    todo = [os.getpid()]
    while todo:
        below = children.get(todo.pop(), [])
        found.update(below)
        todo.extend(below)
    return found


def kill(pids: set[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def main() -> None:
    """Serve on standard input and output. Arguments: the request (JSON: ``kind`` and ``environment``), and a folder of
    its own."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    Host(json.loads(sys.argv[1]), os.dup(0), sys.argv[2], lambda: None, os.dup(1)).serve()
    kill(descendants())
