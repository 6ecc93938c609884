"""Settings and requests of the pool's core, and its counts.

Times are seconds of a clock that never goes back; durations end in ``_s``.
"""

from __future__ import annotations

from typing import Any

import msgspec


class PoolSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one host.

    ``running``: executions at a time, beside those in leased sandboxes. ``memory_bytes``: the largest sum of the memory
    limits of all executions and sandboxes, including warm ones. ``waiting``: the most requests that may wait; beyond
    them the answer is ``busy``. ``sandboxes``: the most sandboxes of one template, unless it has bounds of its own.
    ``making``, ``closing``: the most sandboxes that are made and closed at a time; separate, so that neither can block
    the other. ``idle_s``: the time after which an idle sandbox is closed, beyond the warm ones of its template.
    ``ttl_s``: the longest lease; a sandbox lives at most twice as long, so that a fresh one can always be leased.
    ``reuse``: True if a sandbox that was reset is leased again.
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
    """Bounds of one template. ``least``: the sandboxes that are kept warm. ``most``: those that may exist."""

    least: int = 0
    most: int = 16


class SandboxKind(msgspec.Struct, frozen=True):
    """A kind of sandbox. ``name`` identifies it, ``memory_bytes`` is its limit, ``template`` is for the shell only."""

    name: str
    memory_bytes: int
    template: Any = None


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A request to run something. ``owner``: the run that it belongs to; owners share fairly. ``wait_s``: the longest
    wait. ``kind``: of the sandbox to lease for ``ttl_s``; None for one execution, which has a sandbox of its own."""

    id: str
    owner: str
    wait_s: float
    memory_bytes: int
    kind: SandboxKind | None = None
    ttl_s: float = 0.0


class MakeFailure(msgspec.Struct, frozen=True):
    """The failure to make a sandbox."""

    kind: str
    detail: str
    retryable: bool


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts for users and metrics. ``sandboxes``: number by state."""

    waiting: int
    running: int
    leases: int
    memory_bytes: int
    sandboxes: dict[str, int]
