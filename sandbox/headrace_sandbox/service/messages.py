"""Messages between a client and the service: msgpack, since they contain bytes.

Durations are in seconds. Errors are problem bodies, as everywhere in Headrace; what is our fault is a SandboxFailure
with its kind.
"""

from __future__ import annotations

import msgspec

from headrace_sandbox.result import Isolation, Limits
from headrace_sandbox.runtimes.base import PythonProgram, SandboxCommand, SessionKind, Template

API = "/v1"

MEDIA_TYPE = "application/msgpack"


class RunRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Run a command or program in a fresh sandbox. Exactly one of ``command`` and ``program``. ``owner``: on whose
    account, a run; owners share fairly. ``wait_s``: how long it may wait for its turn."""

    command: SandboxCommand | None = None
    program: PythonProgram | None = None
    limits: Limits
    owner: str = ""
    wait_s: float


class OpenRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Lease a sandbox for ``ttl_s``."""

    template: Template
    ttl_s: float
    owner: str = ""
    wait_s: float


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """A leased sandbox. ``ttl_s``: the time that the lease was granted for."""

    lease: str
    isolation: Isolation
    queue_s: float
    start_s: float
    ttl_s: float


class CommandIn(msgspec.Struct, frozen=True, kw_only=True):
    """Run a command in a leased sandbox."""

    command: SandboxCommand
    limits: Limits


class SessionIn(msgspec.Struct, frozen=True, kw_only=True):
    """Begin a session."""

    kind: SessionKind


class CellIn(msgspec.Struct, frozen=True, kw_only=True):
    """Run a cell in a session."""

    cell: str
    limits: Limits


class At(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A path in a sandbox. ``most_bytes``: the most that is read. ``content``: bytes to write or unpack there."""

    path: str = ""
    most_bytes: int = 0
    content: bytes = b""


class Renewal(msgspec.Struct, frozen=True, kw_only=True):
    """The requested, or granted, time of a lease from now on."""

    ttl_s: float


class About(msgspec.Struct, frozen=True, kw_only=True):
    """The isolation of the service's runtime."""

    runtime: str
    isolation: Isolation
