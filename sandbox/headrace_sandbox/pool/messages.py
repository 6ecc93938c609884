"""Requests to the pool's core, and its instructions to the shell.

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
    many are made and closed at a time; separate, so that neither can block the other. ``idle_s``: after which an idle
    sandbox is closed, beyond the warm ones of its template. ``ttl_s``: longest lease; a sandbox lives
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
    """Bounds of one template: how many sandboxes are kept warm, and how many may exist."""

    least: int = 0
    most: int = 16


class SandboxKind(msgspec.Struct, frozen=True):
    """A kind of sandbox. ``name`` identifies it, ``memory_bytes`` is its limit, ``template`` is for the shell only."""

    name: str
    memory_bytes: int
    template: Any = None


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A request to run something. ``owner``: on whose account, a run; owners share fairly. ``wait_s``: how long it may
    wait. ``kind``: of the sandbox to lease for ``ttl_s``; None: one execution, which has its own."""

    id: str
    owner: str
    wait_s: float
    memory_bytes: int
    kind: SandboxKind | None = None
    ttl_s: float = 0.0


class NotMade(msgspec.Struct, frozen=True):
    """The failure to make a sandbox."""

    kind: str
    detail: str
    retryable: bool


# Instructions to the shell -------------------------------------------------------------------------------------


class Start(msgspec.Struct, frozen=True):
    """Run the execution of a request."""

    request: str
    queue_s: float


class Hand(msgspec.Struct, frozen=True):
    """Lease this sandbox to the request. ``start_s``: the part of the wait in which it was made or reset."""

    request: str
    lease: str
    sandbox: str
    queue_s: float
    start_s: float
    ttl_s: float


class Refuse(msgspec.Struct, frozen=True):
    """Refuse a request, with the reason. ``after_s``: when another attempt is worthwhile."""

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
    """End an expired lease: its holder must not use the sandbox any more."""

    lease: str
    sandbox: str


Instruction = Start | Hand | Refuse | Make | Clean | Close | Revoke


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts for users and metrics. ``sandboxes``: number by state."""

    waiting: int
    running: int
    leases: int
    memory_bytes: int
    sandboxes: dict[str, int]
