"""Instructions of the pool's core to the shell. Durations are in seconds."""

from __future__ import annotations

import msgspec

from headrace_sandbox.pool.messages import SandboxKind


class Start(msgspec.Struct, frozen=True):
    """Start the execution of a request. ``queue_s``: the time that it waited."""

    request: str
    queue_s: float


class LeaseSandbox(msgspec.Struct, frozen=True):
    """Lease this sandbox to the request. ``start_s``: the part of the wait in which it was made or reset."""

    request: str
    lease: str
    sandbox: str
    queue_s: float
    start_s: float
    ttl_s: float


class Refuse(msgspec.Struct, frozen=True):
    """Refuse a request, with the reason. ``after_s``: the time after which another attempt is worthwhile."""

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


class Reset(msgspec.Struct, frozen=True):
    """Reset a sandbox."""

    sandbox: str


class Close(msgspec.Struct, frozen=True):
    """Close a sandbox."""

    sandbox: str


class Revoke(msgspec.Struct, frozen=True):
    """End an expired lease: its holder must not use the sandbox any more."""

    lease: str
    sandbox: str


Instruction = Start | LeaseSandbox | Refuse | Make | Reset | Close | Revoke
