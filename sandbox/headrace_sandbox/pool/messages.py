"""What the pool's core is asked, and what it tells its shell to do.

Times are seconds of a clock that never goes back; durations end in ``_s``.
"""

from __future__ import annotations

from typing import Any

import msgspec


class PoolSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one host.

    ``running``: executions at a time, beside those in leased sandboxes. ``memory_bytes``: sum of the memory limits of
    what runs and of all sandboxes, warm ones too. ``waiting``: requests that may wait; beyond them the answer is
    ``busy``. ``sandboxes``: of one template at a time, unless it has bounds of its own. ``making``, ``closing``: how
    many are made and closed at a time; apart, so that neither can wait for the other. ``idle_s``: after which a sandbox
    that nobody asked for is closed, beyond the warm ones of its template. ``ttl_s``: longest lease; a sandbox lives
    twice as long at most, so that a fresh one can always be leased. ``reuse``: whether one that was reset is handed on.
    """

    running: int = 4
    memory_bytes: int = 4 << 30
    waiting: int = 1024
    sandboxes: int = 16
    making: int = 4
    closing: int = 8
    idle_s: float = 60.0
    ttl_s: float = 3600.0
    reuse: bool = True


class WarmBounds(msgspec.Struct, frozen=True, kw_only=True):
    """Of one template: how many sandboxes are kept warm, and how many there may be."""

    least: int = 0
    most: int = 16


class SandboxKind(msgspec.Struct, frozen=True):
    """A kind of sandbox. ``name`` tells it from others, ``memory_bytes`` is its limit, ``template`` the shell's."""

    name: str
    memory_bytes: int
    template: Any = None


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody wants to run something. ``owner``: for whom, a run; owners share fairly. ``wait_s``: how long it may
    wait. ``kind``: of the sandbox to lease for ``ttl_s``; None: one execution, which has its own."""

    id: str
    owner: str
    wait_s: float
    memory_bytes: int
    kind: SandboxKind | None = None
    ttl_s: float = 0.0


class NotMade(msgspec.Struct, frozen=True):
    """Why a sandbox could not be made."""

    kind: str
    detail: str
    retryable: bool


# What the shell does -------------------------------------------------------------------------------------------


class Start(msgspec.Struct, frozen=True):
    """Run the execution that was asked for."""

    request: str
    queue_s: float


class Hand(msgspec.Struct, frozen=True):
    """Lease this sandbox to whoever asked. ``start_s``: the part of the wait in which it was made or reset."""

    request: str
    lease: str
    sandbox: str
    queue_s: float
    start_s: float
    ttl_s: float


class Refuse(msgspec.Struct, frozen=True):
    """Tell whoever asked that it will not be, and why. ``after_s``: when asking again is worth it."""

    request: str
    kind: str
    detail: str
    retryable: bool
    after_s: float | None = None


class Make(msgspec.Struct, frozen=True):
    """Make a sandbox."""

    sandbox: str
    kind: SandboxKind
    ttl_s: float


class Clean(msgspec.Struct, frozen=True):
    """Reset a sandbox."""

    sandbox: str


class Close(msgspec.Struct, frozen=True):
    """Close a sandbox."""

    sandbox: str


class Revoke(msgspec.Struct, frozen=True):
    """A lease ran out: whoever has it must not use it any more."""

    lease: str
    sandbox: str


Instruction = Start | Hand | Refuse | Make | Clean | Close | Revoke


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """How things stand, for people and metrics. ``sandboxes``: by state."""

    waiting: int
    running: int
    leases: int
    memory_bytes: int
    sandboxes: dict[str, int]
