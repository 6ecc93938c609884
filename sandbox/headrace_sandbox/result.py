"""Limits and result of an execution.

* A result rests on the supervisor's observations from outside, never on text that the program wrote.
* Output is bytes; the head and tail of a long output are kept, and ``truncated`` is True.
* The result of a program that ran into a limit names the limit; a fault of ours raises an error instead.
* A limit that bounds nothing, or under which nothing can run, is refused before anything is made.
"""

from __future__ import annotations

import sys
from typing import Literal

import msgspec

from headrace.errors import SandboxFailure

LimitName = Literal["time", "cpu", "memory", "pids", "output", "disk"]
"""The limit that ended a program, or that it ran into before it failed."""

Fault = Literal["", "program", "limit"]
"""The cause of a failure: the program, or a limit. A fault of ours is a SandboxFailure, not a result."""

LONGEST_S = sys.float_info.max
"""The longest time: any finite number. Infinity and NaN are refused."""

WHOLE_S, WHOLE_FACTOR = 300.0, 20.0
"""``whole_s`` is the first plus so many times ``wall_s``."""

MOST = 1 << 62
"""The largest size; the kernel accepts twice as much, and runtimes add their own needs."""

MOST_CPU_S = 1 << 33
"""The longest processor time: the kernel counts it in 64-bit nanoseconds, and a longer one overflows, even to zero."""

RANGES: dict[str, tuple[float, float]] = {
    "wall_s": (sys.float_info.min, LONGEST_S),
    "cpu_s": (sys.float_info.min, LONGEST_S),
    "memory_bytes": (1, MOST),
    "pids": (1, MOST),
    "cpus": (0.01, 1 << 16),  # the smallest quota that the kernel accepts
    "kept_bytes": (0, MOST),
    "output_bytes": (0, MOST),
    "disk_bytes": (1, MOST),  # to the kernel, 0 means unlimited
    "file_bytes": (0, 1 << 40),
    "open_files": (16, 1024),
}
"""Minimum and maximum of each limit."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of an execution. The defaults suit unit tests and tool calls. Raises SandboxFailure ``bad-limit`` for a
    value outside ``RANGES``.

    ``wall_s``: time that the program computes or sleeps from its start on; waiting for a sandbox, making one, and
    waiting for processors that others use do not count. ``whole_s`` bounds all of it.
    ``cpu_s``: processor time of all its processes; None: bounded by ``wall_s`` only. ``memory_bytes``: of all its
    processes together, files in memory included. ``pids``: processes and threads at a time. ``cpus``: share of
    processors, 0.5 is half of one. ``kept_bytes``: bytes of each output stream that the result keeps.
    ``output_bytes``: bytes of both streams, beyond which it is killed. ``disk_bytes``: size of its scratch folder.
    ``file_bytes``: size of one file.
    """

    wall_s: float = 10.0
    cpu_s: float | None = None
    memory_bytes: int = 256 << 20
    pids: int = 64
    cpus: float = 1.0
    kept_bytes: int = 64 << 10
    output_bytes: int = 64 << 20
    disk_bytes: int = 16 << 20
    file_bytes: int = 16 << 20
    open_files: int = 256

    def __post_init__(self) -> None:
        for name, (least, most) in RANGES.items():
            value = getattr(self, name)
            if value is not None:
                check_range(name, value, least, most)

    @property
    def whole_s(self) -> float:
        """The longest time from the start of the program on a busy machine; after it, it ends with a failure of
        ours."""
        return min(LONGEST_S, WHOLE_S + WHOLE_FACTOR * self.wall_s)


def check_range(name: str, value: float, least: float, most: float) -> None:
    """Raise SandboxFailure ``bad-limit`` for a value outside the range, or not a number."""
    if not least <= value <= most:
        bounds = f"from {least:g} to {most:g}" if most < MOST else "above 0" if 0 < least < 1 else f"at least {least:g}"
        raise SandboxFailure(
            f"{name} is {value!r}, and must be {bounds}{'' if most < LONGEST_S else ', and finite'}.",
            kind="bad-limit",
            retryable=False,
        )


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """Output of one stream. ``head`` and ``tail``: its first and last bytes; if nothing was omitted, all of it is in
    ``head``. ``total_bytes``: the number of written bytes."""

    head: bytes = b""
    tail: bytes = b""
    total_bytes: int = 0

    @property
    def truncated(self) -> bool:
        """True if bytes between head and tail were omitted."""
        return self.total_bytes > len(self.head) + len(self.tail)

    @property
    def text(self) -> str:
        """The output as text: invalid UTF-8 becomes U+FFFD, and a line states the number of omitted bytes."""
        if not self.truncated:
            return (self.head + self.tail).decode(errors="replace")
        omitted = self.total_bytes - len(self.head) - len(self.tail)
        head, tail = self.head.decode(errors="replace"), self.tail.decode(errors="replace")
        return f"{head}\n[… {omitted} bytes left out …]\n{tail}"


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Resources that all processes of an execution used, as the kernel counted them; None where they are not counted.

    ``memory_kills``: processes that the kernel killed for memory. ``refused_pids``: forks that it refused.
    ``disk_full``: its scratch folder was full when it failed, in bytes or in number of files.
    """

    cpu_s: float | None = None
    peak_memory_bytes: int | None = None
    memory_kills: int = 0
    refused_pids: int = 0
    disk_full: bool = False


class Isolation(msgspec.Struct, frozen=True, kw_only=True):
    """Isolation of a program from this machine. ``runtime``: its name. ``versions``: versions of its parts. ``active``:
    the limits that were enforced, and no others. ``is_sandbox``: False if nothing isolated the program, which ran as
    this user."""

    runtime: str
    versions: dict[str, str]
    active: list[str]
    is_sandbox: bool = True


class ExecResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one execution. Either ``exit_code`` or ``signal`` is set; neither if it was killed for time or output.

    ``queue_s``, ``start_s`` and ``wall_s`` are separate: waiting for a sandbox, making one, and the program itself.
    ``work_s``: the part of ``wall_s`` that counted for its limit; None where it is not measured.
    ``lost``: the reason that the sandbox or session cannot be used any more, if the program caused that; it is then the
    program's fault, and exit code and signal may be unknown.
    """

    exit_code: int | None
    signal: int | None
    stdout: Output
    stderr: Output
    limit: LimitName | None
    wall_s: float
    start_s: float
    queue_s: float = 0.0
    work_s: float | None = None
    lost: str | None = None
    usage: Usage
    isolation: Isolation

    @property
    def fault(self) -> Fault:
        """The cause of the program's failure; empty if it ended with 0."""
        if self.lost is not None:
            return "program"
        if self.limit is not None and self.exit_code != 0:
            return "limit"
        return "" if self.exit_code == 0 else "program"
