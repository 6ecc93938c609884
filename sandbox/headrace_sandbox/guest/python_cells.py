"""Runs inside a sandbox: the interpreter of a Python session.

* A cell finds the variables of the earlier ones. The value of a last expression is printed, as in a notebook.
* A cell ends with 0, with 1 after an exception, whose traceback is on standard error, or with the code that it passed
  to ``sys.exit``; the interpreter goes on.
* An interrupt raises KeyboardInterrupt in a running cell, and does nothing between cells.
"""

from __future__ import annotations

import builtins
import gc
import os
import signal
import socket
import sys
from types import FrameType

TYPE_CHECKING = False  # the module `typing` would be half a megabyte in every sandbox
if TYPE_CHECKING:
    from typing import Any

MOST_TOKEN_BYTES = 256

HERE = (lambda: None).__code__.co_filename


class Interrupts:
    """The handler of SIGINT, which interrupts only a running cell."""

    def __init__(self) -> None:
        self.in_cell = False
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.in_cell:
            raise KeyboardInterrupt


def run_cells(cells: socket.socket, status: socket.socket, environment: dict[str, str]) -> None:
    """Run cells to the end of the input. Each is a packet with its token and the descriptors of its text and output."""
    null = os.open("/dev/null", os.O_RDWR)
    for target in (0, 1, 2):
        os.dup2(null, target, inheritable=True)
    close_all_but({cells.fileno(), status.fileno(), null})
    gc.unfreeze()
    main = prepare(environment)
    own_pid = os.getpid()
    interrupts = Interrupts()
    number = 0
    while True:
        token, descriptors, _, _ = socket.recv_fds(cells, MOST_TOKEN_BYTES, 3)
        if not token:
            return
        number += 1
        text, *output = descriptors
        with open(text, "rb") as file:
            file.seek(0)
            source = file.read()
        for target, descriptor in enumerate(output, 1):
            os.dup2(descriptor, target, inheritable=True)
            os.close(descriptor)
        code = run(source, f"<cell {number}>", main, interrupts)
        if os.getpid() != own_pid:
            os._exit(code)  # a child that the cell forked ends with the cell
        for target in (1, 2):
            os.dup2(null, target, inheritable=True)
        status.send(token + b" %d" % code)


def close_all_but(kept_fds: set[int]) -> None:
    """Close the descriptors inherited from the host."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in kept_fds:
            try:
                os.close(int(name))
            except OSError:
                continue  # the descriptor of the listing itself


def prepare(environment: dict[str, str]) -> dict[str, Any]:
    """Make this process look newly started; returns the variables of its cells."""
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [""]
    open_streams()
    sys.path.insert(0, "")
    main = type(sys)("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]  # `site` defines them, and programs use them
    return main.__dict__


def open_streams() -> None:
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        errors = "surrogateescape" if number < 2 else "backslashreplace"
        setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", errors=errors, closefd=False))


def run(source: bytes, name: str, variables: dict[str, Any], interrupts: Interrupts) -> int:
    try:
        try:
            interrupts.in_cell = True
            execute(source, name, variables)
            return flush(0)
        except SystemExit as end:
            return flush(exit_code(end))
        except BaseException as error:  # noqa: BLE001 - the program's own, shown as Python shows it
            interrupts.in_cell = False
            print_traceback(error, source, name)
            return flush(1)
        finally:
            interrupts.in_cell = False
    except BaseException:  # noqa: BLE001 - a late interrupt, or closed output
        interrupts.in_cell = False
        open_streams()  # drops unwritten output, which must not reach the next cell
        return 1


def execute(source: bytes, name: str, variables: dict[str, Any]) -> None:
    import ast

    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec", dont_inherit=True), variables)
    if isinstance(last, ast.Expr):
        sys.displayhook(eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), variables))


def print_traceback(error: BaseException, source: bytes, name: str) -> None:
    """Print the traceback of an exception, without our own frames."""
    import linecache
    import traceback

    lines = source.decode(errors="replace").splitlines(keepends=True)
    linecache.cache[name] = (len(source), None, lines, name)
    printed = traceback.TracebackException.from_exception(error)
    printed.stack = traceback.StackSummary.from_list([frame for frame in printed.stack if frame.filename != HERE])
    for line in printed.format():
        sys.stderr.write(line)


def flush(code: int) -> int:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return code


def exit_code(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    sys.stderr.write(f"{end.code}\n")
    return 1
